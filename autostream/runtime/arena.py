"""The arena: one block of memory for the intermediate tensors of a run, each at a fixed offset.

A lowered graph allocates the block on the caller's stream before the fork and frees it after the join::

    arena = autostream_runtime_arena_reserve('cuda:0', 4096)
    buf0 = autostream_runtime_arena_place(arena, 512, (2, 3), (3, 1), torch.float16)

The schedule decides the offsets, and guarantees that no two tensors use the same bytes at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def reserve(device: str, size: int) -> Tensor:
    """Allocate ``size`` bytes on a device, aligned to 512 bytes on a GPU and to 64 on a CPU."""
    return torch.empty(size, dtype=torch.uint8, device=device)


def place(arena: Tensor, offset: int, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An uninitialized tensor in an arena, ``offset`` bytes from its start.

    Example:
        >>> arena = reserve("cpu", 1024)
        >>> ones = place(arena, 512, (2, 3), (3, 1), torch.float32).fill_(1)
        >>> ones.sum(), arena[512:536].view(torch.float32).sum()
        (tensor(6.), tensor(6.))
    """
    empty = torch.empty(0, dtype=dtype, device=arena.device)
    return empty.set_(arena.untyped_storage(), offset // dtype.itemsize, size, stride)
