"""What a wrapper passes on to its model: methods that call the model, not the wrapper. That is said once.

    fast(...)          ──▶ Dispatcher
    fast.generate(...) ──▶ model.generate ──▶ model(...), where the first call of each method is watched

A method cannot be bound to the wrapper instead: ``super()``, ``type(self)`` and ``self.__class__`` in it would be of
another class.
"""

from __future__ import annotations

from functools import wraps
from types import FunctionType, MethodType
from typing import Any

import torch

from autostream.dispatch.dispatcher import Dispatcher

_COMPILED = "_compiled_call_impl"
"""The attribute by which ``nn.Module.compile`` takes the calls of a module; copies and pickles leave it out."""


class PassedOn:
    """Watches what a wrapper passes on to its model.

    Args:
        dispatcher: runs the wrapper's calls; it notes which methods go past it.

    Example:
        >>> from autostream.options import Options
        >>> class Net(torch.nn.ReLU):
        ...     def twice(self, x):
        ...         return self(self(x))
        >>> dispatcher = Dispatcher(Net(), Options())
        >>> PassedOn(dispatcher)(dispatcher.model.twice)(torch.tensor([-1.0, 1.0]))
        tensor([0., 1.])
        >>> dispatcher.reports[0].refusals[0].reason
        'twice() calls the model itself, past the wrapper: use autostream.optimize_(model) instead'
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._called: set[str] = set()

    def __call__(self, value: Any) -> Any:
        """An attribute of the model, watched if it is one of its methods."""
        if torch.compiler.is_dynamo_compiling():
            return value
        if not isinstance(value, MethodType) or value.__self__ is not self._dispatcher.model:
            return value
        function = value.__func__
        if not isinstance(function, FunctionType) or function.__name__ in self._called or self._dispatcher.disabled:
            return value

        @wraps(function)
        def watched(model: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_dynamo_compiling():
                return function(model, *args, **kwargs)
            return self._watch(MethodType(function, model), args, kwargs)

        watched._autostream_method = value  # type: ignore[attr-defined]
        return MethodType(watched, value.__self__)

    def _watch(self, method: MethodType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method, and note if it calls the model; only once, as each time makes the model's guards slow."""
        name, state = method.__name__, self._dispatcher.model.__dict__
        if name in self._called or state.get(_COMPILED):
            return method(*args, **kwargs)
        self._called.add(name)

        def bypass(*args: Any, **kwargs: Any) -> Any:
            _remove(state, bypass)
            return self._dispatcher.run_eagerly(_REASON.format(name), args, kwargs)

        state[_COMPILED] = bypass
        try:
            return method(*args, **kwargs)
        finally:
            _remove(state, bypass)


def unwatched(function: Any) -> Any:
    """The method itself, if this is one that is watched: Dynamo of 2.11 cannot trace what else its function refers to.

    Example:
        >>> relu = torch.nn.ReLU()
        >>> unwatched(relu.extra_repr) == relu.extra_repr
        True
    """
    return getattr(function, "_autostream_method", function) if isinstance(function, MethodType) else function


def _remove(state: dict[str, Any], value: object) -> None:
    if state.get(_COMPILED) is value:
        del state[_COMPILED]


_REASON = "{}() calls the model itself, past the wrapper: use autostream.optimize_(model) instead"
