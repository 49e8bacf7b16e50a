"""Whether a mode computes what the model computes: only what is right is timed.

Floating-point results differ from mode to mode, for sums are taken in another order. A mode is right if its distance
from a reference in higher precision is that of the plain model, give or take.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autostream.bench.modes import tensors_in
from autostream.errors import TargetError

TIMES_EAGER = 4.0
"""A mode may be this many times as far from the reference as the plain model is."""

ROUNDINGS = 8.0
"""Or as far as this many roundings of its dtype, where the plain model happens to hit the reference."""

MOST = 0.5
"""But no further than this, however far the plain model is: nothing but zeros has an error of one."""


def reference(model: nn.Module, args: Sequence[Any]) -> list[Tensor]:
    """The output tensors of a model computed in float64, or in float32 where an op has no float64.

    Raises:
        TargetError: it returns no tensors, so that nothing could be compared.
    """
    try:
        tensors = _outputs(model, args, torch.float64)
    except RuntimeError:
        tensors = _outputs(model, args, torch.float32)
    if not tensors:
        raise TargetError(
            f"{type(model).__name__} returns no tensors that could be checked: return them in a container"
        )
    return tensors


def _outputs(model: nn.Module, args: Sequence[Any], dtype: torch.dtype) -> list[Tensor]:
    return tensors_in(copy.deepcopy(model).to(dtype)(*_cast(args, dtype)))


def relative_error(outputs: Any, expected: Sequence[Tensor]) -> float:
    """The distance of outputs from what is expected: the largest ``‖out − ref‖ / ‖ref‖`` of their tensors.

    Each tensor counts for itself: a small one that is all wrong would not show in the norm of all.

    Returns:
        Infinity where the number of tensors, a shape, an integer or a NaN tells that it is another result altogether.

    Example:
        >>> relative_error((torch.tensor([3.0, 4.5]),), [torch.tensor([3.0, 4.0])])
        0.1
        >>> relative_error(torch.tensor([1, 2]), [torch.tensor([1, 3])])
        inf
    """
    found = tensors_in(outputs)
    if [tensor.shape for tensor in found] != [tensor.shape for tensor in expected]:
        return float("inf")
    return max(map(_distance, found, expected), default=0.0)


def _distance(ours: Tensor, theirs: Tensor) -> float:
    if not (theirs.is_floating_point() or theirs.is_complex()):
        return 0.0 if torch.equal(ours, theirs) else float("inf")
    exact = torch.complex128 if theirs.is_complex() else torch.float64
    difference, norm = (ours.to(exact) - theirs.to(exact)).norm().item(), theirs.to(exact).norm().item()
    error = difference / norm if norm else difference
    return error if error == error else float("inf")  # NaN is no distance


def allowed_error(eager_error: float, dtype: torch.dtype) -> float:
    """The largest error that counts as right, for the plain model's own error in that dtype.

    Example:
        >>> allowed_error(1e-3, torch.float16), allowed_error(0.0, torch.float16)
        (0.0078125, 0.0078125)
        >>> allowed_error(1e-2, torch.float16)
        0.04
    """
    return min(max(TIMES_EAGER * eager_error, ROUNDINGS * torch.finfo(dtype).eps), MOST)


def dtype_of(model: nn.Module, args: Sequence[Any]) -> torch.dtype:
    """What a model computes in: the dtype of its first floating-point parameter or input."""
    tensors = (*model.parameters(), *tensors_in(args))
    return next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), torch.float32)


def _cast(args: Sequence[Any], dtype: torch.dtype) -> Any:
    return pytree.tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, list(args))
