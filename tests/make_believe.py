"""A simulated CUDA device: streams are queues, memory is that of the CPU, and kernels run only when the host is done.

The host puts steps into queues, as if the GPU were far behind. Then :meth:`Device.run` executes them in an adversarial
order among those that the waits allow (:mod:`autostream.runtime.emulator`), so that a missing wait gives a wrong
number. Memory comes from a caching allocator that reuses a block, on the stream that allocated it, as soon as its
tensor is freed::

    host:     allocate on A │ copy on C │ wait │ free │ allocate the same block on A │ …
    queue A:  … │ wait for C │ work │ …            queue C:  wait for A │ copy │ record │ …
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autostream.runtime import streams, transfer
from autostream.runtime.emulator import Record, Wait, _hostile_order

GPU = torch.device("cuda", 0)

ORDERS = range(6)
"""Seeds of :meth:`Device.run`: orders in which one queue runs ahead, then random orders."""


class Stream:
    """A queue of steps."""

    def __init__(self, device: Device) -> None:
        self.cuda_stream = next(device.numbers)
        self.device_index = 0
        self.steps: list[Any] = []
        self._device = device

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def wait_event(self, event: str) -> None:
        self.steps.append(Wait(event))

    def record_event(self) -> str:
        record = Record(f"event {next(self._device.numbers)}")
        self.steps.append(record)  # another thread may append a step behind it
        return record.event


class Event:
    """A point in a queue; if it is recorded again, later waits are for the new point."""

    _recorded: str

    def record(self, stream: Stream) -> None:
        self._recorded = stream.record_event()

    def wait(self, stream: Stream) -> None:
        stream.wait_event(self._recorded)


class Device:
    """The device, and a ``torch.cuda`` for it.

    Attributes:
        cuda: replaces attributes of ``torch.cuda``.
        blocks: the number of blocks of memory that were allocated from the device.
        bytes_left: of memory; if they do not suffice, ``torch.OutOfMemoryError`` is raised.
    """

    def __init__(self) -> None:
        self.numbers = count()
        self.streams: list[Stream] = []
        self.blocks = 0
        self.bytes_left = 1 << 30
        self._free: dict[tuple[Stream, int], list[Tensor]] = defaultdict(list)
        self._blocks: dict[int, Tensor] = {}
        self._pinned: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
        self._current = threading.local()
        self._default = self.stream()
        self.cuda = SimpleNamespace(
            is_available=lambda: True,
            current_device=lambda: 0,
            device_count=lambda: 1,
            current_stream=lambda device: self.current,
            Stream=lambda device, priority: self.stream(),
            stream=self.using,
            set_stream=self.use,
            Event=Event,
        )

    def stream(self) -> Stream:
        stream = Stream(self)
        self.streams.append(stream)
        return stream

    @property
    def current(self) -> Stream:
        stream: Stream = getattr(self._current, "stream", self._default)
        return stream

    def use(self, stream: Stream) -> None:
        self._current.stream = stream

    @contextmanager
    def using(self, stream: Stream) -> Iterator[None]:
        before = self.current
        self.use(stream)
        try:
            yield
        finally:
            self.use(before)

    def launch(self, step: Callable[[], object]) -> None:
        """Put a kernel into the current stream's queue. It must access tensors by :meth:`alias`."""
        self.current.steps.append(step)

    def empty_like(self, like: Tensor) -> Tensor:
        free = self._free[self.current, like.nbytes]
        try:
            block = free.pop()  # by one call, as other threads free memory at any time
        except IndexError:
            block = self._new_block(like.nbytes)
        tensor = block.view(like.dtype).view(like.shape)
        weakref.finalize(tensor, free.append, block)
        return tensor

    def _new_block(self, size: int) -> Tensor:
        if size > self.bytes_left:
            raise torch.OutOfMemoryError("no memory")
        self.bytes_left -= size
        self.blocks += 1
        block = torch.full((size,), 0xFF, dtype=torch.uint8)  # NaN of any kind
        self._blocks[block.data_ptr()] = block
        return block

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor begins at the start of a block of the device."""
        return Tensor.data_ptr(tensor) in self._blocks

    def pin(self, tensor: Tensor) -> Tensor:
        """A copy in pinned memory with the same strides, as by ``pin_memory``."""
        return self._mark_pinned(torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)).copy_(tensor)

    def empty_pinned(self, like: Tensor) -> Tensor:
        return self._mark_pinned(torch.empty_like(like))

    def _mark_pinned(self, pinned: Tensor) -> Tensor:
        self._pinned[id(pinned)] = pinned
        return pinned

    def is_pinned(self, tensor: Tensor) -> bool:
        return self._pinned.get(id(tensor)) is tensor

    def alias(self, tensor: Tensor) -> Tensor:
        """The tensor's memory, for a queued kernel: unlike the tensor, it does not keep the block from being reused."""
        block = self._blocks.get(tensor.data_ptr())
        if block is None:
            return tensor.detach()
        return block.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())

    def copy(self, target: Tensor, source: Tensor) -> None:
        """An asynchronous copy on the current stream."""
        destination, values = self.alias(target), self.alias(source)
        self.launch(lambda: destination.copy_(values))

    def run(self, seed: int) -> None:
        """Execute all queues; a seed below the number of queues in use lets that queue run ahead, others are random."""
        queues = [stream.steps for stream in self.streams if stream.steps]
        ahead = {step.event for queue in queues for step in queue if isinstance(step, Record)}
        steps = [[step for step in queue if not isinstance(step, Wait) or step.event in ahead] for queue in queues]
        for queue in queues:
            queue.clear()
        for step in _hostile_order(steps, seed):
            if callable(step):
                with torch._C.DisableTorchFunction():
                    step()

    @classmethod
    @contextmanager
    def installed(cls, patch: pytest.MonkeyPatch) -> Iterator[Device]:
        """Replace the CUDA device for all threads; it is active in the calling thread."""
        device = cls()
        for name, value in vars(device.cuda).items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr(streams, "_pools", {})
        patch.setattr(streams, "current_device", device.cuda.current_device)
        patch.setattr(transfer, "raw_stream", lambda index: device.current.cuda_stream)
        with device.active():
            yield device

    @contextmanager
    def active(self) -> Iterator[None]:
        """Redirect this thread's calls of PyTorch to the device."""
        with _Calls(self):
            yield


class _Calls(TorchFunctionMode):
    """Redirects calls of PyTorch that concern the device, in this thread."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, device = kwargs or {}, self._device
        if func == Tensor.device.__get__:
            return GPU if device.holds(args[0]) else func(*args)
        if func is torch.empty_like and kwargs.get("device") == GPU:
            return device.empty_like(args[0])
        if func is torch.empty_strided and torch.device(kwargs.get("device", "cpu")) == GPU:
            return device.empty_like(func(*args, **{**kwargs, "device": "cpu"}))
        if func is torch.empty_like and kwargs.get("pin_memory"):
            return device.empty_pinned(args[0])
        if func is Tensor.pin_memory:
            return device.pin(args[0])
        if func is Tensor.is_pinned:
            return device.is_pinned(args[0])
        if func is Tensor.copy_ and device.holds(args[0]):
            device.copy(args[0], args[1])
            return args[0]
        if func is Tensor.to and device.holds(args[0]):
            return args[0]
        if (func is Tensor.clone and device.holds(args[0])) or (func is Tensor.to and args[1:] == (GPU,)):
            clone = device.empty_like(args[0])
            device.copy(clone, args[0])
            return clone.requires_grad_(args[0].requires_grad and torch.is_grad_enabled())
        return func(*args, **kwargs)
