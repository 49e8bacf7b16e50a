"""A captured graph, and the same once more for each slot that its inputs come in.

    inputs ──▶ in a slot? ──▶ the graph that reads them there, captured in the first call with that slot
                  └── no ──▶ the graph that reads tensors of its own: inputs are copied there

A graph holds addresses. Those of memory that is never given away, only used again, are worth a graph of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from autostream.errors import CaptureError, first_line
from autostream.runtime.cuda_graph import CapturedGraph
from autostream.runtime.input_buffers import Slot, SlotTable
from autostream.runtime.static_inputs import Output

Capture = Callable[[Sequence[Tensor], Sequence[Tensor]], CapturedGraph]
"""Captures a run again: with what it then reads, and the arguments of a call, which are left as they are."""


class Variants:
    """Runs calls of a captured graph, as far as possible without copying their inputs.

    A variant lives as long as its slot and this. It reads the graph's own tensors where a call's are not in the slot,
    and computes in the graph's pool, so memory that it has for itself is that of its outputs.

    Args:
        graph: reads tensors of its own.
        inputs: which of its arguments it copies; no two share memory.
        slots: where they may be.
        capture: captures it again; may fail with ``CaptureError`` or ``torch.OutOfMemoryError``.
        refused: is told why a batch is copied though it is in a slot.
    """

    def __init__(
        self,
        graph: CapturedGraph,
        inputs: Sequence[int],
        slots: SlotTable,
        capture: Capture,
        refused: Callable[[str], None],
    ) -> None:
        self.graph, self._inputs, self._slots = graph, tuple(inputs), slots
        self._capture, self._refused = capture, refused
        self._by_slot: WeakKeyDictionary[Slot, tuple[tuple[int | None, ...], CapturedGraph]] = WeakKeyDictionary()

    def unmoved(self, arguments: Sequence[Tensor]) -> bool:
        """Whether bound tensors lie where the graph and all of its variants read them."""
        return self.graph.unmoved(arguments)

    def launch(self, arguments: Sequence[Tensor]) -> Sequence[Output]:
        """What :meth:`CapturedGraph.launch` does, which looks at no bound tensor."""
        return self.reading(arguments).launch(arguments)

    def launch_inputs(self, inputs: Sequence[Tensor]) -> Sequence[Output] | None:
        """The same for a graph that needs no other arguments; nothing where inputs may be in slots."""
        return None if self._slots else self.graph.launch_inputs(inputs)

    def reading(self, arguments: Sequence[Tensor]) -> CapturedGraph:
        """The graph that reads these inputs where they are, or else the one that has them copied."""
        if not self._slots:
            return self.graph
        addresses = [arguments[at].data_ptr() for at in self._inputs]
        found = [self._slots.get(address) for address in addresses]
        slots = set(found) - {None}
        if len(slots) != 1:  # a batch comes in one slot; with others, there would be a graph for each pair of them
            return self.graph
        (slot,) = slots
        assert slot is not None, "it was left out"
        places = tuple(None if where is None else at for at, where in zip(addresses, found, strict=True))
        if slot not in self._by_slot and self.unmoved(arguments):
            self._by_slot[slot] = places, self._captured(slot, arguments)
        known, graph = self._by_slot.get(slot, ((), self.graph))
        return graph if known == places else self.graph

    def _captured(self, slot: Slot, arguments: Sequence[Tensor]) -> CapturedGraph:
        static = list(arguments)
        for at in self._inputs:
            here = slot.here(arguments[at])
            static[at] = self.graph.static[at] if here is None else here
        try:
            return self._capture(static, arguments)
        except (CaptureError, torch.OutOfMemoryError) as error:
            self._refused(f"captured for the memory that batches come in, it fails: {first_line(error)}")
            return self.graph
