"""A thread that allocates memory, fills it with NaN and frees it, close to the limit, while autostream runs.

The caching allocator reuses a freed block for the next allocation on the same stream. So this thread allocates on every
stream that runs may use: a block that a run has freed too early is soon full of NaN.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import Tensor

from tests.agreement import Lane

MIB = 2**20

SIZES = (2**9, 2**14, 2**18, MIB, 4 * MIB, 24 * MIB)
"""Bytes: small blocks, and parts and wholes of the allocator's large ones."""

BLOCKS = 12
"""Of one call of :func:`churn`."""


def churn(device: torch.device, lane: Lane, most_bytes: int, choose: random.Random) -> int:
    """Allocate blocks on a stream up to a size, fill them with NaN, and free them in random order.

    Returns:
        The bytes that were allocated; fewer if there was no more memory.
    """
    taken: list[Tensor] = []
    with lane():
        for _ in range(BLOCKS):
            size = choose.choice(SIZES)
            if sum(block.nbytes for block in taken) + size > most_bytes:
                break
            try:
                taken.append(torch.empty(size // 4, device=device).fill_(torch.nan))
            except torch.OutOfMemoryError:
                break
        choose.shuffle(taken)
        count = sum(block.nbytes for block in taken)
        while taken:
            taken.pop()
    return count


@contextmanager
def pressure(device: torch.device, lanes: Sequence[Lane], most_bytes: int, seed: int = 0) -> Iterator[list[int]]:
    """Let a thread allocate and free memory on each of these streams in turn.

    Yields:
        The bytes of each turn.

    Raises:
        Exception: what that thread raised, afterwards.
    """
    stop, taken, choose = threading.Event(), list[int](), random.Random(seed)

    def work() -> None:
        for lane in itertools.cycle(lanes):
            if stop.is_set():
                return
            taken.append(churn(device, lane, most_bytes, choose))

    with ThreadPoolExecutor(1) as others:
        working = others.submit(work)
        try:
            yield taken
        finally:
            stop.set()
        working.result()


@contextmanager
def limited(device: torch.device, room_bytes: int) -> Iterator[None]:
    """Limit the memory that the process may allocate on a GPU; no limit on the CPU."""
    if device.type == "cpu":
        yield
        return
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(device) + room_bytes) / total, device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
