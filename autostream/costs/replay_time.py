"""Measures how long a replay of a CUDA graph takes."""

from __future__ import annotations

import itertools
from statistics import median

import torch

_REPLAYS = 5


def replay_us(graph: torch.cuda.CUDAGraph) -> float:
    """The median time of a replay on the current stream, µs, without the first replay, which uploads the graph."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(_REPLAYS + 1)]  # type: ignore[no-untyped-call]
    for event in events:
        graph.replay()
        event.record()
    events[-1].synchronize()
    times_ms: list[float] = [before.elapsed_time(after) for before, after in itertools.pairwise(events)]
    return 1e3 * median(times_ms)
