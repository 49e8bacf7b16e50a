"""A captured graph, and the same once more for each place where the tensors lie that it does not copy.

    weights ──▶ where the last call's were ──▶ its graph
                  ├── where those of an earlier call were ──▶ the graph of that call
                  └── elsewhere ──▶ captured again, if captures have been worth it so far

A graph holds addresses. Blocks of a model that are alike are one piece to Dynamo, called with the weights of one after
the other; a model and the average of its weights may change places. Each such set has a graph. Weights that are given
new memory in every call would have one each time, so after so many there are no more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_

import torch
from torch import Tensor

from autostream.errors import CaptureError, first_line
from autostream.runtime.addresses import still_there
from autostream.runtime.cuda_graph import CapturedGraph
from autostream.runtime.graphs_by_input import Variants
from autostream.runtime.layouts import Layouts
from autostream.runtime.static_inputs import static_copies

Capture = Callable[[CapturedGraph, Sequence[Tensor], Sequence[Tensor]], CapturedGraph]
"""Captures a graph's run again: with what it then reads, and the arguments of a call, which are left as they are."""

MakeVariants = Callable[[CapturedGraph], Variants]

MOST = 64
"""Captures at first, and graphs at any time: all layers of a deep model may be alike. Each graph has memory for its
outputs; all else they share."""

WORTH = 64
"""For as many calls that find all where the one before did, with a graph there or without, there may be one capture
more."""


class Place:
    """A graph of tensors at some addresses. It does not hold them.

    Args:
        variants: the graph, and the same for each slot that inputs come in.
        bound: the tensors that it reads where they are.

    Attributes:
        takes: the positions of the arguments that it needs, where it does not need all.
    """

    def __init__(self, variants: Variants, bound: Sequence[Tensor]) -> None:
        self.variants, self.graph = variants, variants.graph
        self.launch, self.launch_inputs, self.unmoved = variants.launch, variants.launch_inputs, variants.unmoved
        self.takes = [*self.graph.static] if self.graph.takes_inputs else None
        self.is_used = still_there(bound)


class LatestRun:
    """The graph of the latest call, and the weights that it read where they lay. Holds both.

    Args:
        place: the graph.
        arguments: of that call.
    """

    def __init__(self, place: Place, arguments: Sequence[Tensor]) -> None:
        self.place, self._bound = place, place.graph.bound
        self._weights = [arguments[at] for at in self._bound]
        self._layouts: Layouts | None = None

    def is_of(self, place: Place, arguments: Sequence[Tensor]) -> bool:
        """Whether it is a run of this graph, with the same objects for weights."""
        return self.place is place and all(map(is_, [arguments[at] for at in self._bound], self._weights))

    def unmoved(self, arguments: Sequence[Tensor]) -> bool:
        """Whether its weights lie where the graph reads them. What sees that is made when they come again."""
        if self._layouts is None:
            if not self.place.unmoved(arguments):
                return False
            self._layouts = Layouts(self._weights, whole=True)
        return bool(self._layouts.unchanged())


class Places:
    """Runs calls of a captured graph wherever their bound tensors lie, capturing it again if that has been worth it.

    There are at most :data:`MOST` captures, and one more for :data:`WORTH` calls that found all where it was; after one
    that failed, these are waited for. Of too many graphs one goes whose tensors nobody has any more, or else the first:
    until then, others may come to lie there. One whose outputs are lent goes for the next.

    Args:
        graph: the first.
        arguments: that it was captured for.
        variants: of a graph.
        capture: captures it again.
    """

    def __init__(
        self, graph: CapturedGraph, arguments: Sequence[Tensor], variants: MakeVariants, capture: Capture
    ) -> None:
        self._variants, self._capture, self._bound = variants, capture, graph.bound
        self._latest = self._place(graph, arguments)
        self._known = {self._addresses(arguments): self._latest}
        self._credit, self._failure = (MOST - 1) * WORTH, ""  # in calls
        self._refused: tuple[int, ...] = ()
        self._settled = True  # whether the latest call found all where the one before did

    @property
    def graph(self) -> CapturedGraph:
        """The graph of the latest call."""
        return self._latest.graph

    @property
    def place(self) -> Place:
        """That of the latest call."""
        return self._latest

    def find(self, arguments: Sequence[Tensor]) -> Place | None:
        """The graph that reads these tensors where they are, if there is one."""
        latest = self._latest
        if latest.unmoved(arguments):
            self.served(self._settled)
            self._settled = True
            return latest
        self._settled = False
        try:
            found = self._known.get(self._addresses(arguments))
        except RuntimeError:  # sparse tensors have no address
            return None
        if found is None or not found.unmoved(arguments):
            return None
        if not found.is_used():  # others lie there by now
            found.is_used = still_there(self._those_bound(arguments))
        self._latest = found
        return found

    def latest(self, arguments: Sequence[Tensor]) -> Place | None:
        """The graph of the latest call, if it reads these tensors where they are."""
        latest = self._latest
        return latest if latest.unmoved(arguments) else None

    def served(self, calls: int) -> None:
        """So many calls have found all where the one before did."""
        self._credit = min(MOST * WORTH, self._credit + calls)

    @property
    def over(self) -> str:
        """Why there is no capture now; nothing if there may be one."""
        if self._credit < WORTH or (self._failure and self.graph.pool.failed):
            return self._failure or _MOVES
        return ""

    def refused(self, arguments: Sequence[Tensor]) -> str:
        """Why a call with these tensors, which no graph reads, gets none now; nothing if there may be a capture.

        A refused call counts if the one before was refused with the same.
        """
        if self.over:
            addresses = self._addresses(arguments)
            self._credit += addresses == self._refused
            self._refused = addresses
        return self.over

    def add(self, arguments: Sequence[Tensor]) -> Place:
        """Capture the graph for the place where these tensors lie, which has none; without gradients or inference mode.

        Raises:
            CaptureError: it failed.
            torch.OutOfMemoryError: so it did, for want of memory.
        """
        former = self.graph  # its pool can be captured into while it lives
        others = 0 if former.lent else MOST - 1
        self._known = self._kept(max(others, 1))  # what goes leaves its memory to the capture
        self._credit -= WORTH
        try:
            place = self._place(self._capture(former, _read(former, arguments), arguments), arguments)
        except (CaptureError, torch.OutOfMemoryError) as error:
            self._credit, self._failure = 0, f"captured again where its weights lie now, it fails: {first_line(error)}"
            raise
        self._failure = ""
        self._known = {**self._kept(others), self._addresses(arguments): place}
        self._latest = place
        return place

    @property
    def are_lost(self) -> bool:
        """Whether the latest capture has failed, and nobody has the tensors that the others read."""
        return bool(self._failure) and not any(place.is_used() for place in self._known.values())

    def _kept(self, most: int) -> dict[tuple[int, ...], Place]:
        """As many places: the latest, then those whose tensors somebody has, then those that were captured last."""
        worth = [(place is self._latest, place.is_used(), at) for at, place in enumerate(self._known.values())]
        kept = {at for *_, at in sorted(worth, reverse=True)[:most]}
        return {addresses: place for at, (addresses, place) in enumerate(self._known.items()) if at in kept}

    def _place(self, graph: CapturedGraph, arguments: Sequence[Tensor]) -> Place:
        return Place(self._variants(graph), self._those_bound(arguments))

    def _those_bound(self, arguments: Sequence[Tensor]) -> list[Tensor]:
        return [arguments[at] for at in self._bound]

    def _addresses(self, arguments: Sequence[Tensor]) -> tuple[int, ...]:
        return tuple(arguments[at].data_ptr() for at in self._bound)


_MOVES = (
    "its weights lie elsewhere in call after call, or in too many places, and a CUDA graph holds where they lie: write "
    "new values into the tensors that it has (copy_) instead of giving it others"
)


def _read(former: CapturedGraph, arguments: Sequence[Tensor]) -> list[Tensor]:
    """What a graph reads that takes turns with another: the same tensors of its own, unless runs write them."""
    if any(former.written[at] for at in former.static):
        return static_copies(arguments, [*former.static])
    return [former.static.get(at, argument) for at, argument in enumerate(arguments)]
