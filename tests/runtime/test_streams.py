"""Streams and events, on a fake CUDA and on a GPU."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import count

import pytest
import torch

from autostream.runtime import streams


@dataclass(eq=False)
class Stream:
    """A fake stream that knows which other ones it waits for."""

    device_index: int
    cuda_stream: int
    capturing: bool = False
    waits: list[Stream] = field(default_factory=list)

    def wait_stream(self, other: Stream) -> None:
        if self.capturing != other.capturing:
            raise RuntimeError("dependency created on uncaptured work in another stream")
        self.waits.append(other)


class Cuda:
    """A fake ``torch.cuda`` of two devices. Each has 32 streams per priority, which it returns in turn."""

    def __init__(self) -> None:
        self.pools = {
            (device, priority): [Stream(device, 1000 * device - 100 * priority + n) for n in range(1, 33)]
            for device in range(2)
            for priority in range(-3, 1)
        }
        self.turns = defaultdict[tuple[int, int], "count[int]"](count)
        self.current = [Stream(0, 0), Stream(1, 0)]
        self.device = 0

    def Stream(self, device: int, priority: int = 0) -> Stream:  # noqa: N802
        pool = self.pools[device, priority]
        return pool[next(self.turns[device, priority]) % len(pool)]

    def current_stream(self, device: str | torch.device) -> Stream:
        return self.current[int(str(device)[-1])]

    def current_device(self) -> int:
        return self.device

    def set_device(self, device: int) -> None:
        self.device = device

    def set_stream(self, stream: Stream) -> None:
        self.device = stream.device_index  # as torch.cuda.set_stream does
        self.current[stream.device_index] = stream

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current[stream.device_index] = self.current[stream.device_index], stream
        yield
        self.current[stream.device_index] = before

    def is_current_stream_capturing(self) -> bool:
        return self.current[self.device].capturing


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    fake = Cuda()
    monkeypatch.setattr(torch, "cuda", fake)
    monkeypatch.setattr(streams, "_pools", {})
    return fake


class OopsError(Exception):
    pass


@contextmanager
def failing(device: str, *around: AbstractContextManager[object]) -> Iterator[None]:
    """A run that raises at its end; the exception has to pass all context managers."""
    escaped = False
    try:
        with ExitStack() as stack:
            for context in (*around, streams.restored(device)):
                stack.enter_context(context)
            yield
            raise OopsError
    except OopsError:
        escaped = True
    assert escaped


def distinct(lanes: streams.Lanes) -> bool:
    return len({lane.cuda_stream for lane in lanes.streams}) == len(lanes.streams)


def test_lane_0_is_the_callers_stream_and_side_streams_are_shared_by_runs(cuda: Cuda) -> None:
    """A caller on a side stream gets others. Streams may repeat in the pool, if other code takes some as well."""
    lanes = streams.fork("cuda:1", 16)
    assert lanes.streams[0] is cuda.current[1]
    assert distinct(lanes)
    assert {lane.device_index for lane in lanes.streams} == {1}
    assert streams.fork("cuda:1", 16) == lanes
    cuda.set_stream(lanes.streams[1])
    assert distinct(streams.fork("cuda:1", 16))
    for key, pool in cuda.pools.items():
        cuda.pools[key] = pool[:10]
    assert distinct(streams.fork("cuda:0", 11))


@pytest.mark.parametrize("device", [0, 1])
@pytest.mark.parametrize("fails", [False, True])
def test_a_stream_is_current_inside_and_the_former_one_afterwards(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch, device: int, fails: bool
) -> None:
    monkeypatch.setattr(streams, "current_device", cuda.current_device)
    cuda.device, caller, stream = device, cuda.current[1], streams.copy_stream(1)
    with pytest.raises(OopsError) if fails else nullcontext(), streams.on(stream, caller):
        assert cuda.current[1] is stream
        assert cuda.device == 1
        if fails:
            raise OopsError
    assert cuda.current[1] is caller
    assert cuda.device == device


def test_captures_users_nccl_and_other_runs_have_different_streams(cuda: Cuda) -> None:
    """Work that other code launches on a capturing stream would be captured."""
    users = {cuda.Stream(0) for _ in range(40)}
    others = users | {cuda.Stream(0, priority) for priority in (-1, -3) for _ in range(40)}
    sides, stream = {*streams.fork("cuda:0", 16).streams[1:]}, streams.capture_stream("cuda:0")
    assert stream not in sides
    stream.capturing = True
    cuda.set_stream(stream)
    lanes = streams.fork("cuda:0", 16)
    assert lanes.streams[0] is stream
    assert distinct(lanes)
    assert not sides & {*lanes.streams}
    assert not users & sides
    assert not others & {*lanes.streams}


def test_an_idle_stream_for_captures_is_not_capturing(cuda: Cuda) -> None:
    pool = cuda.pools[1, -2]
    for stream in pool[:5]:
        stream.capturing = True
    cuda.device = 1
    assert streams.idle_capture_stream(torch.device("cuda:1")) is pool[5]
    for stream in pool:
        stream.capturing = True
    with pytest.raises(RuntimeError, match="all streams"):
        streams.idle_capture_stream(torch.device("cuda:1"))


def test_the_pool_is_made_once_by_several_threads(cuda: Cuda) -> None:
    with ThreadPoolExecutor(8) as callers:
        forks = list(callers.map(lambda _: streams.fork("cuda:0", 16), range(64)))
    assert all(lanes == forks[0] for lanes in forks)
    assert sorted(map(next, cuda.turns.values())) == [32]


@pytest.mark.parametrize("cache_enabled", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_a_run_restores_device_stream_and_autocast(cuda: Cuda, fails: bool, cache_enabled: bool) -> None:
    """The caller computes on a side stream of device 1 while device 0 is current."""
    caller = cuda.current[1] = cuda.pools[1, 0][5]
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(cache_enabled)
    try:
        with failing("cuda:1") if fails else streams.restored("cuda:1"):
            streams.use(streams.fork("cuda:1", 2), 1)
            assert cuda.device == 1
            assert cuda.current[1] is not caller
            assert not torch.is_autocast_cache_enabled()
        assert cuda.device == 0
        assert cuda.current[1] is caller
        assert torch.is_autocast_cache_enabled() == cache_enabled
    finally:
        torch.set_autocast_cache_enabled(before)


def test_after_an_exception_all_lanes_wait_for_each_other(cuda: Cuda) -> None:
    with streams.restored("cuda:0"):
        lanes = streams.fork("cuda:0", 3)
    assert [lane.waits for lane in lanes.streams] == [[], [], []], "without one they do not"
    with failing("cuda:0"):
        caller, *sides = streams.fork("cuda:0", 3).streams
    assert set(sides) <= set(caller.waits)
    assert all(side.waits == [caller] for side in sides)


def test_after_an_exception_in_a_capture_only_its_own_streams_are_joined(cuda: Cuda) -> None:
    """Waiting for a stream outside the capture would raise, and hide the exception."""
    cuda.current[0].capturing = True
    with failing("cuda:0"):
        caller, _, forked = streams.fork("cuda:0", 3).streams
        forked.capturing = True
    assert caller.waits == [forked]


def test_a_failed_device_does_not_hide_the_exception(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Stream, other: Stream) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(Stream, "wait_stream", refuse)
    with failing("cuda:0"):
        streams.use(streams.fork("cuda:0", 2), 1)
    assert cuda.current[0].cuda_stream == 0


# On a GPU


@pytest.fixture
def caller() -> Iterator[torch.cuda.Stream]:
    """The caller's stream."""
    stream = torch.cuda.Stream("cuda:0")
    stream.wait_stream(torch.cuda.current_stream("cuda:0"))
    with torch.cuda.stream(stream):
        yield stream
    torch.cuda.synchronize()


CYCLES = 200_000_000
"""About a tenth of a second."""


@pytest.mark.gpu
def test_a_lane_waits_for_the_recorded_work_and_the_host_does_not(caller: torch.cuda.Stream) -> None:
    lanes = streams.fork("cuda:0", 2)
    streams.use(lanes, 1)
    torch.cuda._sleep(CYCLES)
    slept = streams.record(lanes, 1)
    streams.use(lanes, 0)
    streams.wait(lanes, 0, slept)
    after = streams.record(lanes, 0)
    assert not slept.query()
    assert torch.cuda.current_stream() == caller
    after.synchronize()
    assert slept.query()


@pytest.mark.gpu
@pytest.mark.parametrize("busy", [0, 1])
def test_after_an_exception_a_lane_waits_for_a_busy_one(caller: torch.cuda.Stream, busy: int) -> None:
    with failing("cuda:0"):
        lanes = streams.fork("cuda:0", 2)
        streams.use(lanes, busy)
        torch.cuda._sleep(CYCLES)
    assert torch.cuda.current_stream() == caller
    assert not lanes.streams[busy].query()
    streams.record(lanes, 1 - busy).synchronize()
    assert lanes.streams[busy].query()


@pytest.mark.gpu
def test_after_an_exception_in_a_capture_the_capture_ends_with_that_exception() -> None:
    stream, graph, x = torch.cuda.Stream(), torch.cuda.CUDAGraph(), torch.ones(8, device="cuda")
    torch.cuda.synchronize()
    capture = torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local")
    with failing("cuda:0", capture):
        lanes = streams.fork("cuda:0", 3)
        forked = streams.record(lanes, 0)
        streams.wait(lanes, 1, forked)
        streams.use(lanes, 1)
        x.add_(1)
    del graph, capture
    gc.collect()
    torch.cuda.synchronize()
    assert x.sum().item() == 8  # nothing captured has run, and the device works
