"""Microbenchmarks measure the properties of a simulated device.

A launch starts an edge after the last one on its stream, or an edge between streams after an event that its stream
waits for, whichever is later, and not before the front end has issued it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autostream.costs import microbenchmarks
from autostream.costs.device import profile_named, profile_of
from autostream.costs.microbenchmarks import measure_profile
from autostream.ir import DeviceProfile

OURS = replace(
    profile_named("h200"),
    same_stream_edge_us=1.0,
    cross_stream_edge_us=1.75,
    per_stream_us=0.25,
    dispatch_us=0.1875,
    launch_us=4.0,
    replay_us=1.5,
    bandwidth=4e6,
    flops={"float64": 50e6, "float32": 40e6, "float16": 800e6, "bfloat16": 700e6},
)

Event = tuple[int, float]
"""A stream, and when its last launch ends, µs."""


class Device(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the times of ops on meta tensors; a graph is its duration, µs."""

    def __init__(self, profile: DeviceProfile) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.profile = profile
        self.launched = 0
        self._begin()

    def _begin(self) -> None:
        self.lanes = 1
        self.current = 0
        self.started = 0
        self.last: dict[int, float] = {}
        self.waited: dict[int, float] = {}
        self.joined: dict[int, float] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.launched += 1
        self.started += 1
        ready_us = self.waited.pop(self.current, 0.0)
        if self.current in self.last:
            ready_us = max(ready_us, self.last[self.current] + self.profile.same_stream_edge_us)
        ready_us = max(ready_us, self.started * self.profile.dispatch_us)
        self.last[self.current] = ready_us + self._duration_us(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _duration_us(self, func: Any, args: Any, kwargs: Any) -> float:
        if func is torch.ops.aten.copy_.default:
            return 2 * int(args[0].nbytes) / self.profile.bandwidth
        if func is torch.ops.aten.mm.out:
            (rows, inner), columns = args[0].shape, args[1].shape[1]
            return 2 * rows * inner * columns / self.profile.flops[str(args[0].dtype).removeprefix("torch.")]
        return 0.0

    # In place of autostream.runtime

    def capture(self, run: Callable[[], object], stream: object) -> tuple[Any, None]:
        self._begin()
        run()
        assert self.joined == {lane: end_us for lane, end_us in self.last.items() if lane}, "all lanes are joined"
        ends_us = max(*self.last.values(), self.waited.get(0, 0.0))
        return SimpleNamespace(us=ends_us + self.profile.replay_us, disturbed_us=100.0), None

    def fork(self, device: str, count: int) -> int:
        self.lanes = count
        return count

    def record(self, lanes: int, lane: int) -> Event:
        return lane, self.last.get(lane, 0.0)

    def wait(self, lanes: int, lane: int, event: Event) -> None:
        other, end_us = event
        if end_us and other != lane:
            ready_us = end_us + self.profile.over(lanes).cross_stream_edge_us
            self.waited[lane] = max(self.waited.get(lane, 0.0), ready_us)
        if lane == 0 and other != 0:
            self.joined[other] = end_us

    def use(self, lanes: int, lane: int) -> None:
        assert lane < lanes
        self.current = lane

    @contextmanager
    def restored(self, device: str) -> Iterator[None]:
        yield
        self.current = 0

    # In place of clocks

    def replay_us(self, graph: Any) -> float:
        """The first replay is disturbed."""
        us, graph.disturbed_us = graph.us + graph.disturbed_us, 0.0
        return float(us)

    def perf_counter(self) -> float:
        return 1e-6 * self.launched * self.profile.launch_us


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Callable[[DeviceProfile], DeviceProfile]:
    """Measures a simulated device with these properties."""

    def measure(profile: DeviceProfile) -> DeviceProfile:
        device = Device(profile)
        for name in ("capture", "fork", "record", "wait", "use", "restored", "replay_us"):
            monkeypatch.setattr(microbenchmarks, name, getattr(device, name))
        monkeypatch.setattr(microbenchmarks, "capture_stream", lambda device: None)
        monkeypatch.setattr(microbenchmarks, "time", SimpleNamespace(perf_counter=device.perf_counter))
        for name in ("device", "stream"):
            monkeypatch.setattr(torch.cuda, name, nullcontext)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        with device:
            return measure_profile("meta", profile_named("l4"))

    return measure


Measured = Callable[[DeviceProfile], DeviceProfile]


def test_all_properties_of_a_device_are_measured(measured: Measured) -> None:
    found, l4 = measured(OURS), profile_named("l4")
    assert found.same_stream_edge_us == pytest.approx(1.0)
    assert found.cross_stream_edge_us == pytest.approx(1.75)
    assert found.per_stream_us == pytest.approx(0.25, abs=1e-3)
    assert found.dispatch_us == pytest.approx(0.1875)
    assert found.launch_us == pytest.approx(4.0)
    # A chain of n kernels has n - 1 edges; the front end issues the first kernel.
    assert found.replay_us == pytest.approx(1.5 - 1.0 + 0.1875)
    # A side stream replaces two edges within a stream by two between streams, one each for fork and join.
    assert found.fork_us == found.join_us == pytest.approx(1.75 - 1.0)
    # The overhead of the replay is a hundredth of these times.
    assert found.bandwidth == pytest.approx(4e6, rel=0.02)
    assert {name: found.flops[name] for name in OURS.flops} == pytest.approx(dict(OURS.flops), rel=0.02)
    assert found.source == "measured"
    assert (found.name, found.multiprocessors, found.cache_bytes) == (l4.name, l4.multiprocessors, l4.cache_bytes)
    assert found.kernel_us == l4.kernel_us
    assert found.flops["float8_e4m3fn"] == l4.flops["float8_e4m3fn"]


def test_bounds_of_measured_properties(measured: Measured) -> None:
    """An edge between streams is no shorter than one within a stream, as each kernel of a ladder waits for both.

    A front end that does not delay eight chains shows as an eighth of an edge.
    """
    found = measured(replace(OURS, cross_stream_edge_us=0.5, per_stream_us=0.0, dispatch_us=0.01, replay_us=0.0))
    assert found.cross_stream_edge_us == found.same_stream_edge_us == pytest.approx(1.0)
    assert found.fork_us == pytest.approx(0.0)
    assert found.per_stream_us == pytest.approx(0.0)
    assert found.replay_us == 0.0
    assert found.dispatch_us == pytest.approx(1.0 / 8)


@pytest.mark.gpu
def test_the_profile_of_this_gpu_is_measured_in_seconds_and_can_be() -> None:
    looked_up = profile_of("cuda:0")
    measure_profile("cuda:0", looked_up)
    start = time.perf_counter()
    found = measure_profile("cuda:0", looked_up)
    assert time.perf_counter() - start < 10
    assert found.source == "measured"
    assert 0.3 < found.same_stream_edge_us < 5
    assert found.same_stream_edge_us <= found.cross_stream_edge_us < 10
    assert 0 <= found.fork_us < 10
    assert 0 <= found.per_stream_us < 2
    assert 0 < found.dispatch_us <= found.same_stream_edge_us
    assert 1 < found.launch_us < 100
    assert 0 <= found.replay_us < 20
    assert 0.5 < found.bandwidth / looked_up.bandwidth < 2
    for dtype in ("float32", "float16", "bfloat16"):
        assert 0.3 < found.flops[dtype] / looked_up.flops[dtype] < 2
