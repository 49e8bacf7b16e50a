"""What two calls must have in common to share one schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autostream.utils.storages import byte_offset, storage_of


def described(tensors: Sequence[Tensor], device: str | None = None) -> str:
    """What tensors are like, readable.

    Args:
        tensors: any.
        device: where to say that they are, if none of them is on a device of this type.

    Example:
        >>> import torch
        >>> described([torch.ones(2, 3), torch.tensor(1)])
        '2x3:float32 on cpu, scalar:int64 on cpu'
    """
    moved = None if device is None else torch.device(device)
    if moved is None or any(t.device.type == moved.type for t in tensors):
        return _described([(t.shape, (), t.dtype, t.device) for t in tensors])
    return _described([(t.shape, (), t.dtype, moved) for t in tensors])


def _described(kinds: Sequence[tuple[Sequence[int], Any, torch.dtype, torch.device]]) -> str:
    readable = ", ".join(
        f"{'x'.join(map(str, shape)) or 'scalar'}:{str(dtype).removeprefix('torch.')} on {device}"
        for shape, _, dtype, device in kinds
    )
    return readable or "no tensors"


def aliases_of(tensors: Sequence[Tensor]) -> tuple[tuple[int, int], ...]:
    """Which tensors share memory: for each, the first in its storage and how many bytes ahead; ``()`` where none do."""
    storages = [storage_of(t) for t in tensors]
    if len(set(storages)) == len(storages):
        return ()
    # Offsets matter only relative to the tensor shared with: its own place in memory is not the program's business.
    firsts = [storages.index(storage) for storage in storages]
    return tuple(
        (first, byte_offset(t) - byte_offset(tensors[first])) for first, t in zip(firsts, tensors, strict=True)
    )
