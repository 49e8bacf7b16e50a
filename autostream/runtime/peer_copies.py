"""Copies from one device to another that run beside the kernels of both, to memory that stays the same.

    cuda:0  caller's stream   … f0 ─╮ f1 ───── f2 …
            sending                 ╰─▶ copy
    cuda:1  receiving                   copy ─╮
            caller's stream   …               ╰─▶ m0 …     users of the copy wait for it

PyTorch copies behind all work that was launched on the current streams of both devices, so the first device would wait
for the second. Here a copy waits for its source, and for the uses of the copy in the call before. Its source is held
until the call ends, when the source's stream waits for the copy.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from autostream.runtime.streams import copy_stream


class PeerCopies:
    """The copies of a program that runs over several devices, call by call; calls run one after another.

    Example:
        On a CPU there are no streams:

        >>> copies = PeerCopies()
        >>> for number in (1.0, 2.0):
        ...     with copies.call():
        ...         copies.copy("there", torch.tensor([number]), torch.clone)
        tensor([1.])
        tensor([2.])
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._memory: dict[str, Tensor] = {}
        self._done: dict[str, torch.cuda.Event] = {}
        self._held: list[Tensor] = []
        self._ended: dict[int, torch.cuda.Event] = {}
        """By device, an event behind all of the latest call."""

    @contextmanager
    def call(self) -> Iterator[None]:
        """Run a call inside. At its end the current streams wait for its copies."""
        with self._lock:
            try:
                yield
            finally:
                for device in {
                    tensor.device.index for tensor in (*self._memory.values(), *self._held) if tensor.is_cuda
                }:
                    caller = torch.cuda.current_stream(device)
                    for done in self._done.values():
                        done.wait(caller)
                    self._ended[device] = _event(caller)
                self._done.clear()
                self._held.clear()

    def copy(self, name: str, source: Tensor, copy: Callable[[Tensor], Tensor]) -> Tensor:
        """Copy a tensor to another device, to the memory of the call before; the first call allocates it.

        Args:
            name: of the copy.
            source: what is copied.
            copy: makes the first copy, behind the current streams.

        Returns:
            The copy. Its users call :meth:`wait` first, and the next call overwrites it.
        """
        if name not in self._memory:
            self._memory[name] = copy(source)
            return self._memory[name]
        target = self._memory[name]
        if not target.is_cuda:
            return target.copy_(source)
        sending, receiving = copy_stream(source.device.index, "send"), copy_stream(target.device.index, "receive")
        sending.wait_stream(torch.cuda.current_stream(source.device))
        if ended := self._ended.get(target.device.index):
            ended.wait(receiving)
        with torch.cuda.stream(receiving), torch.cuda.stream(sending):
            target.copy_(source, non_blocking=True)
        self._done[name] = _event(receiving)
        self._held.append(source)
        return target

    def wait(self, names: Iterable[str]) -> None:
        """Let the current streams wait for these copies."""
        for name in names:
            if done := self._done.get(name):
                done.wait(torch.cuda.current_stream(self._memory[name].device))


def _event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(stream)
    return event
