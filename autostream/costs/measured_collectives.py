"""Measures how long all-reduces of a group of processes take, by their size.

NCCL chooses protocol and algorithm by tables, and the times that result are no sum of a start and a transfer: on two
H200s, 1.4 MiB take 17 µs, 2 MiB 26, and 11 MiB 57. Such a step decides which gradients are reduced together.

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

from autostream.costs.replay_time import replay_us
from autostream.runtime.capture import capture, run_first
from autostream.runtime.streams import capture_stream

SIZES = tuple(round(2 ** (half / 2)) // 16 * 16 for half in range(24, 51))
"""Bytes of the all-reduces that are measured: 4 KiB to 32 MiB, each √2 times the one before."""

LONGEST_US = 5000.0
"""Where one takes longer, no larger one is measured: over a slow network that would take longer than all else."""

_SHORT, _LONG = 3, 9
_CPU_RUNS = 5


def time_all_reduce(group: dist.ProcessGroup, summands: Tensor) -> float:
    """How long an all-reduce takes, µs. All processes of the group have to call this.

    Args:
        group: of the processes.
        summands: zeros on the device of this process.

    Raises:
        RuntimeError: the device or the group failed.
    """
    run = partial(dist.all_reduce, summands, group=group)
    return _on_cpu(run) if summands.device.type == "cpu" else _in_cuda_graphs(capture_stream(summands.device), run)


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
