"""A proxy of a model: it behaves as the model does, but its calls are redirected.

    loss_fn(proxy, …) ─▶ proxy(x) ─▶ run ─▶ the model, or graphs of it
                     └─▶ proxy[0], isinstance(proxy, Net), proxy.encode(x): as the model

A proxy is an instance of a class derived from the model's, and shares the model's attribute dictionary. The model
itself does not change: other threads, copies and graphs of the model do not notice.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from autostream.frontend.eager_only import has_torchscript


def proxy_of(model: nn.Module, run: Callable[..., Any]) -> nn.Module | None:
    """A proxy of a model; ``None`` for TorchScript, and for a class that has slots or ``__del__``.

    Copying or pickling the proxy copies the model.

    Args:
        model: the model. It is not kept alive.
        run: takes the arguments of a call. It has to support weak references, and is not kept alive.

    Example:
        >>> layers = nn.Sequential(nn.ReLU(), nn.Tanh())
        >>> def run(x):
        ...     return layers(x) + 1
        >>> proxy = proxy_of(layers, run)
        >>> proxy(torch.zeros(2)), proxy[0](torch.zeros(2)), isinstance(proxy, nn.Sequential)
        (tensor([1., 1.]), tensor([0., 0.]), True)
    """
    kind: Any = type(model)
    if has_torchscript(model) or hasattr(kind, "__del__") or any(vars(base).get("__slots__") for base in kind.__mro__):
        return None
    # Weak references: a class is part of a reference cycle, which would keep them until garbage is collected.
    model_ref, run_ref = weakref.ref(model), weakref.ref(run)
    proxies: list[weakref.ref[nn.Module]] = []

    def model_of(self: nn.Module) -> Any:
        """The model, if ``self`` is the proxy; ``None`` for other instances that user code made of its class."""
        return model_ref() if proxies and proxies[0]() is self else None

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        live_model, live_run = model_of(self), run_ref()
        if live_model is None or live_run is None:
            return kind.__call__(self, *args, **kwargs)
        return live_model(*args, **kwargs) if torch.compiler.is_dynamo_compiling() else live_run(*args, **kwargs)

    def plain(self: nn.Module) -> Any:
        """An instance of the model's own class with the same attributes, from which copies are made."""
        return _sharing(vars(self), kind)

    def copied(self: nn.Module) -> Any:
        return copy.copy(plain(self))

    def reduced(self: nn.Module, protocol: Any) -> Any:
        live_model = model_of(self)
        return plain(self).__reduce_ex__(protocol) if live_model is None else (_identity, (live_model,))

    class_ = property(lambda self: kind, vars(object)["__class__"].__set__)  # pickle reads it too
    members = {"__call__": call, "__class__": class_, "__copy__": copied, "__reduce_ex__": reduced}
    try:
        derived = type(kind)(kind.__name__, (kind,), members | {name: getattr(kind, name) for name in _NAMES})
    except Exception:  # the model's metaclass or ``__init_subclass__`` does not allow it
        return None
    proxy = _sharing(vars(model), derived)
    proxies.append(weakref.ref(proxy))
    return proxy


def _sharing(attributes: dict[str, Any], kind: type[nn.Module]) -> nn.Module:
    """An instance of a class that shares this attribute dictionary."""
    instance = object.__new__(kind)
    object.__setattr__(instance, "__dict__", attributes)
    return instance


def _identity(model: nn.Module) -> nn.Module:
    return model


_NAMES = ("__module__", "__qualname__", "__doc__")
