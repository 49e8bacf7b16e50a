"""CUDA streams and events: the functions that lowered graphs call, and which streams are used for what.

A lowered graph prints like this::

    lanes = autostream_runtime_streams_fork('cuda:0', 2)
    forked = autostream_runtime_streams_record(lanes, 0)
    use = autostream_runtime_streams_use(lanes, 1)
    wait = autostream_runtime_streams_wait(lanes, 1, forked)
    conv2d = torch.ops.aten.conv2d.default(x, weight)
    conv2d_done = autostream_runtime_streams_record(lanes, 1)

A *lane* is the number of a stream. A graph contains lanes; each run maps them to streams.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import torch

_POOL_SIZE = 32
"""``torch.cuda.Stream()`` returns 32 streams per device and priority in turn; the 33rd is the first one again."""

_SIDES, _CAPTURES = -1, -2
"""Priorities. No other code gets the streams of captures, because work that another thread launches on a capturing
stream would be captured: users' have priority 0 or -1, and NCCL's 0 or, with ``TORCH_NCCL_HIGH_PRIORITY=1``, -3."""

_pools: dict[tuple[int, int], tuple[torch.cuda.Stream, ...]] = {}
_pools_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class Lanes:
    """The streams of one run.

    Attributes:
        device: where they are, e.g. ``"cuda:0"``.
        streams: lane 0 is the caller's current stream, the others are side streams; all are different.
    """

    device: str
    streams: tuple[torch.cuda.Stream, ...]


def fork(device: str, count: int) -> Lanes:
    """Get ``count`` streams, at most 31: the current one of ``device``, and side streams that all runs share.

    This orders nothing: side streams wait for the caller's stream where the graph has a wait.
    """
    caller = torch.cuda.current_stream(device)
    pool = _pool(caller.device_index, _CAPTURES if torch.cuda.is_current_stream_capturing() else _SIDES)
    sides = [side for side in pool if side.cuda_stream != caller.cuda_stream]
    return Lanes(device, (caller, *sides[: count - 1]))


Copies = Literal["ahead", "upload", "download", "send", "receive"]
"""Kinds of copies from and to a device, each on a stream of its own; ``ahead`` is prefetching, and the last two are
ends of a copy to another device."""

_COPIES: dict[Copies, int] = {"ahead": -1, "upload": -2, "download": -3, "send": -4, "receive": -5}


def copy_stream(device_index: int, copies: Copies = "ahead") -> torch.cuda.Stream:
    """The stream for copies of a kind: one of the last side streams, as lanes get the first ones."""
    return _pool(device_index, _SIDES)[_COPIES[copies]]


def capture_stream(device: str | torch.device) -> torch.cuda.Stream:
    """The stream to capture on. It is used for captures only, as are the side streams of captures."""
    return _pool(torch.cuda.current_stream(device).device_index, _CAPTURES)[-1]


def idle_capture_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream for captures that is not capturing, not even in a capture that has failed.

    Raises:
        RuntimeError: all of them are.
    """
    for stream in _pool(torch.cuda.current_stream(device).device_index, _CAPTURES):
        if not _capturing(stream):
            return stream
    raise RuntimeError("all streams are in a capture")


def _raw_stream(device: int) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _raw_stream)
"""The handle of a device's current stream, in a tenth of the time of an object; private to PyTorch (2.11 and 2.13)."""

current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
"""As ``torch.cuda.current_device``, without checking that CUDA is initialized; private to PyTorch (2.11 and 2.13)."""


@contextmanager
def on(stream: torch.cuda.Stream, caller: torch.cuda.Stream) -> Iterator[None]:
    """Make a stream current inside, and ``caller`` again afterwards, which must be current on its device.

    As ``torch.cuda.stream``, in a quarter of the time: the former stream is passed and need not be queried.
    """
    device = current_device()
    torch.cuda.set_stream(stream)
    try:
        yield
    finally:
        torch.cuda.set_stream(caller)
        if device != caller.device_index:
            torch.cuda.set_device(device)


def use(lanes: Lanes, index: int) -> None:
    """Make this lane's stream current in this thread: later ops launch and allocate there."""
    torch.cuda.set_stream(lanes.streams[index])


def record(lanes: Lanes, index: int) -> torch.cuda.Event:
    """Record an event on this lane, after all its work so far."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(lanes.streams[index])
    return event


def wait(lanes: Lanes, index: int, event: torch.cuda.Event) -> None:
    """Make later work of this lane wait for an event; the host does not wait."""
    event.wait(lanes.streams[index])


def release(*tensors: object) -> None:
    """Do nothing; end the lifetime of these values.

    The caching allocator reuses a block as soon as its last reference is dropped, for later work on the stream that
    allocated it, while work on other streams may still read it. Code generated by fx drops each value after the last
    call that uses it, so a call of this function decides where they are dropped.
    """


@contextmanager
def restored(device: str) -> Iterator[None]:
    """Restore the calling thread's state after the run of a lowered graph, also if the graph raises.

    - The current device and the current stream of ``device`` are restored.
    - Autocast's cache is off inside: it would return a weight that was cast on one stream to another, without a wait.
    - An exception skips the graph's join, and unwinding drops tensors that launched work still reads or writes. So the
      caller's stream then waits for the side streams, and they for it, before their memory is reused.
    """
    caller, current_device = torch.cuda.current_stream(device), torch.cuda.current_device()
    cache_enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    except BaseException:
        # If the device has failed, this fails as well; the first error is the one to report.
        with suppress(RuntimeError):
            _barrier(caller)
        raise
    finally:
        torch.cuda.set_stream(caller)
        torch.cuda.set_device(current_device)
        torch.set_autocast_cache_enabled(cache_enabled)


def _pool(device_index: int, priority: int) -> tuple[torch.cuda.Stream, ...]:
    """All streams that PyTorch has for a device and priority, each once."""
    with _pools_lock:
        if (device_index, priority) not in _pools:
            pool = (torch.cuda.Stream(device_index, priority) for _ in range(_POOL_SIZE))  # type: ignore[no-untyped-call]
            _pools[device_index, priority] = tuple({stream.cuda_stream: stream for stream in pool}.values())
        return _pools[device_index, priority]


def _barrier(caller: torch.cuda.Stream) -> None:
    """Make the caller's stream and all side streams wait for each other's work so far."""
    # A capturing stream cannot wait for one that is not capturing, nor the reverse. All streams that a capture forked
    # are joined here, so that ending it reports no second error.
    capturing = _capturing(caller)
    pools = (_pool(caller.device_index, priority) for priority in (_SIDES, _CAPTURES))
    sides = [side for side in chain(*pools) if side != caller and _capturing(side) == capturing]
    for side in sides:
        caller.wait_stream(side)
    for side in sides:
        side.wait_stream(caller)


def _capturing(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()
