"""A moving average of a model's weights, matched by name; and PyTorch's own ``AveragedModel`` in a graph."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from autostream.errors import TargetError, TraceError


def check_average(average: nn.Module, model: nn.Module) -> None:
    """Check that an average has the model's parameters, and a module for each buffer that it lacks.

    Raises:
        TargetError: the two differ in something else.

    Example:
        >>> check_average(nn.Sequential(nn.ReLU()), nn.Sequential(nn.Linear(2, 1)))
        Traceback (most recent call last):
            ...
        autostream.errors.TargetError: the average and the model differ in 0.weight, 0.bias...
    """
    differing = _differing(average.named_parameters(), model.named_parameters())
    if names := differing_buffers(average, model):
        ours, theirs = ({name for name, _ in module.named_modules()} for module in (average, model))
        differing += [name for name in names if name.rpartition(".")[0] not in ours & theirs]
    if differing:
        raise TargetError(
            f"the average and the model differ in {', '.join(differing[:3])}: the model has changed since the average "
            "was made; make a new one, copy.deepcopy(model), and a new train_step with it"
        )


def differing_buffers(average: nn.Module, model: nn.Module) -> list[str]:
    """The names of buffers that only one of the two has, or that differ in shape.

    Example:
        >>> model, average = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
        >>> average.running_mean = None
        >>> differing_buffers(average, model)
        ['running_mean']
    """
    return _differing(average.named_buffers(), model.named_buffers())


def _differing(one: Iterable[tuple[str, Tensor]], other: Iterable[tuple[str, Tensor]]) -> list[str]:
    shapes, others = ({name: tensor.shape for name, tensor in named} for named in (one, other))
    return [name for name in shapes | others if shapes.get(name) != others.get(name)]


Pairs = Sequence[tuple[Tensor, Tensor]]
"""Tensors of an average, each with the model's tensor that it follows."""


def pairs_of(average: nn.Module, model: nn.Module) -> tuple[Pairs, Pairs]:
    """The parameters of an average and the model's, and the buffers that both have."""
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    return (
        [(averaged, parameters[name]) for name, averaged in average.named_parameters()],
        [(averaged, buffers[name]) for name, averaged in average.named_buffers()],
    )


@torch.no_grad()
def follow(average: nn.Module, model: nn.Module, decay: float) -> None:
    """Update an average: its parameters move towards the model's, and its buffers become copies of the model's.

    Buffers that one of the two lacks, or that differ in shape, are added, removed or replaced.

    Args:
        average: the average; :func:`check_average` accepts it.
        model: the model.
        decay: the weight of the average's old value, from 0 to 1.

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
    """Update the tensors of an average."""
    for averaged, current in parameters:
        averaged.lerp_(current, 1 - decay)
    for averaged, current in buffers:
        averaged.copy_(current)


_UPDATE: Any = AveragedModel.update_parameters


def update_parameters(self: Any, model: nn.Module) -> None:
    """What ``AveragedModel.update_parameters`` does, without a branch on how often it was called.

    PyTorch's own code averages, as in a later call, and what is to be a copy in the first call is then set to one.
    """
    kept, count, uses_buffers = self.module, self.n_averaged, self.use_buffers
    averaged = [*kept.parameters(), *(kept.buffers() if uses_buffers else ())]
    current = [*model.parameters(), *(model.buffers() if uses_buffers else ())]
    if any(tensor.device != count.device for tensor in averaged):
        raise TraceError("the counter of an AveragedModel is on another device: give that, AveragedModel(..., device)")
    _UPDATE(_Later(self), model)
    with torch.no_grad():
        for average, tensor in zip(averaged, current, strict=False):
            average.copy_(torch.where(count == 0, tensor.to(average.device), average))
        count += 1


class _Later:
    """An ``AveragedModel`` that has been updated before, as far as Python asks."""

    def __init__(self, average: Any) -> None:
        self.module, self.parameters, self.use_buffers = average.module, average.parameters, average.use_buffers
        self.avg_fn, self.multi_avg_fn = average.avg_fn, average.multi_avg_fn
        self.n_averaged = _Count(average.n_averaged)


class _Count:
    def __init__(self, count: Tensor) -> None:
        self.count = count

    def __eq__(self, other: object) -> bool:
        return False

    def __gt__(self, other: object) -> bool:
        return True

    def to(self, device: Any) -> Tensor:
        return self.count.to(device)

    def __iadd__(self, other: object) -> _Count:
        return self
