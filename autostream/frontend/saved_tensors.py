"""What autograd saves: hooks of it (``torch.autograd.graph.saved_tensors_hooks``), what these raise, how long it stays.

Private to PyTorch (seen in 2.11 and 2.13): its public relatives can add hooks, but none can take them away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import Function

from autostream.errors import TraceError

_NEEDED = (
    "_top_saved_tensors_default_hooks",
    "_pop_saved_tensors_default_hooks",
    "_push_saved_tensors_default_hooks",
)


@contextmanager
def hooks_set_aside() -> Iterator[None]:
    """Keep the caller's hooks from seeing fake tensors.

    Raises:
        TraceError: this version of PyTorch has no way to.

    Example:
        >>> def packed(tensor):
        ...     print("saved")
        ...     return tensor
        >>> with torch.autograd.graph.saved_tensors_hooks(packed, lambda tensor: tensor):
        ...     with hooks_set_aside():
        ...         y = torch.ones(2, requires_grad=True).exp()
        ...     y = torch.ones(2, requires_grad=True).exp()
        saved
    """
    autograd: Any = getattr(torch._C, "_autograd", None)
    if missing := [name for name in _NEEDED if not hasattr(autograd, name)]:
        raise TraceError(f"torch {torch.__version__} has no {missing[0]}, which sets hooks of saved tensors aside")
    hooks = []
    while (pair := autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(pair)
        autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            autograd._push_saved_tensors_default_hooks(pack, unpack)


def hooks_are_set() -> bool:
    """Whether somebody looks at what autograd saves, such as a checkpoint, which compares it with what it saves later.

    Where this version of PyTorch does not tell, somebody may.

    Example:
        >>> with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        ...     inside = hooks_are_set()
        >>> inside, hooks_are_set()
        (True, False)
    """
    top = _top()
    return top is None or top(True) is not None


keeps_graph: Callable[[], bool] = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)
"""Whether what is saved stays after the backward that is running, which may be run again (``retain_graph=True``).

Where a version of PyTorch does not tell, it may.
"""


def apply(function: type[Function], *args: Any) -> Any:
    """What a function of autograd returns, or what a hook raises that is given the tensors which it saves.

    A checkpoint's hook raises to end what is computed once more as soon as it has all. PyTorch 2.11 can lose that on
    its way, and raises a ``SystemError`` that says ``returned NULL without setting an exception`` (pytorch#179536).

    Example:
        >>> class Exp(Function):
        ...     @staticmethod
        ...     def forward(ctx, x):
        ...         y = x.exp()
        ...         ctx.save_for_backward(y)
        ...         return y
        >>> apply(Exp, torch.zeros(2))
        tensor([1., 1.])
    """
    top = _top()
    if top is None or (pair := top(True)) is None:
        return function.apply(*args)  # type: ignore[no-untyped-call]
    pack, unpack = pair
    raised: list[BaseException] = []

    def noted(tensor: Any) -> Any:
        try:
            return pack(tensor)
        except BaseException as error:
            raised.append(error)
            raise

    try:
        with torch.autograd.graph.saved_tensors_hooks(noted, unpack):
            return function.apply(*args)  # type: ignore[no-untyped-call]
    except SystemError:
        if raised:
            raise raised[-1] from None
        raise
    finally:
        raised.clear()  # an error has the frames that it came through, and these have this list


def _top() -> Any:
    """What gives the pair of hooks that was set last, or nothing where this version of PyTorch has no such thing."""
    return getattr(getattr(torch._C, "_autograd", None), _NEEDED[0], None)
