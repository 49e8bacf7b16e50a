"""Measures how long all-reduces of a group of processes take, by their size.

NCCL chooses protocol and algorithm by tables, and the times that result are no sum of a start and a transfer: on two
H200s, 1.5 MiB take 19 µs, 2 MiB 33, and 10 MiB 55. Such a step decides which gradients are reduced together.

    3 all-reduces in a CUDA graph ──╮
    9 all-reduces in a CUDA graph ──┴──▶ the time of one; on a CPU the clock is read around a few
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from autostream.analysis.process_groups import group_named
from autostream.costs.replay_time import replay_us
from autostream.runtime.capture import capture, run_first
from autostream.runtime.streams import capture_stream

SIZES = tuple(round(2 ** (half / 2)) // 16 * 16 for half in range(24, 51))
"""Bytes of the all-reduces that are measured: 4 KiB to 32 MiB, each √2 times the one before."""

_SHORT, _LONG = 3, 9
_CPU_RUNS = 5


def all_reduce_times_us(group: str, room: Tensor) -> list[float]:
    """How long an all-reduce of each of :data:`SIZES` takes, µs. All processes of the group have to call this.

    Args:
        group: its name.
        room: zeros on the device of this process, as many bytes as the largest of the sizes.

    Raises:
        RuntimeError: the device or the group failed.
    """
    timed = _on_cpu if room.device.type == "cpu" else partial(_in_cuda_graphs, capture_stream(room.device))
    known = group_named(group)
    return [timed(partial(dist.all_reduce, room[: size // room.itemsize], group=known)) for size in SIZES]


def _on_cpu(run: Callable[[], object]) -> float:
    times_s = []
    for _ in range(_CPU_RUNS + 1):
        start = time.perf_counter()
        run()
        times_s.append(time.perf_counter() - start)
    return 1e6 * median(times_s[1:])


def _in_cuda_graphs(stream: torch.cuda.Stream, run: Callable[[], object]) -> float:
    def replayed_us(times: int) -> float:
        graph, _ = capture(lambda: [run() for _ in range(times)], stream)
        return replay_us(graph)

    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        run_first(run, stream)
        return max(0.0, (replayed_us(_LONG) - replayed_us(_SHORT)) / (_LONG - _SHORT))
