"""Streams and events: what lowered graphs call, and which streams there are for what.

A lowered graph prints like this; between the calls stand the model's own ops::

    lanes = autostream_execution_streams_fork('cuda:0', 2)
    forked = autostream_execution_streams_record(lanes, 0)
    use = autostream_execution_streams_use(lanes, 1)
    wait = autostream_execution_streams_wait(lanes, 1, forked)
    conv2d = torch.ops.aten.conv2d.default(x, weight)
    conv2d_done = autostream_execution_streams_record(lanes, 1)

A *lane* is a stream of one run, by number: a graph names lanes, and each run decides which streams they are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import torch

_TURN = 32
"""``torch.cuda.Stream()`` hands out 32 streams per device and priority in turn; the 33rd is the first one again."""

_SIDES, _CAPTURES = -2, -3
"""Priorities, for the sake of streams that nobody else is handed: those of 0 are the user's, those of -1 are NCCL's.
Captures have their own, because what another thread launches on a stream in capture is captured with it."""

_pools: dict[tuple[int, int], tuple[torch.cuda.Stream, ...]] = {}
_pools_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class Lanes:
    """The streams of one run.

    Attributes:
        device: where they are, e.g. ``"cuda:0"``.
        streams: lane 0 is the caller's current stream, the others are side streams; no two are the same.
    """

    device: str
    streams: tuple[torch.cuda.Stream, ...]


def fork(device: str, count: int) -> Lanes:
    """Take ``count`` streams, at most 31: the current one of ``device``, and side streams that all runs share.

    Nothing is ordered by this: side streams wait for the caller where the graph says so.
    """
    caller = torch.cuda.current_stream(device)
    pool = _pool(caller.device_index, _CAPTURES if torch.cuda.is_current_stream_capturing() else _SIDES)
    sides = [side for side in pool if side.cuda_stream != caller.cuda_stream]
    return Lanes(device, (caller, *sides[: count - 1]))


Copies = Literal["ahead", "upload", "download"]
"""Copies between the host and a device that a stream has in turn; those ahead are of what nobody has asked for yet."""

_COPIES: dict[Copies, int] = {"ahead": -1, "upload": -2, "download": -3}


def copy_stream(device_index: int, copies: Copies = "ahead") -> torch.cuda.Stream:
    """The stream that such copies run on: one of the last side streams, as lanes get the first."""
    return _pool(device_index, _SIDES)[_COPIES[copies]]


def capture_stream(device: str | torch.device) -> torch.cuda.Stream:
    """The stream to capture on: one that is left to captures, as their side streams are."""
    return _pool(torch.cuda.current_stream(device).device_index, _CAPTURES)[-1]


def idle_capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One of the captures' streams that is in no capture, not even in one that has gone wrong.

    Raises:
        RuntimeError: there is none.
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
"""What ``torch.cuda`` asks after it has made sure that CUDA is initialized; private to PyTorch (2.11 and 2.13)."""


@contextmanager
def on(stream: torch.cuda.Stream, caller: torch.cuda.Stream) -> Iterator[None]:
    """Launch on a stream, and then again on ``caller``, the current one of its device.

    It does what ``torch.cuda.stream`` does in a quarter of the time, because it need not ask what it is told.
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
    """Launch and allocate on this lane from now on, in this thread."""
    torch.cuda.set_stream(lanes.streams[index])


def record(lanes: Lanes, index: int) -> torch.cuda.Event:
    """An event that happens when all that was launched on this lane so far has ended."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(lanes.streams[index])
    return event


def wait(lanes: Lanes, index: int, event: torch.cuda.Event) -> None:
    """Let nothing launched on this lane from now on start before the event; the host does not wait."""
    event.wait(lanes.streams[index])


def release(*tensors: object) -> None:
    """Be the last user of these values; do nothing.

    The caching allocator hands a block on as soon as its last reference is gone, to any later launch on the stream
    that allocated it, while launches on other streams may still read it. Code generated by fx drops each value right
    after the last call that names it, so this call is where these values die: not earlier, not later.
    """


@contextmanager
def restored(device: str) -> Iterator[None]:
    """Run a lowered graph so that the calling thread finds everything as it was, also when the graph raises.

    - The current device and the current stream of ``device`` are put back.
    - Autocast's cache is off inside: it would hand a weight cast on one stream to another one that waits for nothing.
    - An exception skips the graph's join, and unwinding drops tensors that launched work still reads or writes. So the
      caller's stream then waits for the side streams, and they for it: whoever gets that memory comes after that work.
    """
    caller, current_device = torch.cuda.current_stream(device), torch.cuda.current_device()
    cache_enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    except BaseException:
        # A device that has failed refuses this too; the first error is the one to tell.
        with suppress(RuntimeError):
            _barrier(caller)
        raise
    finally:
        torch.cuda.set_stream(caller)
        torch.cuda.set_device(current_device)
        torch.set_autocast_cache_enabled(cache_enabled)


def _pool(device_index: int, priority: int) -> tuple[torch.cuda.Stream, ...]:
    """All the streams that torch has for a device and priority, each once."""
    with _pools_lock:
        if (device_index, priority) not in _pools:
            turn = (torch.cuda.Stream(device_index, priority) for _ in range(_TURN))  # type: ignore[no-untyped-call]
            _pools[device_index, priority] = tuple({stream.cuda_stream: stream for stream in turn}.values())
        return _pools[device_index, priority]


def _barrier(caller: torch.cuda.Stream) -> None:
    """Order all side streams and the caller's after each other's work."""
    # A stream in capture and one outside may not wait for each other; of a capture, all streams that it forked are
    # joined, so that ending it reports nothing but the exception.
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
