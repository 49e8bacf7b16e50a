"""Calls of a model led elsewhere for a while, of the very object that its users have.

loss_fn(model, …) ─▶ model(x): hooks ─▶ forward, exchanged ─▶ run ─▶ ForwardOf(model): forward as it was

A stand-in in its place would do where it is only called. But a loss may also index it, iterate over it, ask what class
it is, or have it from elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from autostream.tracing.state import name_of


class ForwardOf(nn.Module):
    """A model's ``forward`` without its hooks, as a module.

    Args:
        model: the model.

    Example:
        >>> import torch
        >>> layer = nn.ReLU()
        >>> handle = layer.register_forward_hook(lambda *_: print("a hook"))
        >>> ForwardOf(layer)(torch.tensor([-1.0, 1.0]))
        tensor([0., 1.])
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def _get_name(self) -> str:
        return name_of(self.model)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model's does."""
        return self.model.forward(*args, **kwargs)


@contextmanager
def rerouted(model: nn.Module, run: Callable[..., Any]) -> Iterator[None]:
    """Inside, the model's ``forward`` is ``run``, and inside of that what it was before.

    Args:
        model: the model.
        run: takes what ``forward`` takes.

    Example:
        >>> import torch
        >>> layer = nn.ReLU()
        >>> with rerouted(layer, lambda x: layer(x) + 1):
        ...     layer(torch.tensor([-1.0, 1.0]))
        tensor([1., 2.])
    """
    own = vars(model)
    before = {name: own[name] for name in ("forward",) if name in own}

    def forward(*args: Any, **kwargs: Any) -> Any:
        with _holding(own, before):
            return run(*args, **kwargs)

    with _holding(own, {"forward": forward}):
        yield


@contextmanager
def _holding(own: dict[str, Any], forward: Mapping[str, Any]) -> Iterator[None]:
    """Inside, attributes have this ``forward``, or none, for the class's own."""
    before = {name: own.pop(name) for name in ("forward",) if name in own}
    own.update(forward)
    try:
        yield
    finally:
        own.pop("forward", None)
        own.update(before)
