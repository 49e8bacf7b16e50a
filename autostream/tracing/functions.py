"""Functions as modules: what they refer to is part of what is traced."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn


def module_of(function: Callable[..., Any]) -> nn.Module:
    """A module as it is; a function as a module whose submodules are those that it refers to.

    Example:
        >>> linear = nn.Linear(2, 2)
        >>> dict(module_of(lambda x: linear(x)).named_children())
        {'linear': Linear(in_features=2, out_features=2, bias=True)}
    """
    return function if isinstance(function, nn.Module) else _FunctionModule(function)


class _FunctionModule(nn.Module):
    """A function as a module. The modules that it refers to, or that it is a method of, are its submodules."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._autostream_function = function
        # Not add_module, which refuses names of its own attributes.
        self._modules |= {k: value for k, value in _referred_to(function).items() if isinstance(value, nn.Module)}

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


def _referred_to(function: Callable[..., Any]) -> dict[str, Any]:
    """What a Python function or method refers to by name; nothing for other callables."""
    if not inspect.isfunction(getattr(function, "__func__", function)):
        return {}
    try:
        variables = inspect.getclosurevars(function)
    except ValueError:  # a variable has no value yet
        return {}
    return {**variables.globals, **variables.nonlocals, "self": getattr(function, "__self__", None)}
