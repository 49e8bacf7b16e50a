"""The model behind a callable: its name, its parameters, and functions wrapped as modules."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import Any, TypeGuard, cast

from torch import nn


def name_of(model: nn.Module) -> str:
    """The name of a model, usually its class's."""
    return str(model._get_name())  # type: ignore[no-untyped-call]


def module_of(function: Callable[..., Any]) -> nn.Module:
    """A module itself; or a function as a module, with the modules that it refers to as submodules.

    The submodules serve ``parameters``, ``to``, ``train`` and ``state_dict``. Guards do not depend on them. A method of
    a module becomes a :class:`MethodModule`.

    Example:
        >>> linear = nn.Linear(2, 2)
        >>> dict(module_of(lambda x: linear(x)).named_children())
        {'linear': Linear(in_features=2, out_features=2, bias=True)}
    """
    if isinstance(function, nn.Module):
        return function
    return MethodModule(function) if is_method(function) else FunctionModule(function)


def is_method(function: object) -> TypeGuard[MethodType]:
    """Whether this is a method of a module, bound to it.

    Example:
        >>> is_method(nn.ReLU().forward), is_method(nn.ReLU()), is_method(nn.ReLU.forward)
        (True, False, False)
    """
    return isinstance(function, MethodType) and isinstance(function.__self__, nn.Module)


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


class MethodModule(FunctionModule):
    """A method of a module as a module, whose tensors, submodules and mode are the owner's.

    The owner is no submodule of it: their tensors have the same names.

    Args:
        method: bound to its owner.

    Example:
        >>> relu, linear = nn.ReLU(), nn.Linear(2, 2)
        >>> [name for name, _ in MethodModule(linear.forward).named_parameters()]
        ['weight', 'bias']
    """

    _autostream_function: MethodType

    def __init__(self, method: MethodType) -> None:
        super().__init__(method)
        self._modules.clear()

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """The owner's, from which all listings of parameters and buffers are made."""
        yield from self._owner.named_modules(*args, **kwargs)

    @property
    def training(self) -> bool:
        """The owner's mode."""
        return self._owner.training

    @training.setter
    def training(self, mode: bool) -> None:
        pass

    @property
    def _owner(self) -> nn.Module:
        return cast(nn.Module, self._autostream_function.__self__)

    def _get_name(self) -> str:
        owner, method = name_of(self._owner), self._autostream_function.__name__
        return owner if method in (_CALL, "forward") else f"{owner}.{method}"


_CALL = "_call_impl"
"""The method of a module that calls its hooks and its ``forward``."""


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
    try:
        return inspect.signature(forward_of(module)).parameters
    except (TypeError, ValueError):  # such as for functions in C
        return {}


def forward_of(module: nn.Module) -> Callable[..., Any]:
    """What takes the arguments of a call: a module's ``forward``, or the function that it wraps.

    Example:
        >>> linear = nn.Linear(1, 1)
        >>> forward_of(linear) == forward_of(module_of(linear._call_impl)) == linear.forward
        True
    """
    if isinstance(module, MethodModule) and module._autostream_function.__name__ == _CALL:
        return forward_of(module._owner)
    return module._autostream_function if isinstance(module, FunctionModule) else module.forward
