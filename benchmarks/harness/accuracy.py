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

from autostream.cli.modes import tensors_in
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
