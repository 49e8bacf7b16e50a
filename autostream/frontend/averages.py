"""A moving average that follows a model: tensors of the same name belong together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from autostream.errors import TargetError


def check_average(average: nn.Module, model: nn.Module) -> None:
    """See that an average can follow its model: it has the same parameters, and a place for each of the buffers.

    Raises:
        TargetError: it cannot.

    Example:
        >>> check_average(nn.Sequential(nn.ReLU()), nn.Sequential(nn.Linear(2, 1)))
        Traceback (most recent call last):
            ...
        autostream.errors.TargetError: the average and the model differ in 0.weight, 0.bias...
    """
    found = _differing(average.named_parameters(), model.named_parameters())
    if names := differing_buffers(average, model):
        mine, its = ({name for name, _ in module.named_modules()} for module in (average, model))
        found += [name for name in names if name.rpartition(".")[0] not in mine & its]
    if found:
        raise TargetError(
            f"the average and the model differ in {', '.join(found[:3])}: the model has changed since the average was "
            "made; make a new one, copy.deepcopy(model), and a new train_step with it"
        )


def differing_buffers(average: nn.Module, model: nn.Module) -> list[str]:
    """The names of buffers that only one of the two has, or that have other shapes.

    Example:
        >>> model, average = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
        >>> average.running_mean = None
        >>> differing_buffers(average, model)
        ['running_mean']
    """
    return _differing(average.named_buffers(), model.named_buffers())


def _differing(one: Iterable[tuple[str, Tensor]], other: Iterable[tuple[str, Tensor]]) -> list[str]:
    mine, its = ({name: tensor.shape for name, tensor in named} for named in (one, other))
    return [name for name in mine | its if mine.get(name) != its.get(name)]


Pairs = Sequence[tuple[Tensor, Tensor]]
"""Of tensors of an average and those that they follow."""


def pairs_of(average: nn.Module, model: nn.Module) -> tuple[Pairs, Pairs]:
    """The parameters of an average and the model's, and the buffers that both have."""
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    return (
        [(own, parameters[name]) for name, own in average.named_parameters()],
        [(own, buffers[name]) for name, own in average.named_buffers()],
    )


@torch.no_grad()
def follow(average: nn.Module, model: nn.Module, decay: float) -> None:
    """Let an average's parameters come nearer to those of its model, and its buffers be copies of the model's.

    Buffers that are there in one of them alone, or in other shapes, come to be as the model has them.

    Args:
        average: what follows; :func:`check_average` finds no fault with it.
        model: what it follows.
        decay: the share of the average that stays.

    Example:
        >>> model, average = nn.Linear(1, 1), nn.Linear(1, 1)
        >>> for module, value in ((model, 1.0), (average, 0.0)):
        ...     _ = nn.init.constant_(module.weight, value)
        >>> follow(average, model, 0.75)
        >>> average.weight.item()
        0.25
    """
    buffers = dict(model.named_buffers())
    for name in differing_buffers(average, model):
        path, _, key = name.rpartition(".")
        persistent = key not in model.get_submodule(path)._non_persistent_buffers_set
        buffer = buffers[name].clone() if name in buffers else None
        average.get_submodule(path).register_buffer(key, buffer, persistent)
    follow_tensors(*pairs_of(average, model), decay)


def follow_tensors(parameters: Pairs, buffers: Pairs, decay: float) -> None:
    """Let tensors follow others, buffers at once."""
    for own, leading in parameters:
        own.lerp_(leading, 1 - decay)
    for own, leading in buffers:
        own.copy_(leading)
