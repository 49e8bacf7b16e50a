"""Gradients of two processes of one machine, gathered by copy engines: no kernel sends or receives.

    rank 0   tensors ──▶ own row ─╮          ╭─ copy of the other row ─╮
                                  ├ barrier ─┤                         ├ barrier ─▶ sum of both rows
    rank 1   tensors ──▶ own row ─╯          ╰─ copy of the other row ─╯

NCCL's kernels occupy multiprocessors, and products of matrices beside them wait for these. Here each process writes a
row of memory that both see (symmetric memory), and copies the other's; the sum is fused with what reads it. Products
of 462 µs on two H200s take 34 µs more beside buckets of 40 MB, and 125 beside NCCL's; PyTorch's low-contention
all-gather, which copies twice more, adds 62. A small message takes longer to start, 22 µs instead of 9.

Private to PyTorch (``torch.distributed._symmetric_memory``, the same in 2.11 and 2.13). Without it, NCCL reduces.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autostream.analysis.process_groups import group_named, processes_in

_LIBRARY = torch.library.Library("autostream", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "gather_by_copies(Tensor[] tensors, Tensor memory, str group_name) -> Tensor"
)
"""Returns the rows of all processes. They lie in the memory, which nothing but this op uses: to others they are new."""

GATHER_BY_COPIES = torch.ops.autostream.gather_by_copies.default

torch.library.register_fake("autostream::gather_by_copies", lambda tensors, memory, group: torch.empty_like(memory))

_ROW = 128
"""Rows are multiples of so many bytes, so that each begins where a copy is fast."""


def rows_like(tensors: Sequence[Tensor], group: str) -> Tensor:
    """Memory like that in which tensors of one type are gathered: a row for each process of a group.

    Example:
        >>> rows_like([torch.empty(3), torch.empty(2, 2)], "nobody's").shape
        torch.Size([1, 32])
    """
    (first, *_), size = tensors, sum(tensor.numel() for tensor in tensors)
    step = _ROW // first.itemsize
    return first.new_empty(processes_in(group), -(-size // step) * step)


def allocate(like: Tensor, device: str) -> Tensor:
    """Memory like a tensor, in which processes on devices like this one can gather theirs.

    Raises:
        Exception: there is not enough.
    """
    if device == "cpu":  # only in tests, where gloo gathers
        return torch.empty(like.shape, dtype=like.dtype)
    found: Tensor = _module().empty(*like.shape, dtype=like.dtype, device=device)
    return found


def rendezvous(memory: Tensor, group: str) -> None:
    """Let all processes of a group see the memory of each other; each of them has to call this, once all have theirs.

    Raises:
        Exception: they cannot.
    """
    if memory.device.type != "cpu" and _module().rendezvous(memory, group) is None:
        raise RuntimeError("PyTorch made no symmetric memory of it")


def can_copy(device: str) -> bool:
    """Whether processes on devices like this one can copy from each other, as far as this process knows.

    Example:
        >>> can_copy("cpu")
        False
    """
    if torch.device(device).type != "cuda" or not hasattr(_module(), "get_backend"):
        return False
    return bool(_module().get_backend(device) == "CUDA")  # others have no barrier


def can_reduce(tensors: Sequence[Tensor], reduction: str, group: str) -> bool:
    """Whether a reduction over a group can be done so: a sum of two is the same in both processes.

    Example:
        >>> can_reduce([torch.ones(2)], "avg", "nobody's")
        False
    """
    floats = all(tensor.is_floating_point() and tensor.itemsize > 1 for tensor in tensors)
    return floats and reduction in ("sum", "avg") and processes_in(group) == 2


def reduced(rows: Tensor, size: int, reduction: str) -> Tensor:
    """The reduction of the first so many elements of all rows.

    Example:
        >>> reduced(torch.tensor([[1.0, 2.0, 0.0], [3.0, 6.0, 0.0]]), 2, "avg")
        tensor([2., 4.])
    """
    rows = rows.narrow(1, 0, size)
    return rows.mean(0) if reduction == "avg" else rows.sum(0)


def _module() -> Any:
    try:
        return import_module("torch.distributed._symmetric_memory")
    except ImportError:
        return None


def _write(tensors: Sequence[Tensor], row: Tensor) -> None:
    torch.cat([*tensors], out=row[: sum(tensor.numel() for tensor in tensors)])


def _copied(tensors: Sequence[Tensor], memory: Tensor, group: str) -> Tensor:
    seen = _module().rendezvous(memory, group)  # PyTorch keeps it, and there is nothing to wait for
    other = 1 - seen.rank
    _write(tensors, memory[seen.rank])
    seen.barrier(channel=0)  # both rows are written
    memory[other].copy_(seen.get_buffer(other, memory.shape, memory.dtype)[other])
    seen.barrier(channel=0)  # and read: they may be written again
    return memory.view_as(memory)


def _gathered(tensors: Sequence[Tensor], memory: Tensor, group: str) -> Tensor:
    row = torch.empty_like(memory[0])
    _write(tensors, row)
    dist.all_gather_into_tensor(memory.view(-1), row, group_named(group))
    return memory.view_as(memory)


_LIBRARY.impl("gather_by_copies", _copied, "CUDA")  # type: ignore[no-untyped-call]
_LIBRARY.impl("gather_by_copies", _gathered, "CPU")  # type: ignore[no-untyped-call]
