"""Trial calls: calling a copy of a model with copies of its inputs, to see whether it fails and what it returns.

If no schedule can be made for example inputs, a trial call tells whether the model merely cannot be captured, or the
inputs are wrong.

The copy includes all that the model holds: tensors, attributes, and what functions among these refer to. The states of
random generators are restored. A model that cannot be copied is not called. Changes that methods make elsewhere, such
as to a global counter, are not undone.
"""

from __future__ import annotations

import copy
import random
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from autostream.errors import TargetError, TraceError, first_line
from autostream.frontend.eager_only import has_torchscript
from autostream.frontend.modules import name_of
from autostream.frontend.tree import Structure, flatten, unflatten


def check_devices(model: nn.Module, inputs: object) -> None:
    """Check that inputs are on a device of the model's.

    Args:
        model: the module.
        inputs: a nested value.

    Raises:
        TargetError: an input is on another device.

    Example:
        >>> check_devices(nn.Linear(1, 1), [torch.ones(1, device="meta")])
        Traceback (most recent call last):
        ...
        autostream.errors.TargetError: example input 0 is on meta, the model on cpu: use .to('cpu')
    """
    devices = {tensor.device for tensor in chain(model.parameters(), model.buffers())}
    try:
        tensors, _ = flatten(inputs)
    except TraceError:
        return
    for index, tensor in enumerate(tensors):
        if devices and tensor.device not in devices:
            home = min(map(str, devices))
            raise TargetError(f"example input {index} is on {tensor.device}, the model on {home}: use .to({home!r})")


@dataclass(frozen=True)
class Tried:
    """The result of a trial call.

    Attributes:
        outputs: what the model returned.
        inputs: the flat copies of its inputs, after the call.
        state: the copies of the model's parameters and buffers by name, after the call.
    """

    outputs: Any
    inputs: Sequence[Tensor]
    state: Mapping[str, Tensor]


def tried(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tried:
    """Call a copy of a model with copies of all tensors, without gradients. Errors of the model are not caught.

    Raises:
        TraceError: the model, or an argument, cannot be copied.

    Example:
        >>> x = torch.ones(2)
        >>> tried(nn.ReLU(inplace=True), [-x], {}).inputs
        [tensor([0., 0.])]
    """
    try:
        copied, inputs, structure = _copies(model, args, kwargs)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise TraceError(f"it cannot be copied, to be tried without being changed ({first_line(error)})") from error
    with _undisturbed(model, inputs), torch.no_grad():
        copied_args, copied_kwargs = unflatten(structure, inputs)
        outputs = copied(*copied_args, **copied_kwargs)
    return Tried(outputs, inputs, dict(chain(copied.named_parameters(), copied.named_buffers())))


def check_call(model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Check that a model can be called with these arguments: without gradients, with them, or in inference mode.

    Raises:
        TargetError: it fails in all three modes.

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
    """The error that the model raises; ``None`` if it works in some mode, or cannot be copied."""
    error: Exception | None = None
    if has_torchscript(model):
        return None
    for mode in (torch.no_grad, torch.enable_grad, torch.inference_mode):
        try:
            copied, inputs, structure = _copies(model, args, kwargs)
        except Exception:  # it cannot be copied, or there is too little memory
            return None
        with _undisturbed(model, inputs), mode():
            try:
                copied_args, copied_kwargs = unflatten(structure, inputs)
                copied(*copied_args, **copied_kwargs)
            except Exception as raised:
                error = raised
            else:
                return None
    return None if isinstance(error, MemoryError | torch.OutOfMemoryError) else error


def _copies(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[nn.Module, list[Tensor], Structure]:
    """Copies of the model and of the flat inputs, and the structure of the inputs."""
    tensors, structure = flatten((tuple(args), dict(kwargs)))
    with torch.inference_mode(False), torch.no_grad():
        memo: dict[int, Any] = {}
        for module in model.modules():
            for value in vars(module).values():
                _copy_function(value, memo)
        return copy.deepcopy(model, memo), list(map(_copied, tensors)), structure


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _copy_function(value: Any, memo: dict[int, Any]) -> None:
    """Put a copy of a function, and of what it refers to, into the memo of a deep copy.

    ``copy.deepcopy`` itself returns the same function.
    """
    if isinstance(value, partial):
        _copy_function(value.func, memo)
    elif isinstance(value, MethodType):
        _copy_function(value.__func__, memo)
    if not isinstance(value, FunctionType) or id(value) in memo:
        return
    cells = tuple(CellType() for _ in value.__closure__ or ())
    copied = FunctionType(value.__code__, {**value.__globals__}, value.__name__, None, cells or None)
    memo[id(value)] = copied  # before the values below, which may refer to the function
    copied.__dict__.update(value.__dict__)
    copied.__qualname__ = value.__qualname__
    copied.__defaults__ = copy.deepcopy(value.__defaults__, memo)
    copied.__kwdefaults__ = copy.deepcopy(value.__kwdefaults__, memo)
    for cell, original in zip(cells, value.__closure__ or (), strict=True):
        try:
            contents = original.cell_contents
        except ValueError:  # the variable has no value yet
            continue
        cell.cell_contents = _duplicate(contents, memo)
    for name in value.__code__.co_names:
        if name in value.__globals__:
            copied.__globals__[name] = _duplicate(value.__globals__[name], memo)


def _duplicate(value: Any, memo: dict[int, Any]) -> Any:
    if isinstance(value, ModuleType):
        return value
    _copy_function(value, memo)
    return copy.deepcopy(value, memo)


@contextmanager
def _undisturbed(model: nn.Module, inputs: Sequence[Tensor]) -> Iterator[None]:
    """Ignore warnings, and restore the states of random generators afterwards."""
    tensors = chain(model.parameters(), model.buffers(), inputs)
    devices = {tensor.device for tensor in tensors if tensor.is_cuda}
    with ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        if (numpy := sys.modules.get("numpy")) is not None:
            stack.callback(numpy.random.set_state, numpy.random.get_state())
        stack.enter_context(torch.random.fork_rng(devices))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        yield
