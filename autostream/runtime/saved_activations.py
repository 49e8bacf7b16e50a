"""What a captured graph leaves behind in its own memory, for later, until that memory is written again.

    forward: lend ──▶ saved by autograd ──▶ backward: in place, nothing is copied
                └──▶ another forward first: whoever still needs it gets a copy ──▶ backward: put back

Most calls are followed by their backward before the next call, so that copying all that is saved, in case it might be
overwritten, would cost memory and time for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import ref

import torch
from torch import Tensor

from autostream.runtime.static_inputs import copier


class Lending:
    """Who needs what is in memory that each call of a graph writes anew, and on which stream it was used last.

    Its methods, and what is launched between them and the next one, are for one thread at a time.

    Args:
        device: where the memory is.

    Example:
        >>> memory, lending = torch.tensor([1.0]), Lending(torch.device("cpu"))
        >>> (first,) = lending.lend([memory])
        >>> lending.recall()
        >>> _ = memory.fill_(2)  # the next call
        >>> first
        tensor([1.])
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._borrowed: list[ref[Tensor]] = []
        self._lent_on: torch.cuda.Stream | None = None
        self._used_on: torch.cuda.Stream | None = None

    def lend(self, memory: Sequence[Tensor]) -> list[Tensor]:
        """Tensors that lie in this memory, until it is recalled; they are nobody's views, and count writes alone."""
        self._take_turn()
        self._lent_on = self._used_on
        borrowed = [tensor.data for tensor in memory]
        self._borrowed = list(map(ref, borrowed))
        return borrowed

    def recall(self) -> None:
        """Let the memory be written on the current stream: what anybody still has of it moves to a copy first."""
        needed = [tensor for borrowed in self._borrowed if (tensor := borrowed()) is not None]
        if needed:
            with torch.cuda.stream(self._lent_on):  # where it is read, and given back
                self._take_turn()
                for tensor in needed:
                    tensor.data = tensor.clone()
        self._borrowed = []
        self._take_turn()

    def put_back(self, tensors: Sequence[Tensor], memory: Sequence[Tensor]) -> None:
        """Let the memory hold what these tensors do, for what is launched on the current stream now."""
        self._take_turn()
        if any(tensor.data_ptr() != place.data_ptr() for tensor, place in zip(tensors, memory, strict=True)):
            self.recall()
            copier(memory)(tensors)

    def _take_turn(self) -> None:
        if self._device.type == "cuda":
            current = torch.cuda.current_stream(self._device)
            if self._used_on is not None and self._used_on != current:
                current.wait_stream(self._used_on)
            self._used_on = current
