"""Memory that is used for one batch after another, so that a captured graph can read batches in place.

    buffer:  hand out ─▶ ordinary tensors ─▶ all of them and their views are freed ─▶ hand out again, same addresses
               └───────── a graph captured for these addresses (graphs_by_input.py) needs no copy

Each tensor that is handed out has a storage of its own. As long as it, or a view of it, is alive, the buffer is not
used again, so a batch is never overwritten while it can be read. Work launched with it may still be running by then, as
it may in memory that the caching allocator reuses; so, like a block of that, a buffer serves one stream only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]  # it is documented there

Memory = Callable[[Sequence[Tensor], torch.device, torch.cuda.Stream], list[Tensor]]
"""Allocates tensors like those in the host's memory, on a device, for one of its streams."""


def new_memory(likes: Sequence[Tensor], device: torch.device, stream: torch.cuda.Stream) -> list[Tensor]:
    """Tensors in newly allocated memory of the current stream."""
    return [torch.empty_like(like, device=device) for like in likes]


class InputBuffer:
    """Memory for the tensors of one batch.

    Args:
        likes: tensors like those of the batch.
        device: of the memory.
        stream: the stream that it serves, which is current.

    Attributes:
        kind: of the tensors and the stream.
        addresses: of those of its tensors that have elements.

    Example:
        >>> buffer = InputBuffer([torch.zeros(2)], torch.device("cpu"), None)
        >>> (batch,) = buffer.hand_out()
        >>> buffer.is_free, batch.data_ptr() in buffer.addresses
        (False, True)
        >>> del batch
        >>> buffer.is_free
        True
    """

    def __init__(self, likes: Sequence[Tensor], device: torch.device, stream: torch.cuda.Stream) -> None:
        self.kind = _kind(likes, stream)
        self._memory = new_memory(likes, device, stream)
        self._handed_out: list[ref[Tensor]] = []
        self.addresses = [tensor.data_ptr() for tensor in self._memory if tensor.numel()]

    @property
    def is_free(self) -> bool:
        """Whether all tensors that were handed out have been freed."""
        return all(owner() is None for owner in self._handed_out)

    def hand_out(self) -> list[Tensor]:
        """New tensors in this memory, each with a storage of its own. The buffer must be free."""
        owners = [_bytes_of(tensor) for tensor in self._memory]
        self._handed_out = list(map(ref, owners))
        # A storage from DLPack keeps the tensor that it was made of alive as long as it lives itself.
        storages = [from_dlpack(to_dlpack(owner)) for owner in owners]
        return [
            storage.view(like.dtype).as_strided(like.shape, like.stride()).data  # not a view to autograd
            for storage, like in zip(storages, self._memory, strict=True)
        ]

    def here(self, tensor: Tensor) -> Tensor | None:
        """An alias of this tensor that does not keep the buffer in use; ``None`` if the tensor is elsewhere.

        A tensor that begins later than those that are handed out, or has another dtype, counts as elsewhere.
        """
        for memory in self._memory:
            if memory.numel() and memory.data_ptr() == tensor.data_ptr() and memory.dtype == tensor.dtype:
                return memory.as_strided(tensor.shape, tensor.stride())
        return None


BufferTable = WeakValueDictionary[int, InputBuffer]
"""By address, the buffer with a tensor that begins there. Keeps no buffer alive."""


class InputBuffers:
    """A limited number of buffers, for tensors like the first ones; all others get new memory.

    Args:
        count: of buffers, at most.
        table: where they can be found by address.

    Example:
        >>> table = BufferTable()
        >>> buffers = InputBuffers(1, table)
        >>> first, second = (buffers.memory([torch.zeros(2)], torch.device("cpu"), None) for _ in range(2))
        >>> first[0].data_ptr() in table, second[0].data_ptr() in table
        (True, False)
    """

    def __init__(self, count: int, table: BufferTable) -> None:
        self._count, self._table = count, table
        self._buffers: list[InputBuffer] = []
        self._lock = threading.Lock()

    def memory(self, likes: Sequence[Tensor], device: torch.device, stream: torch.cuda.Stream) -> list[Tensor]:
        """Tensors like these on a device, for one of its streams, which is current; in a buffer if one is free.

        Raises:
            torch.OutOfMemoryError: there is too little memory for them.
        """
        with self._lock:
            buffer = self._free_buffer(likes, device, stream)
            return new_memory(likes, device, stream) if buffer is None else buffer.hand_out()

    def _free_buffer(
        self, likes: Sequence[Tensor], device: torch.device, stream: torch.cuda.Stream
    ) -> InputBuffer | None:
        if self._buffers and self._buffers[0].kind != _kind(likes, stream):
            return None
        free = next((buffer for buffer in self._buffers if buffer.is_free), None)
        if free is None and len(self._buffers) < self._count:
            free = InputBuffer(likes, device, stream)
            self._buffers.append(free)
            self._table.update(dict.fromkeys(free.addresses, free))
        return free


def _kind(likes: Sequence[Tensor], stream: torch.cuda.Stream) -> tuple[object, ...]:
    return stream, *((like.shape, like.stride(), like.dtype) for like in likes)


def _bytes_of(tensor: Tensor) -> Tensor:
    """All memory of a tensor without gaps, as bytes, because DLPack does not support all dtypes."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
