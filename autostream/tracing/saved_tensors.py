"""Hooks of what autograd saves (``torch.autograd.graph.saved_tensors_hooks``), and how to do without.

Private to PyTorch (seen in 2.11 and 2.13): its public relatives can add hooks, but none can take them away.
"""

from __future__ import annotations

from collections.abc import Iterator
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
    top = getattr(getattr(torch._C, "_autograd", None), "_top_saved_tensors_default_hooks", None)
    return top is None or top(True) is not None
