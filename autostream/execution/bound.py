"""Tensors that a run uses where they are: are they still there, and do they lie as they did?

Asked at every call of up to thousands of weights, so the common answer has to be quick. PyTorch's guards compare dtype,
sizes and strides of many tensors in one call; they also see what does not matter here (``requires_grad``, modes of the
thread), so a no of theirs is looked into.

Private to PyTorch (seen on 2.11 and 2.13): ``TensorGuards``. Where a version lacks it, each tensor is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor


class Bound:
    """What some tensors were like when this was made. Holds no reference to them.

    Args:
        tensors: to look at.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2, 3))
        >>> bound = Bound([weight])
        >>> bound.unmoved([weight])
        True
        >>> weight.data = weight.data.t()
        >>> bound.unmoved([weight])
        False
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._addresses = _addresses(tensors)
        self._layouts = _layouts(tensors)
        self._guarded = _guard(tensors)

    def unmoved(self, tensors: Sequence[Tensor]) -> bool:
        """Whether as many tensors are at the same addresses, with the same dtypes, sizes and strides."""
        try:
            if _addresses(tensors) != self._addresses:
                return False
        except RuntimeError:  # sparse ones have no address
            return False
        if self._guarded(*tensors):
            return True
        if _layouts(tensors) != self._layouts:
            return False
        self._guarded = _guard(tensors)
        return True


def looks_alike(tensors: Sequence[Tensor]) -> Callable[[tuple[Any, ...]], bool]:
    """A quick look at whether values are tensors of the same types, dtypes, devices, sizes and strides as these.

    It may say no where they are, but not yes where one is not. Holds no reference to the tensors.

    Example:
        >>> alike = looks_alike([torch.ones(2, 3)])
        >>> alike((torch.zeros(2, 3),)), alike((torch.zeros(3, 2),)), alike((3,)), alike(())
        (True, False, False, False)
    """
    check, types = _guard(tensors), list(map(type, tensors))
    # Asked for strides, a nested tensor ends the process.
    return lambda values: list(map(type, values)) == types and not any(map(_IS_NESTED, values)) and check(*values)


_IS_NESTED = attrgetter("is_nested")


def _addresses(tensors: Sequence[Tensor]) -> list[int]:
    return list(map(Tensor.data_ptr, tensors))


def _layouts(tensors: Sequence[Tensor]) -> list[list[object]]:
    """By column: a tuple for each of thousands of tensors would set off the garbage collector at every call."""
    return [list(map(column, tensors)) for column in _COLUMNS]


_COLUMNS: tuple[Callable[[Tensor], object], ...] = (Tensor.size, Tensor.stride, attrgetter("dtype"))


def _guard(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """A quick look that may say no where all is well, but not yes where it is not."""
    guards: Any = getattr(getattr(torch._C._dynamo, "guards", None), "TensorGuards", None)
    if guards is None or not tensors:
        return lambda *tensors: False
    check: Callable[..., bool] = guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return check
