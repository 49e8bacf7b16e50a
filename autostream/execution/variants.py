"""A captured graph, and the same once more for places where its inputs come again and again.

    inputs ──▶ in a slot? ──▶ the graph that reads them there, captured in the first call with that slot
                  └── no ──▶ where they have been often? ──▶ the graph that reads them there
                                └── no ──▶ the graph that reads tensors of its own: inputs are copied there

A graph holds addresses. Those of memory that is never given away, only used again, are worth a graph of their own; so
are those that a caller fills anew for each call, or is given by the allocator again and again, where the copy is a
good part of the call. A graph does not hold such inputs: it reads whatever lies there in the calls that it is for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from autostream.errors import CaptureError, first_line
from autostream.execution.cuda_graph import CapturedGraph
from autostream.execution.slots import Slot, SlotTable
from autostream.execution.static import Output

Capture = Callable[[Sequence[Tensor], Sequence[Tensor], Collection[int]], CapturedGraph]
"""Captures a run again: with what it then reads, the arguments of a call, which are left as they are, and the places of
those that it is to read where they are."""

OFTEN = 16
"""Calls with inputs at the same addresses, after which others are expected to come there."""

MOST = 4
"""Graphs for such inputs: each has memory of its own for its outputs."""

_KNOWN = 32
"""Sets of addresses that are counted at a time."""

_ALIGNMENT = 16
"""Bytes. Compiled kernels count on it, as it holds of the graph's own tensors."""


class Variants:
    """Runs calls of a captured graph, as far as possible without copying their inputs.

    A variant lives as long as its slot and this. It reads the graph's own tensors where a call's are not in the slot,
    and computes in the graph's pool, so memory that it has for itself is that of its outputs.

    Args:
        graph: reads tensors of its own.
        inputs: which of its arguments it copies; no two share memory.
        slots: where they may be.
        capture: captures it again; may fail with ``CaptureError`` or ``torch.OutOfMemoryError``.
        refused: is told why inputs are copied though they need not be.
        may_stay: whether inputs outside of slots may be read where they are.
    """

    def __init__(
        self,
        graph: CapturedGraph,
        inputs: Sequence[int],
        slots: SlotTable,
        capture: Capture,
        refused: Callable[[str], None],
        *,
        may_stay: bool = False,
    ) -> None:
        self.graph, self._inputs, self._slots = graph, tuple(inputs), slots
        self._capture, self._refused = capture, refused
        self._may_stay = may_stay and bool(inputs)
        own = tuple(graph.static[at].data_ptr() for at in inputs)  # where there is nothing to copy already
        self._staying: dict[tuple[int, ...], CapturedGraph] = {own: graph}
        self._calls: dict[tuple[int, ...], int] = {}
        self._by_slot: WeakKeyDictionary[Slot, tuple[tuple[int | None, ...], CapturedGraph]] = WeakKeyDictionary()

    def unmoved(self, arguments: Sequence[Tensor]) -> bool:
        """Whether bound tensors lie where the graph and all of its variants read them."""
        return self.graph.unmoved(arguments)

    def launch(self, arguments: Sequence[Tensor]) -> Sequence[Output]:
        """What :meth:`CapturedGraph.launch` does, which looks at no bound tensor."""
        return self.reading(arguments).launch(arguments)

    def reading(self, arguments: Sequence[Tensor]) -> CapturedGraph:
        """The graph that reads these inputs where they are, or else the one that has them copied."""
        if not (self._may_stay or self._slots):
            return self.graph
        addresses = tuple([arguments[at].data_ptr() for at in self._inputs])
        if self._slots and (slots := {self._slots.get(address) for address in addresses} - {None}):
            # A batch comes in one slot; with others, there would be a graph for each pair of them.
            return self._in_slot(slots.pop(), addresses, arguments) if len(slots) == 1 else self.graph
        if not self._may_stay:
            return self.graph
        return self._staying.get(addresses) or self._counted(addresses, arguments)

    def _in_slot(self, slot: Slot | None, addresses: Sequence[int], arguments: Sequence[Tensor]) -> CapturedGraph:
        """The graph for a batch in a slot, if all of the batch that lies there lies where it did."""
        assert slot is not None, "it was left out"
        places = tuple(address if self._slots.get(address) is slot else None for address in addresses)
        if slot not in self._by_slot and self.unmoved(arguments):
            here = {at: tensor for at in self._inputs if (tensor := slot.here(arguments[at])) is not None}
            self._by_slot[slot] = places, self._captured(arguments, {**self.graph.static, **here}, ())
        known, graph = self._by_slot.get(slot, ((), self.graph))
        return graph if known == places else self.graph

    def _counted(self, addresses: tuple[int, ...], arguments: Sequence[Tensor]) -> CapturedGraph:
        """The graph, once more if inputs have come often enough where these are."""
        if len(self._staying) > MOST:
            return self.graph
        if len(self._calls) == _KNOWN:
            self._calls.clear()
        self._calls[addresses] = calls = self._calls.get(addresses, 0) + 1
        aligned = all(address % _ALIGNMENT == 0 for address in addresses)
        if calls < OFTEN or not aligned or self.graph.lent or not self.unmoved(arguments):
            return self.graph
        self._staying[addresses] = graph = self._captured(arguments, {}, self._inputs)
        return graph

    def _captured(
        self, arguments: Sequence[Tensor], static: Mapping[int, Tensor], staying: Collection[int]
    ) -> CapturedGraph:
        """The graph once more: with these tensors, and the arguments in all other places, some of which stay there."""
        read = [static.get(at, argument) for at, argument in enumerate(arguments)]
        try:
            return self._capture(read, arguments, staying)
        except (CaptureError, torch.OutOfMemoryError) as error:
            self._refused(f"captured for the memory that batches come in, it fails: {first_line(error)}")
            return self.graph
