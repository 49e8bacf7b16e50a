"""Asynchronous copies of tensors from the host to a device, on a copy stream, for a consumer on another stream.

    consumer's stream:   allocate ─ earlier work ─╮                     ╭▶ work with the tensors
    copy stream:                                  ╰▶ copy from pinned ──╯

Memory is allocated on the consumer's stream, so the caching allocator reuses it after the consumer's work, whenever the
consumer drops it. So the results are ordinary tensors that live no longer than the consumer needs them. Earlier work of
the consumer's stream may still use that memory, so the copy stream waits for it first. Input buffers
(:mod:`autostream.runtime.input_buffers`) are reused in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import compress

import torch
from torch import Tensor

from autostream.runtime.input_buffers import Memory, new_memory
from autostream.runtime.streams import copy_stream, on, raw_stream


class Transfer:
    """Tensors that are being copied to a device. :meth:`take` makes the current stream wait for the copies.

    Args:
        tensors: those in the host's memory are copied: to pinned memory at once, unless they are pinned, and from there
            asynchronously. Those on the device are not copied, unless they are taken on another stream.
        device: a CUDA device with its index.
        consumer: the stream that tensors on the device were made on, and that memory is allocated on; by default the
            current one.
        memory: allocates the destinations.

    Raises:
        torch.OutOfMemoryError: there is too little memory on the device; no copy has started then.
    """

    _arrived: torch.cuda.Event | None = None
    """``None`` before copies have started, and after the tensors were taken."""

    def __init__(
        self,
        tensors: Sequence[Tensor],
        device: torch.device,
        consumer: torch.cuda.Stream | None = None,
        memory: Memory = new_memory,
    ) -> None:
        self._consumer = consumer or allocation_stream(device)
        plain = list(map(_is_plain, tensors))
        with nullcontext() if consumer is None else torch.cuda.stream(consumer), _ordinary_tensors():
            sources = [_pinned(tensor) for tensor in compress(tensors, plain)]
            targets = memory(sources, device, self._consumer)
            remaining = iter(targets)
            self._tensors = [
                next(remaining) if is_plain else tensor.to(device)
                for is_plain, tensor in zip(plain, tensors, strict=True)
            ]
            self._start(targets, sources)

    def _start(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        stream, event = copy_stream(self._consumer.device_index), torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._consumer)
        event.wait(stream)
        with on(stream, self._consumer):
            try:
                for target, source in zip(targets, sources, strict=True):
                    target.copy_(source, non_blocking=True)
            finally:  # also for copies that were started before an error
                event.record(stream)  # the wait above is for the event's earlier record
                self._arrived = event

    def take(self) -> list[Tensor]:
        """All tensors on the device, for later work on its current stream. Can be called once."""
        assert self._arrived is not None, "tensors are taken once"
        tensors, consumer = self._tensors, self._consumer
        if raw_stream(consumer.device_index) == consumer.cuda_stream:
            self._arrived.wait(consumer)
        else:
            # Their memory would be reused on the other stream, which does not wait for the work that reads it here.
            stream = torch.cuda.current_stream(consumer.device_index)
            self._arrived.wait(stream)
            tensors = list(map(Tensor.clone, tensors))
            consumer.wait_stream(stream)
        self._arrived, self._tensors = None, []
        return tensors

    def __del__(self) -> None:
        """Make the stream that reuses the memory of tensors that were not taken wait for the copies."""
        if self._arrived is not None:
            with suppress(RuntimeError):  # CUDA may have shut down before Python
                self._arrived.wait(self._consumer)


def allocation_stream(device: torch.device) -> torch.cuda.Stream:
    """The current stream of a device, which tensors are allocated on."""
    return torch.cuda.current_stream(device.index)  # by index it takes a third of the time


def _ordinary_tensors() -> AbstractContextManager[object]:
    """Make tensors that can be part of training inside, also if the prefetching thread is in inference mode."""
    if torch.is_inference_mode_enabled():
        return torch.inference_mode(False)
    return nullcontext() if torch.is_grad_enabled() else torch.enable_grad()


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is ordinary host memory, of which a pinned copy loses nothing."""
    return (
        type(tensor) is Tensor
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_quantized or tensor.requires_grad)
    )


def _pinned(tensor: Tensor) -> Tensor:
    if tensor.is_pinned():
        return tensor
    # Not pin_memory(): it keeps the strides of expanded tensors, and cannot write to elements that share memory.
    return torch.empty_like(tensor, pin_memory=True).copy_(tensor)
