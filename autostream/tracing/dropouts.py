"""Dropouts with nothing to do return their argument, in a trace as in eager mode.

Export takes them for copies, by a decomposition of its own: with memory of their own, and with other strides where the
argument has gaps. What looks at such a result and writes would then write somewhere else than in eager mode.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


class IdleDropouts(TorchFunctionMode):
    """Trace inside this: what is dropped out in eval mode, or with ``p=0``, is the same tensor.

    Example:
        >>> x = torch.ones(2)
        >>> with IdleDropouts():
        ...     F.dropout(x, 0.5, training=False) is x
        True
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function, unless it is a dropout with nothing to do."""
        kwargs = kwargs or {}
        if func in _IDLE and _IDLE[func](*args, **kwargs):
            return args[0] if args else kwargs["input"]
        return func(*args, **kwargs)


def _is_idle(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> bool:
    return p == 0 or (not training and 0 <= p <= 1)


_IDLE: Mapping[Any, Callable[..., bool]] = {
    F.dropout: _is_idle,
    torch.dropout: lambda input, p, train: _is_idle(input, p, train),
}
"""By function, whether a call of it has nothing to do."""
