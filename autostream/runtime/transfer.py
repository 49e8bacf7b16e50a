"""Tensors on their way to a device: copied on a stream of its own, handed out as memory of the consumer's stream.

    consumer's stream:   take memory ─ work before ─╮                        ╭▶ work with the tensors
    copy stream:                                    ╰▶ copy from pinned ─────╯

Memory is taken on the stream of the consumer, so it is given back there as well, whenever the consumer drops it: the
caching allocator hands it on behind all work of theirs. So what arrives are ordinary tensors, and nobody keeps them
longer than the consumer does. The copy must not begin while earlier work still uses that memory, so the copy stream
waits for the consumer's first. It has nothing else to do, and no memory.

The same holds of memory in slots (:mod:`autostream.runtime.input_buffers`), which are handed on like that, too.
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
    """Tensors that are being copied to a device; whoever takes them on the device's current stream comes after that.

    Args:
        tensors: those in the host's memory are copied: at once into pinned memory where they are not pinned, and from
            there while the host goes on. Those on the device stay, unless they are taken on another stream.
        device: a CUDA device with its index.
        home: the stream that those on the device were made on, and that memory is taken on; by default the current one.
        memory: gives what they are copied to.

    Raises:
        torch.OutOfMemoryError: there is too little memory on the device; nothing is under way then.
    """

    _arrived: torch.cuda.Event | None = None
    """``None`` where nobody needs to wait: nothing is under way yet, or all has been taken."""

    def __init__(
        self,
        tensors: Sequence[Tensor],
        device: torch.device,
        home: torch.cuda.Stream | None = None,
        memory: Memory = new_memory,
    ) -> None:
        self._home = home or home_of(device)
        plain = list(map(_is_plain, tensors))
        with nullcontext() if home is None else torch.cuda.stream(home), _ordinary_tensors():
            sources = [_pinned(tensor) for tensor in compress(tensors, plain)]
            targets = memory(sources, device, self._home)
            places = iter(targets)
            self._tensors = [
                next(places) if own else other.to(device) for own, other in zip(plain, tensors, strict=True)
            ]
            self._start(targets, sources)

    def _start(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        stream, event = copy_stream(self._home.device_index), torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._home)
        event.wait(stream)
        with on(stream, self._home):
            try:
                for target, source in zip(targets, sources, strict=True):
                    target.copy_(source, non_blocking=True)
            finally:  # also behind those that were begun before one failed
                event.record(stream)  # once more: who waited does so for what it was
                self._arrived = event

    def take(self) -> list[Tensor]:
        """All of them on the device, for work on its current stream from now on; once."""
        assert self._arrived is not None, "tensors are taken once"
        tensors, home = self._tensors, self._home
        if raw_stream(home.device_index) == home.cuda_stream:
            self._arrived.wait(home)
        else:
            # Given back, their memory would go to work of the other stream, which knows nothing of what reads it here.
            stream = torch.cuda.current_stream(home.device_index)
            self._arrived.wait(stream)
            tensors = list(map(Tensor.clone, tensors))
            home.wait_stream(stream)
        self._arrived, self._tensors = None, []
        return tensors

    def __del__(self) -> None:
        """Whoever is given the memory of what nobody has taken comes after the copy."""
        if self._arrived is not None:
            with suppress(RuntimeError):  # CUDA may have ended before Python does
                self._arrived.wait(self._home)


def home_of(device: torch.device) -> torch.cuda.Stream:
    """The stream that what is made on a device now is made on."""
    return torch.cuda.current_stream(device.index)  # an index is looked up in a third of the time


def _ordinary_tensors() -> AbstractContextManager[object]:
    """What is made in it can be trained with, as part of what was, also where whoever reads ahead does not train."""
    if torch.is_inference_mode_enabled():
        return torch.inference_mode(False)
    return nullcontext() if torch.is_grad_enabled() else torch.enable_grad()


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is bytes in the host's memory that pinning and copying leave what they are."""
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
