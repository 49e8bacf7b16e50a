"""What a model does with some inputs, found out by calling it with copies of all tensors.

Does it take its example inputs at all? That is asked where no schedule can be made for them: either the model cannot be
traced, and runs all the same, or the inputs are wrong. Only the model itself knows which.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from autostream.errors import TargetError, TraceError, first_line
from autostream.frontend.guards import has_torchscript
from autostream.frontend.tree import Structure, flatten, unflatten
from autostream.tracing.attributes import untouched
from autostream.tracing.state import name_of


def check_devices(model: nn.Module, inputs: object) -> None:
    """See that inputs are where a model's state is.

    Args:
        model: the module.
        inputs: anything with tensors in it.

    Raises:
        TargetError: one is elsewhere.

    Example:
        >>> check_devices(nn.Linear(1, 1), [torch.ones(1, device="meta")])
        Traceback (most recent call last):
        ...
        autostream.errors.TargetError: example input 0 is on meta, the model on cpu: use .to('cpu')
    """
    homes = {tensor.device for tensor in chain(model.parameters(), model.buffers())}
    try:
        tensors, _ = flatten(inputs)
    except TraceError:
        return
    for index, tensor in enumerate(tensors):
        if homes and tensor.device not in homes:
            home = min(map(str, homes))
            raise TargetError(f"example input {index} is on {tensor.device}, the model on {home}: use .to({home!r})")


@dataclass(frozen=True)
class Tried:
    """What a call did.

    Attributes:
        outputs: what it returned.
        inputs: the flat copies of its inputs, as they are afterwards.
        state: the copies of the model's parameters and buffers by name, as they are afterwards.
    """

    outputs: Any
    inputs: Sequence[Tensor]
    state: Mapping[str, Tensor]


def tried(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tried:
    """Call a model with copies of all tensors, recording no gradients.

    What that does to attributes and random generators is undone. Whatever the model raises comes through.

    Raises:
        TraceError: an argument is no known container, or the model refers to an iterator, and what it would take from
            that cannot be put back.

    Example:
        >>> x = torch.ones(2)
        >>> tried(nn.ReLU(inplace=True), [-x], {}).inputs
        [tensor([0., 0.])]
    """
    state, inputs, structure = _copies(model, args, kwargs)
    with warnings.catch_warnings(), untouched(model) as outside, torch.no_grad():
        warnings.simplefilter("ignore")
        if outside.iterators:
            raise TraceError(f"the model refers to {outside.iterators[0]}, an iterator, and a trial would take from it")
        outputs = functional_call(model, state, *unflatten(structure, inputs))
    return Tried(outputs, inputs, state)


def check_call(model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """See that a model can be called with these arguments, in some mode, by calling it with copies of all tensors.

    What that does to attributes and random generators is undone.

    Raises:
        TargetError: it fails.

    Example:
        >>> check_call(nn.Linear(3, 4), [torch.ones(2, 5)], {})
        Traceback (most recent call last):
        ...
        autostream.errors.TargetError: Linear itself fails at these example inputs \
(RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x5 and 3x4)): give what it takes
    """
    error = _failure(model, args, kwargs)
    if error is not None:
        check_devices(model, (args, kwargs))
        failed = f"{name_of(model)} itself fails at these example inputs ({first_line(error)})"
        raise TargetError(f"{failed}: give what it takes") from error


def _failure(model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> Exception | None:
    """What the model raises; ``None`` where it works in some mode, or could not be tried."""
    error: Exception | None = None
    if has_torchscript(model):
        return None
    try:
        for mode in (torch.no_grad, torch.enable_grad, torch.inference_mode):
            error = _failure_in(mode(), model, args, kwargs)
            if error is None:
                return None
    except Exception:  # before the call, or after it: such as no memory for copies
        return None
    return None if isinstance(error, (MemoryError, torch.OutOfMemoryError)) else error


def _failure_in(mode: Any, model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> Exception | None:
    state, inputs, structure = _copies(model, args, kwargs)
    with warnings.catch_warnings(), untouched(model) as outside, mode:
        warnings.simplefilter("ignore")
        if outside.iterators:  # what is taken from them could not be put back
            return None
        try:
            functional_call(model, state, *unflatten(structure, inputs))
        except Exception as error:
            return error
    return None


def _copies(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[dict[str, Tensor], list[Tensor], Structure]:
    """Copies of the model's state and of the flat inputs, and the structure of these."""
    state = {name: _copied(tensor) for name, tensor in chain(model.named_parameters(), model.named_buffers())}
    tensors, structure = flatten((tuple(args), dict(kwargs)))
    return state, list(map(_copied, tensors)), structure


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)
