"""One captured graph for each set of addresses that a program's weights have been at.

    call ──▶ weights where the last call's were ──▶ its graph
      ├────▶ weights where an earlier call's were ──▶ the graph of that call
      └────▶ other addresses ──▶ capture the run again, while the budget of captures lasts

A CUDA graph holds addresses, and weights are read in place. Dynamo compiles the equal blocks of a model once and calls
them with the weights of each in turn; a model and the moving average of its weights may be swapped. Each such set of
weights has a graph. If each call had new memory for its weights, each would need a capture, so captures have a budget.

A graph for one set of weights is itself a family of graphs, one for each input buffer
(:mod:`~autostream.runtime.graphs_by_input`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_

import torch
from torch import Tensor

from autostream.errors import CaptureError, first_line
from autostream.runtime.cuda_graph import CapturedGraph
from autostream.runtime.graphs_by_input import GraphsByInput
from autostream.runtime.layouts import Layouts
from autostream.runtime.static_inputs import static_copies
from autostream.runtime.writes import storages_alive

Capture = Callable[[CapturedGraph, Sequence[Tensor], Sequence[Tensor]], CapturedGraph]
"""Captures a graph's run again: with the tensors that it is to read, and a call's arguments, which stay unchanged."""

MakeGraphsByInput = Callable[[CapturedGraph], GraphsByInput]

MAX_GRAPHS = 64
"""Captures at first, and graphs at any time: all layers of a deep model may be equal. Each graph has memory for its
outputs; everything else is shared."""

CALLS_PER_CAPTURE = 64
"""Calls that use the same addresses as the call before, captured or not, after which one more capture is allowed."""


class BoundGraph:
    """A captured graph for weights at some addresses. Keeps no weight alive.

    Args:
        by_input: the graph, and its variants for input buffers.
        weights: the tensors that it reads in place.

    Attributes:
        needed: the positions of the arguments that it needs; ``None`` if it needs all.
    """

    def __init__(self, by_input: GraphsByInput, weights: Sequence[Tensor]) -> None:
        self.graph = by_input.graph
        self.launch, self.launch_inputs, self.unmoved = by_input.launch, by_input.launch_inputs, by_input.unmoved
        self.needed = [*self.graph.static] if self.graph.needs_inputs_only else None
        self.is_used = storages_alive(weights)


class LatestRun:
    """The graph of the latest call and the weights that it read. Keeps both alive.

    Args:
        graph: that ran.
        arguments: of that call.
    """

    def __init__(self, graph: BoundGraph, arguments: Sequence[Tensor]) -> None:
        self.graph, self._bound = graph, graph.graph.bound
        self._weights = [arguments[at] for at in self._bound]
        self._layouts: Layouts | None = None

    def is_of(self, graph: BoundGraph, arguments: Sequence[Tensor]) -> bool:
        """Whether it was a run of this graph with the same tensor objects as weights."""
        return self.graph is graph and all(map(is_, [arguments[at] for at in self._bound], self._weights))

    def unmoved(self, arguments: Sequence[Tensor]) -> bool:
        """Whether its weights are where the graph reads them. The fast check is built at the first call of this."""
        if self._layouts is None:
            if not self.graph.unmoved(arguments):
                return False
            self._layouts = Layouts(self._weights, whole=True)
        return bool(self._layouts.unchanged())


class GraphsByAddress:
    """Runs calls of a captured graph at any addresses of their weights; captures it again within a budget.

    The budget is :data:`MAX_GRAPHS` captures, and one more for :data:`CALLS_PER_CAPTURE` calls that use the same
    addresses as the call before. A capture that fails spends all of it. Of too many graphs, one whose weights have been
    freed is dropped, or else the oldest: until then, other tensors may be allocated there. A graph that shares its
    outputs' memory is dropped for the next one.

    Args:
        graph: the first one.
        arguments: that it was captured for.
        by_input: makes a graph's variants for input buffers.
        capture: captures it again.
    """

    def __init__(
        self, graph: CapturedGraph, arguments: Sequence[Tensor], by_input: MakeGraphsByInput, capture: Capture
    ) -> None:
        self._by_input, self._capture, self._bound = by_input, capture, graph.bound
        self._latest = self._bound_graph(graph, arguments)
        self._by_address = {self._addresses(arguments): self._latest}
        self._budget, self._failure = (MAX_GRAPHS - 1) * CALLS_PER_CAPTURE, ""  # in calls
        self._refused: tuple[int, ...] = ()
        self._settled = True  # whether the latest call used the same addresses as the one before

    @property
    def graph(self) -> CapturedGraph:
        """The captured graph of the latest call."""
        return self._latest.graph

    @property
    def current(self) -> BoundGraph:
        """The same, with its variants."""
        return self._latest

    def find(self, arguments: Sequence[Tensor]) -> BoundGraph | None:
        """The graph that reads these weights in place, if there is one."""
        latest = self._latest
        if latest.unmoved(arguments):
            self.served(self._settled)
            self._settled = True
            return latest
        self._settled = False
        try:
            graph = self._by_address.get(self._addresses(arguments))
        except RuntimeError:  # sparse tensors have no address
            return None
        if graph is None or not graph.unmoved(arguments):
            return None
        if not graph.is_used():  # other tensors are there by now
            graph.is_used = storages_alive(self._weights(arguments))
        self._latest = graph
        return graph

    def latest(self, arguments: Sequence[Tensor]) -> BoundGraph | None:
        """The graph of the latest call, if it reads these weights in place."""
        latest = self._latest
        return latest if latest.unmoved(arguments) else None

    def served(self, calls: int) -> None:
        """Count calls that used the same addresses as the one before."""
        self._budget = min(MAX_GRAPHS * CALLS_PER_CAPTURE, self._budget + calls)

    @property
    def over(self) -> str:
        """Why no capture is allowed now; empty if one is."""
        if self._budget < CALLS_PER_CAPTURE or (self._failure and self.graph.pool.failed):
            return self._failure or _MOVES
        return ""

    def refused(self, arguments: Sequence[Tensor]) -> str:
        """Why no capture is allowed for these weights, which no graph reads; empty if one is.

        A refused call counts for the budget if the call before was refused with the same addresses.
        """
        if self.over:
            addresses = self._addresses(arguments)
            self._budget += addresses == self._refused
            self._refused = addresses
        return self.over

    def add(self, arguments: Sequence[Tensor]) -> BoundGraph:
        """Capture the graph for these weights, which no graph reads; with no gradients recorded, or in inference mode.

        Raises:
            CaptureError: it failed.
            torch.OutOfMemoryError: it failed for lack of memory.
        """
        former = self.graph  # a pool can be captured into as long as a graph in it is alive
        others = 0 if former.shared else MAX_GRAPHS - 1
        self._by_address = self._most_useful(max(others, 1))  # dropped graphs leave their memory to the capture
        self._budget -= CALLS_PER_CAPTURE
        try:
            graph = self._bound_graph(self._capture(former, _read(former, arguments), arguments), arguments)
        except (CaptureError, torch.OutOfMemoryError) as error:
            self._budget, self._failure = 0, f"captured again where its weights lie now, it fails: {first_line(error)}"
            raise
        self._failure = ""
        self._by_address = {**self._most_useful(others), self._addresses(arguments): graph}
        self._latest = graph
        return graph

    @property
    def unusable(self) -> bool:
        """Whether the latest capture has failed, and the weights of all other graphs have been freed."""
        return bool(self._failure) and not any(graph.is_used() for graph in self._by_address.values())

    def _most_useful(self, count: int) -> dict[tuple[int, ...], BoundGraph]:
        """So many graphs: the latest, then those whose weights are alive, then those that were captured last."""
        ranks = [(graph is self._latest, graph.is_used(), at) for at, graph in enumerate(self._by_address.values())]
        useful = {at for *_, at in sorted(ranks, reverse=True)[:count]}
        return {addresses: graph for at, (addresses, graph) in enumerate(self._by_address.items()) if at in useful}

    def _bound_graph(self, graph: CapturedGraph, arguments: Sequence[Tensor]) -> BoundGraph:
        return BoundGraph(self._by_input(graph), self._weights(arguments))

    def _weights(self, arguments: Sequence[Tensor]) -> list[Tensor]:
        return [arguments[at] for at in self._bound]

    def _addresses(self, arguments: Sequence[Tensor]) -> tuple[int, ...]:
        return tuple(arguments[at].data_ptr() for at in self._bound)


_MOVES = (
    "its weights lie elsewhere in call after call, or in too many places, and a CUDA graph holds where they lie: write "
    "new values into the tensors that it has (copy_) instead of giving it others"
)


def _read(former: CapturedGraph, arguments: Sequence[Tensor]) -> list[Tensor]:
    """The tensors that another capture of a graph reads: the same static inputs, unless runs write them."""
    if any(former.written[at] for at in former.static):
        return static_copies(arguments, [*former.static])
    return [former.static.get(at, argument) for at, argument in enumerate(arguments)]
