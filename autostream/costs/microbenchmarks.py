"""Measures the profile of a GPU with CUDA graphs of nearly empty kernels, and with large copies and products.

    chain        k ─ k ─ k ─ …                      edge within a stream; overhead of a replay
    ladder       k ─ k ─ k ─ …                      each kernel waits for one of its own stream and one of
                   ╳   ╳   ╳                        the next: edge between streams, for 2 streams and for 8
                 k ─ k ─ k ─ …
    fork, join   k ┬ k ┬ k ┬ k ┬ k …                cost of forking and joining a side stream
                   └ k ┘   └ k ┘
    fan          8 chains side by side              how fast the front end starts kernels
    copy, products of matrices                      bandwidth, operations per µs by dtype

Each is captured in two lengths and their times are subtracted, so that fixed costs cancel.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from autostream.costs.replay_time import replay_us
from autostream.ir import DeviceProfile
from autostream.runtime.capture import capture
from autostream.runtime.streams import capture_stream, fork, record, restored, use, wait

_SHORT, _LONG = 20, 120
_MANY = 8
_LAUNCHES = 200
_WIDTH = 4096
_REPEATS = 3


def measure_profile(device: str, looked_up: DeviceProfile) -> DeviceProfile:
    """Measure the profile of a GPU. Takes about a second, and some hundred megabytes of its memory.

    Args:
        device: e.g. ``"cuda:0"``; it should be idle.
        looked_up: its profile without measuring, for the fields that are not measured (name, size, other dtypes).

    Raises:
        RuntimeError: the device failed, or has not enough memory.
    """
    stream = capture_stream(device)
    with torch.cuda.device(device), torch.no_grad(), torch.cuda.stream(stream):
        bench = _Bench(device, stream)
        flops = {dtype: bench.flops(dtype) for dtype in _PRODUCTS}  # first: the load raises the clocks
        chain_us, fan_us = bench.slope_us(bench.chains, 1), bench.slope_us(bench.chains, _MANY) / _MANY
        ladder_us, wide_us = bench.slope_us(bench.ladder, 2), bench.slope_us(bench.ladder, _MANY)
        stage_us, forked_us = bench.slope_us(bench.forks, 1), bench.slope_us(bench.forks, 2)
        side_us = max(0.0, (forked_us - stage_us) / 2)
        return replace(
            looked_up,
            bandwidth=bench.bandwidth(max(4 * looked_up.cache_bytes, 1 << 28)),
            flops={**looked_up.flops, **flops},
            same_stream_edge_us=chain_us,
            cross_stream_edge_us=max(ladder_us, chain_us),
            fork_us=side_us,
            join_us=side_us,
            per_stream_us=max(0.0, (wide_us - ladder_us) / (_MANY - 2)),
            dispatch_us=min(fan_us, chain_us),
            launch_us=bench.launch_us(),
            replay_us=max(0.0, bench.time_us(partial(bench.chains, 1, _SHORT)) - _SHORT * chain_us),
            source="measured",
        )


_PRODUCTS = ("float64", "float32", "float16", "bfloat16")


class _Bench:
    """Captures and times small graphs; the kernels of each stream use a tensor of their own."""

    def __init__(self, device: str, stream: torch.cuda.Stream) -> None:
        self._device = device
        self._stream = stream
        self._tiny = [torch.zeros(1, device=device) for _ in range(_MANY)]

    def time_us(self, run: Callable[[], object]) -> float:
        """Capture what a function launches and time replays, µs: the least of a few, as disturbances only add."""
        run()
        graph, _ = capture(run, self._stream)
        return min(replay_us(graph) for _ in range(_REPEATS))

    def slope_us(self, run: Callable[[int, int], object], streams: int) -> float:
        """The time that each further step adds to a graph over so many streams, µs."""
        short, long = (self.time_us(partial(run, streams, length)) for length in (_SHORT, _LONG))
        return (long - short) / (_LONG - _SHORT)

    def chains(self, streams: int, length: int) -> None:
        """Chains side by side."""
        with restored(self._device):
            lanes = fork(self._device, streams)
            begin = record(lanes, 0)
            for lane in range(1, streams):
                wait(lanes, lane, begin)
            for lane in [lane for _ in range(length) for lane in range(streams)]:
                use(lanes, lane)
                self._tiny[lane].add_(1)
            for lane in range(1, streams):
                wait(lanes, 0, record(lanes, lane))

    def ladder(self, streams: int, length: int) -> None:
        """Chains whose kernels also wait for the previous kernel of the next chain."""
        with restored(self._device):
            lanes = fork(self._device, streams)
            ends = [record(lanes, 0)] * streams
            for _ in range(length):
                for lane in range(streams):
                    wait(lanes, lane, ends[(lane + 1) % streams])
                    use(lanes, lane)
                    self._tiny[lane].add_(1)
                ends = [record(lanes, lane) for lane in range(streams)]
            for end in ends[1:]:
                wait(lanes, 0, end)

    def forks(self, streams: int, length: int) -> None:
        """A kernel on stream 0, then one on each stream, repeated."""
        with restored(self._device):
            lanes = fork(self._device, streams)
            for _ in range(length):
                self._tiny[0].add_(1)
                begin = record(lanes, 0)
                for lane in reversed(range(streams)):
                    if lane:
                        wait(lanes, lane, begin)
                    use(lanes, lane)
                    self._tiny[lane].add_(1)
                for lane in range(1, streams):
                    wait(lanes, 0, record(lanes, lane))

    def launch_us(self) -> float:
        """The time that the host takes to launch an op, µs."""
        times_s = []
        for _ in range(_REPEATS):
            torch.cuda.synchronize(self._device)
            start = time.perf_counter()
            for _ in range(_LAUNCHES):
                self._tiny[0].add_(1)
            times_s.append(time.perf_counter() - start)
        return 1e6 * min(times_s) / _LAUNCHES

    def bandwidth(self, size: int) -> float:
        """Bytes per µs that a copy of this many bytes reads and writes."""
        source = torch.zeros(size // 4, device=self._device)
        target = torch.empty_like(source)
        return 2 * size / self.time_us(lambda: target.copy_(source))

    def flops(self, dtype: str) -> float:
        """Operations per µs of a large product."""
        # Varied numbers: with equal ones a device needs less power, and runs faster than on real data.
        numbers = torch.arange(_WIDTH**2, device=self._device).mul_(7919).remainder_(1009).sub_(504)
        a = numbers.view(_WIDTH, _WIDTH).to(getattr(torch, dtype)) / 504
        out = torch.empty_like(a)
        return 2 * _WIDTH**3 / self.time_us(lambda: torch.mm(a, a, out=out))
