"""Hooks on the tensors that autograd saves (``torch.autograd.graph.saved_tensors_hooks``): disable, detect, call them.

Private to PyTorch; see the table in ``frontend/__init__.py``. Public functions can add hooks, but not remove them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from autostream.errors import TraceError

_NEEDED = (
    "_top_saved_tensors_default_hooks",
    "_pop_saved_tensors_default_hooks",
    "_push_saved_tensors_default_hooks",
)


@contextmanager
def hooks_set_aside() -> Iterator[None]:
    """Disable the caller's hooks, which must not get fake tensors.

    Raises:
        TraceError: this version of PyTorch cannot do so.

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
    """Whether hooks are set, such as a checkpoint's, which compares what is saved with what is saved at recomputation.

    ``True`` where this version of PyTorch does not tell.

    Example:
        >>> with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        ...     inside = hooks_are_set()
        >>> inside, hooks_are_set()
        (True, False)
    """
    top = _top()
    return top is None or top(True) is not None


def call_keeping_errors(function: Callable[..., Any], *args: Any) -> Any:
    """Call what saves tensors for a backward; an exception of a hook on them comes through.

    A checkpoint's hook raises to stop recomputing as soon as it has all tensors. PyTorch 2.11 can lose that exception,
    and raises a ``SystemError`` that says ``returned NULL without setting an exception`` (pytorch#179536).

    Example:
        >>> call_keeping_errors(torch.exp, torch.zeros(2, requires_grad=True))
        tensor([1., 1.], grad_fn=<ExpBackward0>)
    """
    top = _top()
    if top is None or (pair := top(True)) is None:
        return function(*args)
    pack, unpack = pair
    raised: list[BaseException] = []

    def recording_pack(tensor: Any) -> Any:
        try:
            return pack(tensor)
        except BaseException as error:
            raised.append(error)
            raise

    try:
        with torch.autograd.graph.saved_tensors_hooks(recording_pack, unpack):
            return function(*args)
    except SystemError:
        if raised:
            raise raised[-1] from None
        raise
    finally:
        raised.clear()  # breaks a cycle: the traceback of an exception refers to this frame


def _top() -> Any:
    """PyTorch's function for the innermost pair of hooks; ``None`` where this version has none."""
    return getattr(getattr(torch._C, "_autograd", None), _NEEDED[0], None)
