"""Copies between the host and a device, beside what a call has launched before them.

    caller's stream:   … ─╮ reserve ─ work that needs no copy ─────────────╮ work with what was copied
    copy stream:          ╰──────▶ upload ────────────────────────────────▶╯

The caller's stream has a call's work in order; a copy that was put there would come after all that was launched before
it. Here it waits for what came before a moment that is told, and the caller's stream for it. What is copied to a device
lies in memory that was taken on the caller's stream before that moment, so it is given back there like all else. The
host waits as long as it does without this: for pinned memory and copies that do not block, not at all.
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
class Place:
    """Memory to copy to, once all is over that was launched before it was taken."""

    tensor: Tensor
    since: torch.cuda.Event


def mark(device: str) -> torch.cuda.Event:
    """An event that happens when all that a device's current stream has been given so far has ended."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(_current(device))
    return event


def reserve(device: str, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Place:
    """Memory for what :func:`upload` will copy."""
    return Place(torch.empty_strided(shape, strides, dtype=dtype, device=device), mark(device))


def upload(place: Place, source: Tensor, non_blocking: bool) -> Tensor:
    """A tensor of the host's on the device; what the current stream is given from now on comes after the copy."""
    with _beside(place.since, str(place.tensor.device), "upload"):
        place.tensor.copy_(source, non_blocking=non_blocking)
    return place.tensor


def copy_beside(
    since: torch.cuda.Event, device: str, copies: Copies, copy: Callable[..., Tensor], /, *args: Any, **kwargs: Any
) -> Tensor:
    """The same by an op whose result takes no memory of the device: to the host, or to what is there already."""
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
        finally:  # also behind what was begun before it failed
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(stream)
            done.wait(caller)


def _current(device: str) -> torch.cuda.Stream:
    return torch.cuda.current_stream(torch.device(device).index)
