"""Copies between host and device that run beside a call's kernels, on a stream of their own.

    caller's stream:   … ─╮ reserve ─ work that needs no copy ─────────────╮ work with what was copied
    copy stream:          ╰──────▶ upload ────────────────────────────────▶╯

On the caller's stream, a copy would wait for all kernels launched before it. On a copy stream it waits only for those
that come before a given event, and the caller's stream waits for the copy. The destination on a device is allocated on
the caller's stream before that event, so it is also freed there. The host waits as long as for an ordinary copy: not
at all, for pinned memory and non-blocking copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autostream.runtime.streams import Copies, copy_stream, on


@dataclass(frozen=True, slots=True)
class Destination:
    """Memory to copy to, and the event after which it may be written."""

    tensor: Tensor
    since: torch.cuda.Event


def mark(device: str) -> torch.cuda.Event:
    """Record an event on a device's current stream."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(_current(device))
    return event


def reserve(device: str, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Destination:
    """Allocate the memory that :func:`upload` copies to."""
    return Destination(torch.empty_strided(shape, strides, dtype=dtype, device=device), mark(device))


def upload(destination: Destination, source: Tensor, non_blocking: bool) -> Tensor:
    """Copy a tensor from the host to the device. Later work on the current stream waits for the copy."""
    with _beside(destination.since, str(destination.tensor.device), "upload"):
        destination.tensor.copy_(source, non_blocking=non_blocking)
    return destination.tensor


def copy_beside(
    since: torch.cuda.Event, device: str, copies: Copies, copy: Callable[..., Tensor], /, *args: Any, **kwargs: Any
) -> Tensor:
    """Copy by an op that allocates no memory on the device: to the host, or to a tensor that exists already."""
    with _beside(since, device, copies):
        return copy(*args, **kwargs)


@contextmanager
def _beside(since: torch.cuda.Event, device: str, copies: Copies) -> Iterator[None]:
    caller = _current(device)
    stream = copy_stream(caller.device_index, copies)
    since.wait(stream)
    with on(stream, caller):
        try:
            yield
        finally:  # also for a copy that was started before an error
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(stream)
            done.wait(caller)


def _current(device: str) -> torch.cuda.Stream:
    return torch.cuda.current_stream(torch.device(device).index)
