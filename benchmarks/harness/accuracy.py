"""Accuracy of a mode against a reference in higher precision; only accurate modes are timed.

Modes sum in different orders and so round differently. A mode is accurate if its error is about that of eager.
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
"""A mode's error may be this many times that of eager."""

ROUNDINGS = 8.0
"""Or this many units of rounding of its dtype, where eager happens to be exact."""

MOST = 0.5
"""But no more than this, whatever the error of eager: outputs of zeros have an error of 1."""


def reference(model: nn.Module, args: Sequence[Any]) -> list[Tensor]:
    """The output tensors of a model computed in float64, or in float32 where an op has no float64.

    Raises:
        TargetError: it returns no tensors to compare.
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
    """The largest error of an accurate mode, for the error of eager in that dtype.

    Example:
        >>> allowed_error(1e-3, torch.float16), allowed_error(0.0, torch.float16)
        (0.0078125, 0.0078125)
        >>> allowed_error(1e-2, torch.float16)
        0.04
    """
    return min(max(TIMES_EAGER * eager_error, ROUNDINGS * torch.finfo(dtype).eps), MOST)


def dtype_of(model: nn.Module, args: Sequence[Any]) -> torch.dtype:
    """The dtype of a model's first floating-point parameter or input."""
    tensors = (*model.parameters(), *tensors_in(args))
    return next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), torch.float32)


def _cast(args: Sequence[Any], dtype: torch.dtype) -> Any:
    return pytree.tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, list(args))
