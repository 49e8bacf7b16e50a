"""``AUTOSTREAM_VERIFY=paranoid``: compares every scheduled call with an eager call from the same state.

    state, inputs, generators ──▶ scheduled call ──▶ restored ──▶ eager call ──▶ same outputs, state and inputs?

Each comparison costs an eager call and copies of all state: it is for finding out whether autostream is at fault. A
backward is compared as a call of its own, with its ops run one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autostream.errors import MismatchError
from autostream.frontend.modules import name_of
from autostream.frontend.tensor_parallel import local_of
from autostream.runtime.restore import undone

TOLERANCE: Mapping[torch.dtype, float] = {
    torch.float64: 1e-9,
    torch.float32: 1e-3,
    torch.float16: 3e-2,
    torch.bfloat16: 1e-1,
}
"""The largest error of a tensor relative to its norm, and of an element relative to the largest one. Fused kernels
round differently, and float32 may be TF32. A read of memory too early or too late is off by much more."""

_COARSE = 0.25
"""The tolerance of all narrower dtypes."""


def compared(
    model: nn.Module,
    run: Callable[[], Any],
    tensors: Sequence[Tensor],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    name: str = "",
) -> Any:
    """Run a scheduled call, then the model eagerly from the same state; return the outputs of the scheduled call.

    Args:
        model: the module.
        run: the scheduled call.
        tensors: the flat inputs of both.
        args: of the eager call.
        kwargs: of the eager call.
        name: of the model that ``model`` is a graph of; by default the module's own.

    Raises:
        MismatchError: an output, the model's state or an input differs.

    Example:
        >>> x = torch.ones(2)
        >>> compared(nn.ReLU(), lambda: x + 1, [x], (x,), {})
        Traceback (most recent call last):
        ...
        autostream.errors.MismatchError: ReLU, scheduled: output 0 is off by 1 of its size, and 0.001 is rounding: \
set AUTOSTREAM_DISABLE=1 to run it plainly, and report this
    """
    state = {f"{of} afterwards": local_of(tensor) for of, tensor in _state(model)}
    state |= {f"input {at} afterwards": tensor for at, tensor in enumerate(tensors)}
    devices = {str(tensor.device) for tensor in state.values() if tensor.is_cuda}
    with undone(list(state.values()), [True] * len(state), devices):
        outputs = run()
        ours = {**_outputs(outputs), **state}
        ours = {name: local_of(tensor).detach().clone() for name, tensor in ours.items()}
    theirs = {**_outputs(model(*args, **kwargs)), **state}
    theirs = {name: local_of(tensor).detach() for name, tensor in theirs.items()}
    if reason := difference(ours, theirs):
        advice = "set AUTOSTREAM_DISABLE=1 to run it plainly, and report this"
        raise MismatchError(f"{name or name_of(model)}, scheduled: {reason}: {advice}")
    return outputs


def difference(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> str:
    """The first tensor that differs, and by how much; ``""`` if none does.

    Example:
        >>> difference({"y": torch.ones(2)}, {"y": torch.ones(2)})
        ''
        >>> difference({"y": torch.ones(2)}, {"y": torch.ones(3)})
        'y is 2:float32, and should be 3:float32'
        >>> difference({}, {"y": torch.ones(3)})
        'there is no y'
    """
    for name, expected in theirs.items():
        if name not in ours:
            return f"there is no {name}"
        actual = ours[name]
        if (actual.shape, actual.dtype, actual.layout) != (expected.shape, expected.dtype, expected.layout):
            return f"{name} is {_kind(actual)}, and should be {_kind(expected)}"
        error, allowed = _error(actual, expected), _allowed(expected.dtype)
        if not error <= allowed:
            return f"{name} is off by {error:.3g} of its size, and {allowed:.3g} is rounding"
    return next((f"{name} is one too many" for name in ours if name not in theirs), "")


def _state(model: nn.Module) -> Sequence[tuple[str, Tensor]]:
    return list(chain(model.named_parameters(), model.named_buffers()))


def _outputs(outputs: Any) -> dict[str, Tensor]:
    leaves = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]
    return {f"output {at}": leaf for at, leaf in enumerate(leaves)}


def _allowed(dtype: torch.dtype) -> float:
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    return TOLERANCE.get(dtype.to_real() if dtype.is_complex else dtype, _COARSE)


def _error(ours: Tensor, theirs: Tensor) -> float:
    """The relative error; infinity if they differ in which elements are finite."""
    if theirs.layout is not torch.strided:
        return _error(ours.to_dense(), theirs.to_dense())
    if not (theirs.is_floating_point() or theirs.is_complex()):
        return 0.0 if torch.equal(ours, theirs) else float("inf")
    exact = torch.complex128 if theirs.is_complex() else torch.float64
    left, right = ours.to(exact), theirs.to(exact)
    finite = right.isfinite()
    if not torch.equal(left.isfinite(), finite) or not left[~finite].allclose(right[~finite], equal_nan=True):
        return float("inf")
    off, scale = (left[finite] - right[finite]).abs(), right[finite].abs()
    if not off.numel():
        return 0.0
    # Also relative to the largest element: a few stale elements hardly change the norm of many.
    return max(_share(float(off.norm()), float(scale.norm())), _share(float(off.max()), float(scale.max())))


def _share(part: float, whole: float) -> float:
    return part / whole if whole else part


def _kind(tensor: Tensor) -> str:
    layout = "" if tensor.layout is torch.strided else f", {str(tensor.layout).removeprefix('torch.')}"
    return f"{'x'.join(map(str, tensor.shape)) or 'scalar'}:{str(tensor.dtype).removeprefix('torch.')}{layout}"
