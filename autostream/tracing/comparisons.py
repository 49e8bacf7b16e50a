"""Comparisons with a parameter on their right are the parameter's own, in a trace as in eager mode.

Python asks the right operand first if its type is a subclass of the left one's (The Python Language Reference, 3.3.1):
``x > weight`` is ``weight < x``, whose result has the strides of ``weight``. In a trace both are fake tensors, and the
left one would be asked.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class ReflectedComparisons(TorchFunctionMode):
    """Trace inside this, as the last such mode that is entered: it looks at the frame that compares.

    Example:
        >>> import torch
        >>> x, weight = torch.ones(2, 3).t(), nn.Parameter(torch.zeros(3, 2))
        >>> (x > weight).stride(), x.gt(weight).stride()
        ((2, 1), (1, 3))
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function, with its arguments the other way round where Python would have asked the right one."""
        if func in _REFLECTED and _asks_the_right(*args) and _is_operator(func, sys._getframe(1)):
            return _REFLECTED[func](*reversed(args))
        return func(*args, **(kwargs or {}))


_REFLECTED: Mapping[Any, Callable[[Tensor, Tensor], Tensor]] = {
    Tensor.lt: Tensor.gt,
    Tensor.gt: Tensor.lt,
    Tensor.le: Tensor.ge,
    Tensor.ge: Tensor.le,
    Tensor.ne: Tensor.ne,
    Tensor.__eq__: Tensor.eq,
}
"""By method, the one that says the same the other way round."""


def _asks_the_right(left: object, right: object) -> bool:
    return isinstance(right, nn.Parameter) and isinstance(left, Tensor) and not isinstance(left, nn.Parameter)


def _is_operator(func: Any, frame: FrameType) -> bool:
    """Whether a function stands for ``<`` or the like, and is not called by its name: then the left one is asked."""
    return func is Tensor.__eq__ or dis.opname[frame.f_code.co_code[frame.f_lasti]] == "COMPARE_OP"
