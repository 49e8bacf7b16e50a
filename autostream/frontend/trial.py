"""What a model does with some inputs, found out by calling a copy of it with copies of them.

Does it take its example inputs at all? That is asked where no schedule can be made for them: either the model cannot be
captured, and runs all the same, or the inputs are wrong. Only the model itself knows which.

A copy is one of all that the model holds: tensors, attributes, and what functions among these refer to. Random
generators of the process are put back. What cannot be copied is not tried. What the methods of the model's classes
change beyond it, such as a global counter, stays changed.
"""

from __future__ import annotations

import copy
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    """Call a copy of a model with copies of all tensors, recording no gradients. Whatever it raises comes through.

    Raises:
        TraceError: the model, or an argument, cannot be copied.

    Example:
        >>> x = torch.ones(2)
        >>> tried(nn.ReLU(inplace=True), [-x], {}).inputs
        [tensor([0., 0.])]
    """
    try:
        twin, inputs, structure = _copies(model, args, kwargs)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise TraceError(f"it cannot be copied, to be tried without being changed ({first_line(error)})") from error
    with _undisturbed(model, inputs), torch.no_grad():
        outputs = twin(*unflatten(structure, inputs)[0], **unflatten(structure, inputs)[1])
    return Tried(outputs, inputs, dict(chain(twin.named_parameters(), twin.named_buffers())))


def check_call(model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """See that a model can be called with these arguments, in some mode, by calling a copy with copies of all tensors.

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
    for mode in (torch.no_grad, torch.enable_grad, torch.inference_mode):
        try:
            twin, inputs, structure = _copies(model, args, kwargs)
        except Exception:  # it cannot be copied, or there is no memory for that
            return None
        with _undisturbed(model, inputs), mode():
            try:
                given, named = unflatten(structure, inputs)
                twin(*given, **named)
            except Exception as raised:
                error = raised
            else:
                return None
    return None if isinstance(error, MemoryError | torch.OutOfMemoryError) else error


def _copies(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[nn.Module, list[Tensor], Structure]:
    """Copies of the model and of the flat inputs, and the structure of these."""
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
    """Let copies of a function have copies of what it refers to itself, where Python's would share that."""
    if isinstance(value, partial):
        _copy_function(value.func, memo)
    elif isinstance(value, MethodType):
        _copy_function(value.__func__, memo)
    if not isinstance(value, FunctionType) or id(value) in memo:
        return
    cells = tuple(CellType() for _ in value.__closure__ or ())
    twin = FunctionType(value.__code__, {**value.__globals__}, value.__name__, None, cells or None)
    memo[id(value)] = twin  # before the rest, which may well refer to it
    twin.__dict__.update(value.__dict__)
    twin.__qualname__ = value.__qualname__
    twin.__defaults__ = copy.deepcopy(value.__defaults__, memo)
    twin.__kwdefaults__ = copy.deepcopy(value.__kwdefaults__, memo)
    for cell, own in zip(cells, value.__closure__ or (), strict=True):
        try:
            contents = own.cell_contents
        except ValueError:  # nothing is in it yet
            continue
        cell.cell_contents = _duplicate(contents, memo)
    for name in value.__code__.co_names:
        if name in value.__globals__:
            twin.__globals__[name] = _duplicate(value.__globals__[name], memo)


def _duplicate(value: Any, memo: dict[int, Any]) -> Any:
    if isinstance(value, ModuleType):
        return value
    _copy_function(value, memo)
    return copy.deepcopy(value, memo)


@contextmanager
def _undisturbed(model: nn.Module, inputs: Sequence[Tensor]) -> Iterator[None]:
    """No warnings, and random generators of the process put back afterwards."""
    tensors = chain(model.parameters(), model.buffers(), inputs)
    devices = {tensor.device for tensor in tensors if tensor.is_cuda}
    put_back: list[Callable[[], None]] = [partial(random.setstate, random.getstate())]
    if (numpy := sys.modules.get("numpy")) is not None:
        put_back.append(partial(numpy.random.set_state, numpy.random.get_state()))
    with ExitStack() as stack:
        for put in put_back:
            stack.callback(put)
        stack.enter_context(torch.random.fork_rng(devices))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        yield
