"""Memory that batches come in again and again, so that a captured graph can read them where they are.

    slot:  hand out ─▶ tensors like any other ─▶ nobody has anything of them ─▶ hand out, at the same addresses
             └──────────── a graph that was captured for these addresses: nothing to copy ────────────┘

What is handed out has a storage that nobody else has, so whoever keeps it, or a view of it, keeps the slot from being
used again: batches are never overwritten while somebody can see them. Work that was launched with them may still be
under way, as it may in memory that the caching allocator hands on; so a slot serves one stream only, as that does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]  # it is documented there

Memory = Callable[[Sequence[Tensor], torch.device, torch.cuda.Stream], list[Tensor]]
"""Gives tensors like those in the host's memory, on a device, for a stream of it."""


def new_memory(likes: Sequence[Tensor], device: torch.device, home: torch.cuda.Stream) -> list[Tensor]:
    """Tensors in memory that is taken now, on the current stream."""
    return [torch.empty_like(like, device=device) for like in likes]


class Slot:
    """Memory for the tensors of one batch.

    Args:
        likes: what the tensors are like.
        device: where the memory is taken.
        home: the stream that it is for, which is current.

    Attributes:
        kind: of the tensors and the stream that it is for.
        addresses: of those of its tensors that have elements.

    Example:
        >>> slot = Slot([torch.zeros(2)], torch.device("cpu"), None)
        >>> (batch,) = slot.hand_out()
        >>> slot.is_free, batch.data_ptr() in slot.addresses
        (False, True)
        >>> del batch
        >>> slot.is_free
        True
    """

    def __init__(self, likes: Sequence[Tensor], device: torch.device, home: torch.cuda.Stream) -> None:
        self.kind = _kind(likes, home)
        self._memory = new_memory(likes, device, home)
        self._handed_out: list[ref[Tensor]] = []
        self.addresses = [tensor.data_ptr() for tensor in self._memory if tensor.numel()]

    @property
    def is_free(self) -> bool:
        """Whether nobody has a tensor that lies here."""
        return all(owner() is None for owner in self._handed_out)

    def hand_out(self) -> list[Tensor]:
        """New tensors that lie here, each with a storage of its own. Nobody may have others."""
        owners = [_bytes_of(tensor) for tensor in self._memory]
        self._handed_out = list(map(ref, owners))
        # A storage that comes by DLPack holds on to the tensor that it was made of until nobody has it any more.
        storages = [from_dlpack(to_dlpack(owner)) for owner in owners]
        return [
            storage.view(like.dtype).as_strided(like.shape, like.stride()).data  # nobody's view
            for storage, like in zip(storages, self._memory, strict=True)
        ]

    def here(self, tensor: Tensor) -> Tensor | None:
        """What this tensor is, as one that does not keep the slot from being used again; ``None`` if it lies elsewhere.

        Where a tensor begins later than any that was handed out, or is of another dtype, that is elsewhere.
        """
        for own in self._memory:
            if own.numel() and own.data_ptr() == tensor.data_ptr() and own.dtype == tensor.dtype:
                return own.as_strided(tensor.shape, tensor.stride())
        return None


SlotTable = WeakValueDictionary[int, Slot]
"""By address, the slot that a tensor which begins there lies in, for as long as there are slots."""


class Slots:
    """At most so many slots, for tensors like the first that ask; there is new memory for all others.

    Args:
        count: how many there may be.
        table: where they can be looked up.

    Example:
        >>> table = SlotTable()
        >>> slots = Slots(1, table)
        >>> first, second = (slots.memory([torch.zeros(2)], torch.device("cpu"), None) for _ in range(2))
        >>> first[0].data_ptr() in table, second[0].data_ptr() in table
        (True, False)
    """

    def __init__(self, count: int, table: SlotTable) -> None:
        self._count, self._table = count, table
        self._slots: list[Slot] = []
        self._lock = threading.Lock()

    def memory(self, likes: Sequence[Tensor], device: torch.device, home: torch.cuda.Stream) -> list[Tensor]:
        """Tensors like these on a device, for a stream of it, which is current; in a slot if one is free.

        Raises:
            torch.OutOfMemoryError: there is too little memory for them.
        """
        with self._lock:
            slot = self._slot(likes, device, home)
            return new_memory(likes, device, home) if slot is None else slot.hand_out()

    def _slot(self, likes: Sequence[Tensor], device: torch.device, home: torch.cuda.Stream) -> Slot | None:
        if self._slots and self._slots[0].kind != _kind(likes, home):
            return None
        free = next((slot for slot in self._slots if slot.is_free), None)
        if free is None and len(self._slots) < self._count:
            free = Slot(likes, device, home)
            self._slots.append(free)
            self._table.update(dict.fromkeys(free.addresses, free))
        return free


def _kind(likes: Sequence[Tensor], home: torch.cuda.Stream) -> tuple[object, ...]:
    return home, *((like.shape, like.stride(), like.dtype) for like in likes)


def _bytes_of(tensor: Tensor) -> Tensor:
    """All memory of a tensor without gaps; of no special dtype, because DLPack does not have all."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
