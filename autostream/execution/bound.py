"""Tensors that a run uses where they are: are they still there, and do they lie as they did?

Asked at every call of up to thousands of weights, so the common answer has to be quick. PyTorch's guards compare dtype,
sizes and strides of many tensors in one call; they also see what does not matter here (``requires_grad``, modes of the
thread), so a no of theirs is looked into.

Private to PyTorch (seen on 2.11 and 2.13): ``TensorGuards``. Where a version lacks it, each tensor is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
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


class Frozen:
    """Whether what a program holds on to is still what some of its arguments hold, as far as their versions tell.

    PyTorch counts what is written to a tensor, but for what is written through ``tensor.data``, and it counts nothing
    for tensors that were made in inference mode. Keeps the tensors' memory, so that nothing else can come to lie there.

    Args:
        positions: of those arguments.
        tensors: all arguments.
        versions: of all arguments, from before the program was made.

    Example:
        >>> weight = torch.ones(2)
        >>> frozen = Frozen({0}, [weight], versions_of([weight]))
        >>> frozen([weight])
        True
        >>> _ = weight.mul_(2)
        >>> frozen([weight])
        False
    """

    def __init__(self, positions: Collection[int], tensors: Sequence[Tensor], versions: Sequence[int | None]) -> None:
        self._positions = sorted(positions)
        self._versions = [versions[at] for at in self._positions]
        self._held = [tensors[at].detach() for at in self._positions]
        self._unmoved = Bound(self._held).unmoved

    def __call__(self, tensors: Sequence[Tensor]) -> bool:
        """Whether it holds of these arguments."""
        if not self._positions:
            return True
        now = [tensors[at] for at in self._positions]
        return versions_of(now) == self._versions and self._unmoved(now)


def versions_of(tensors: Sequence[Tensor]) -> list[int | None]:
    """How often each tensor has been written to; ``None`` where PyTorch does not count.

    Example:
        >>> versions_of([torch.ones(2).add_(1)])
        [1]
    """
    try:
        return list(map(_VERSION, tensors))
    except RuntimeError:
        return [None if tensor.is_inference() else tensor._version for tensor in tensors]


_VERSION = attrgetter("_version")


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
