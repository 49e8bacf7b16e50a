"""One captured graph for each input buffer that batches come in, so that they need not be copied.

    inputs ──▶ in an input buffer ──▶ the graph that reads them there, captured in the first call with that buffer
      └──────▶ elsewhere ──▶ the graph that reads static inputs: inputs are copied there

A CUDA graph holds addresses. A buffer (:mod:`~autostream.runtime.input_buffers`) is used for one batch after another,
so a graph for its addresses can be replayed many times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from autostream.errors import CaptureError, first_line
from autostream.runtime.cuda_graph import CapturedGraph
from autostream.runtime.input_buffers import BufferTable, InputBuffer
from autostream.runtime.static_inputs import Output

Capture = Callable[[Sequence[Tensor], Sequence[Tensor]], CapturedGraph]
"""Captures a run again: with the tensors that it is to read, and a call's arguments, which stay unchanged."""

Variant = tuple[tuple[int | None, ...], CapturedGraph]
"""For each input, the address at which the graph reads it in place, ``None`` if it is copied; and the graph."""


class GraphsByInput:
    """Runs calls of a captured graph without copying inputs that are in an input buffer.

    A variant lives as long as its buffer and this object. It reads the graph's static inputs where a call's are not in
    the buffer, and computes in the graph's memory pool, so it takes memory for its outputs only.

    Args:
        graph: reads static inputs.
        inputs: which of its arguments it copies; no two share memory.
        buffers: that inputs may be in.
        capture: captures it again; may fail with ``CaptureError`` or ``torch.OutOfMemoryError``.
        refused: takes the reason why a batch is copied though it is in a buffer.
    """

    def __init__(
        self,
        graph: CapturedGraph,
        inputs: Sequence[int],
        buffers: BufferTable,
        capture: Capture,
        refused: Callable[[str], None],
    ) -> None:
        self.graph, self._inputs, self._buffers = graph, tuple(inputs), buffers
        self._capture, self._refused = capture, refused
        self._variants: WeakKeyDictionary[InputBuffer, Variant] = WeakKeyDictionary()

    def unmoved(self, arguments: Sequence[Tensor]) -> bool:
        """Whether weights are where the graph and its variants read them."""
        return self.graph.unmoved(arguments)

    def launch(self, arguments: Sequence[Tensor]) -> Sequence[Output]:
        """Run as :meth:`CapturedGraph.launch` does, without checking the weights' addresses."""
        return self.reading(arguments).launch(arguments)

    def launch_inputs(self, inputs: Sequence[Tensor]) -> Sequence[Output] | None:
        """Run a graph that needs no other arguments; ``None``, without a run, where inputs may be in buffers."""
        return None if self._buffers else self.graph.launch_inputs(inputs)

    def reading(self, arguments: Sequence[Tensor]) -> CapturedGraph:
        """The variant that reads these inputs in place, or else the graph that copies them."""
        if not self._buffers:
            return self.graph
        addresses = [arguments[at].data_ptr() for at in self._inputs]
        buffer_of = [self._buffers.get(address) for address in addresses]
        buffers = set(buffer_of) - {None}
        if len(buffers) != 1:  # a batch is in one buffer; otherwise there would be a graph for each pair of buffers
            return self.graph
        (buffer,) = buffers
        assert buffer is not None, "it was left out"
        read = tuple(None if found is None else at for at, found in zip(addresses, buffer_of, strict=True))
        if buffer not in self._variants and self.unmoved(arguments):
            self._variants[buffer] = read, self._captured(buffer, arguments)
        expected, graph = self._variants.get(buffer, ((), self.graph))
        return graph if expected == read else self.graph

    def _captured(self, buffer: InputBuffer, arguments: Sequence[Tensor]) -> CapturedGraph:
        static = list(arguments)
        for at in self._inputs:
            in_buffer = buffer.here(arguments[at])
            static[at] = self.graph.static[at] if in_buffer is None else in_buffer
        try:
            return self._capture(static, arguments)
        except (CaptureError, torch.OutOfMemoryError) as error:
            self._refused(f"captured for the memory that batches come in, it fails: {first_line(error)}")
            return self.graph
