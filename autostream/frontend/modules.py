"""The model behind a callable: its name, its parameters, and functions wrapped as modules."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import nn


def name_of(model: nn.Module) -> str:
    """The name of a model, usually its class's."""
    return str(model._get_name())  # type: ignore[no-untyped-call]


def module_of(function: Callable[..., Any]) -> nn.Module:
    """A module itself; or a function as a module, with the modules that it refers to as submodules.

    The submodules serve ``parameters``, ``to``, ``train`` and ``state_dict``. Guards do not depend on them.

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
                self._modules.setdefault(name, value)  # add_module refuses names of its own attributes

    @property
    def training(self) -> bool:
        """Whether any submodule is in training mode: a function has no mode."""
        return any(module.training for module in self.children())

    @training.setter
    def training(self, mode: bool) -> None:
        pass

    def _get_name(self) -> str:
        return getattr(self._autostream_function, "__qualname__", type(self._autostream_function).__name__)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._autostream_function(*args, **kwargs)


def referred_to(function: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """The values that a function refers to, by name: closure variables, globals, defaults and bound arguments.

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
            except ValueError:  # the variable has no value yet
                continue
        yield from ((name, function.__globals__[name]) for name in code.co_names if name in function.__globals__)
        defaults = function.__defaults__ or ()
        names = code.co_varnames[: code.co_argcount]
        yield from zip(names[len(names) - len(defaults) :], defaults, strict=True)
        yield from (function.__kwdefaults__ or {}).items()
    elif isinstance(called := type(function).__call__, FunctionType):
        yield from getattr(function, "__dict__", {}).items()
        yield from referred_to(called)


def forward_parameters(module: nn.Module) -> Mapping[str, inspect.Parameter]:
    """The parameters of a module's ``forward``, or of the function that it wraps; empty where Python cannot tell.

    Example:
        >>> list(forward_parameters(nn.Linear(1, 1))), list(forward_parameters(module_of(lambda x, y: x + y)))
        (['input'], ['x', 'y'])
    """
    function = module._autostream_function if isinstance(module, FunctionModule) else module.forward
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # such as for functions in C
        return {}
