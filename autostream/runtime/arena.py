"""One block of memory for what a run computes in between, and tensors at given places in it.

A lowered graph takes the block on the caller's stream before the fork and lets go of it behind the join::

    arena = autostream_execution_arena_reserve('cuda:0', 4096)
    buf0 = autostream_execution_arena_place(arena, 512, (2, 3), (3, 1), torch.float16)

Where each tensor lies, and that whoever had these bytes before is done with them, is for the schedule to say.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def reserve(device: str, size: int) -> Tensor:
    """Take ``size`` bytes of a device's memory, aligned to 512 bytes on a GPU and to 64 on a CPU."""
    return torch.empty(size, dtype=torch.uint8, device=device)


def place(arena: Tensor, offset: int, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor in an arena, whose first byte is number ``offset``; it holds whatever is there.

    Example:
        >>> arena = reserve("cpu", 1024)
        >>> ones = place(arena, 512, (2, 3), (3, 1), torch.float32).fill_(1)
        >>> ones.sum(), arena[512:536].view(torch.float32).sum()
        (tensor(6.), tensor(6.))
    """
    empty = torch.empty(0, dtype=dtype, device=arena.device)
    return empty.set_(arena.untyped_storage(), offset // dtype.itemsize, size, stride)
