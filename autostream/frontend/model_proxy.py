"""A model's stand-in: all that it is, but for its calls, which are led elsewhere.

    loss_fn(stand-in, …) ─▶ stand-in(x) ─▶ run ─▶ the model, or graphs of it
                        └─▶ stand-in[0], isinstance(…, Net), stand-in.encode(x): as the model

It is an instance of a class derived from the model's, and both have one dictionary of attributes. Nothing of the model
is changed for it: other threads, copies and graphs of the model see none of it.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from autostream.frontend.eager_only import has_torchscript


def stand_in(model: nn.Module, run: Callable[..., Any]) -> nn.Module | None:
    """Make one, or nothing for a model that can have none: TorchScript, or where its class has slots or ``__del__``.

    A copy of it is a copy of the model, and a copy of what else is made of its class is one of the model's own.

    Args:
        model: the model. It is not kept alive.
        run: takes what a call takes. It has to support weak references, and is not kept alive.

    Example:
        >>> layers = nn.Sequential(nn.ReLU(), nn.Tanh())
        >>> def run(x):
        ...     return layers(x) + 1
        >>> found = stand_in(layers, run)
        >>> found(torch.zeros(2)), found[0](torch.zeros(2)), isinstance(found, nn.Sequential)
        (tensor([1., 1.]), tensor([0., 0.]), True)
    """
    kind: Any = type(model)
    if has_torchscript(model) or hasattr(kind, "__del__") or any(vars(base).get("__slots__") for base in kind.__mro__):
        return None
    # Weakly: a class is part of a cycle, so what it holds would stay until garbage is collected.
    the_model, the_run = weakref.ref(model), weakref.ref(run)
    made: list[weakref.ref[nn.Module]] = []

    def model_of(self: nn.Module) -> Any:
        """The model, of the stand-in, which alone is one; others are made of its class."""
        return the_model() if made and made[0]() is self else None

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        live, leads_to = model_of(self), the_run()
        if live is None or leads_to is None:
            return kind.__call__(self, *args, **kwargs)
        return live(*args, **kwargs) if torch.compiler.is_dynamo_compiling() else leads_to(*args, **kwargs)

    def plain(self: nn.Module) -> Any:
        """An instance of the model's own class with the same attributes: for copies, which know nothing of ours."""
        return _sharing(vars(self), kind)

    def copied(self: nn.Module) -> Any:
        return copy.copy(plain(self))

    def reduced(self: nn.Module, protocol: Any) -> Any:
        live = model_of(self)
        return plain(self).__reduce_ex__(protocol) if live is None else (_itself, (live,))

    own_class = property(lambda self: kind, vars(object)["__class__"].__set__)  # pickle asks for it too
    own = {"__call__": call, "__class__": own_class, "__copy__": copied, "__reduce_ex__": reduced}
    try:
        derived = type(kind)(kind.__name__, (kind,), own | {name: getattr(kind, name) for name in _NAMES})
    except Exception:  # its metaclass, or what it does with derived classes, does not allow it
        return None
    found = _sharing(vars(model), derived)
    made.append(weakref.ref(found))
    return found


def _sharing(attributes: dict[str, Any], kind: type[nn.Module]) -> nn.Module:
    """An instance of a class with these very attributes."""
    found = object.__new__(kind)
    object.__setattr__(found, "__dict__", attributes)
    return found


def _itself(model: nn.Module) -> nn.Module:
    return model


_NAMES = ("__module__", "__qualname__", "__doc__")
