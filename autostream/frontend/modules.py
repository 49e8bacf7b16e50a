"""Models as callers know them: their names, what they take, and functions as modules.

model ──▶ module_of
loss  ──▶ loss_of: of PyTorch's own, what compares the model's outputs with a target
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from autostream.errors import TargetError


def name_of(model: nn.Module) -> str:
    """What a model calls itself, usually by its class."""
    return str(model._get_name())  # type: ignore[no-untyped-call]


def module_of(function: Callable[..., Any]) -> nn.Module:
    """A module as it is; a function as a module whose submodules are those that it refers to itself.

    They are there for ``parameters``, ``to``, ``train`` and ``state_dict``. Whether a call is as it was captured does
    not depend on them: that is for the guards to say.

    Example:
        >>> linear = nn.Linear(2, 2)
        >>> dict(module_of(lambda x: linear(x)).named_children())
        {'linear': Linear(in_features=2, out_features=2, bias=True)}
    """
    return function if isinstance(function, nn.Module) else FunctionModule(function)


class FunctionModule(nn.Module):
    """A function as a module.

    Args:
        function: to call.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._autostream_function = function
        for name, value in referred_to(function):
            if isinstance(value, nn.Module):
                self._modules.setdefault(name, value)  # not add_module, which refuses names of its own attributes

    @property
    def training(self) -> bool:
        """A function has no mode of its own."""
        return any(module.training for module in self.children())

    @training.setter
    def training(self, mode: bool) -> None:
        pass

    def _get_name(self) -> str:
        return getattr(self._autostream_function, "__qualname__", type(self._autostream_function).__name__)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._autostream_function(*args, **kwargs)


def referred_to(function: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """What a function refers to itself, by name: variables around it, globals, default values and bound arguments.

    Example:
        >>> scale = 2
        >>> dict(referred_to(lambda x, by=3: x * by * scale))
        {'scale': 2, 'by': 3}
    """
    if isinstance(function, partial):
        yield from ((str(at), value) for at, value in enumerate(function.args))
        yield from function.keywords.items()
        yield from referred_to(function.func)
    elif isinstance(function, MethodType):
        yield "self", function.__self__
        yield from referred_to(function.__func__)
    elif isinstance(function, FunctionType):
        code = function.__code__
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                yield name, cell.cell_contents
            except ValueError:  # nothing is in it yet
                continue
        yield from ((name, function.__globals__[name]) for name in code.co_names if name in function.__globals__)
        defaults = function.__defaults__ or ()
        names = code.co_varnames[: code.co_argcount]
        yield from zip(names[len(names) - len(defaults) :], defaults, strict=True)
        yield from (function.__kwdefaults__ or {}).items()
    elif isinstance(called := type(function).__call__, FunctionType):
        yield from getattr(function, "__dict__", {}).items()
        yield from referred_to(called)


def loss_of(function: Callable[..., Any]) -> nn.Module:
    """A loss as a module that takes a model and a batch.

    PyTorch's own losses compare outputs with a target, which is the last of a batch; the others are the model's inputs.

    Example:
        >>> import torch
        >>> loss_of(nn.MSELoss())(nn.Identity(), torch.ones(2), torch.zeros(2))
        tensor(1.)
    """
    loss = module_of(function)
    return _Criterion(loss) if _is_criterion(function) else loss


def check_loss(loss: nn.Module, count: int) -> None:
    """See that a loss takes a model and a batch of so many.

    Raises:
        TargetError: it does not, by its signature.

    Example:
        >>> check_loss(module_of(lambda output, target: output - target), 2)
        Traceback (most recent call last):
        ...
        autostream.errors.TargetError: loss_fn is called with the model and a batch of 2, and takes (output, target): \
where it takes the model's outputs, use lambda model, x, y: loss_fn(model(x), y)
    """
    signature = _signature(loss)
    if signature is None:
        return
    try:
        signature.bind(*range(1 + count))
    except TypeError:
        raise TargetError(
            f"loss_fn is called with the model and a batch of {count}, and takes {signature}: where it takes the "
            "model's outputs, use lambda model, x, y: loss_fn(model(x), y)"
        ) from None


def parameters_of(module: nn.Module) -> Mapping[str, inspect.Parameter]:
    """What a module's ``forward`` takes, or the function that it was made of; nothing where Python cannot tell.

    Example:
        >>> list(parameters_of(nn.Linear(1, 1))), list(parameters_of(module_of(lambda x, y: x + y)))
        (['input'], ['x', 'y'])
    """
    signature = _signature(module)
    return {} if signature is None else signature.parameters


def _signature(module: nn.Module) -> inspect.Signature | None:
    function = module._autostream_function if isinstance(module, FunctionModule) else module.forward
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):  # it has none that Python knows
        return None


def _is_criterion(function: Callable[..., Any]) -> bool:
    """Whether a loss is one of PyTorch's: a module or one derived from it, a function, or such with some arguments."""
    if isinstance(function, partial):
        return _is_criterion(function.func)
    if isinstance(function, nn.Module):
        return any(kind.__module__ == "torch.nn.modules.loss" for kind in type(function).__mro__)
    return getattr(function, "__module__", None) == "torch.nn.functional"


class _Criterion(nn.Module):
    """A loss of the model's outputs and a target."""

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, model: nn.Module, *batch: Any) -> Tensor:
        if len(batch) < 2:
            raise TargetError(
                f"{name_of(self.loss)} compares outputs with a target: call the step with inputs and a target"
            )
        *inputs, target = batch
        loss: Tensor = self.loss(model(*inputs), target)
        return loss
