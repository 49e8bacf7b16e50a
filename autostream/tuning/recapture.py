"""A captured graph, captured once more: in the pool of the model's others, and wherever its tensors lie in a call.

tuned ──▶ pooled ──▶ at places: a graph for each set of weights (places.py), and for each slot (variants.py)
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from autostream.errors import CaptureError, first_line
from autostream.ir import Decision
from autostream.runtime.cuda_graph import CapturedGraph, FlatFunction, GraphPool, GraphPools
from autostream.runtime.graphs_by_address import Places
from autostream.runtime.graphs_by_input import Variants
from autostream.runtime.input_buffers import SlotTable
from autostream.runtime.restore import undone
from autostream.tuning.select import Execution
from autostream.tuning.tune import Tuned
from autostream.utils.locks import preparing

log = logging.getLogger(__name__)


def pooled(tuned: Tuned, arguments: Sequence[Tensor], pools: GraphPools) -> Tuned:
    """What was tuned, captured again in the pool of the model's other graphs; the first one's pool becomes theirs.

    Candidates have pools of their own: what those that lose have taken would stay in a pool that others live in.

    Args:
        tuned: the candidate that was chosen.
        arguments: of a call.
        pools: of the model, by device; one is added where there is none that takes another graph.
    """
    graph = tuned.selection.execution
    if not isinstance(graph, CapturedGraph):
        return tuned
    pool = _host(graph, pools)
    if pool is graph.pool:
        return tuned
    try:
        read = [graph.static.get(at, argument) for at, argument in enumerate(arguments)]
        again = _recaptured(graph, read, arguments, pool)
    except (CaptureError, torch.OutOfMemoryError) as error:
        _host(graph, pools)  # this one's is theirs from now on, if a capture into the other one is what failed
        reason = f"captured into the pool of the model's other graphs, it fails: {first_line(error)}"
        alone = Decision("", "memory of its own", reason)
        return replace(tuned, refusals=(*tuned.refusals, alone))
    return replace(tuned, selection=replace(tuned.selection, execution=again))


class Copies:
    """Why batches are copied in that come in slots; it is said once, for there are several slots.

    Args:
        model: its name.

    Attributes:
        refusals: the reason, if there is one.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self.refusals: tuple[Decision, ...] = ()

    def because(self, reason: str) -> None:
        """Remember it."""
        if not self.refusals:
            self.refusals = (Decision("", "batches are copied in", reason),)
            log.warning("%s: batches are copied in: %s", self._model, reason)


def at_places(
    execution: Execution, arguments: Sequence[Tensor], bound: Sequence[bool], slots: SlotTable, copies: Copies
) -> FlatFunction | Places:
    """What runs calls wherever their tensors lie. It does not know whose it is, so that it goes at once with that.

    Args:
        execution: was captured, or is returned as it is.
        arguments: that it was made for.
        bound: which of these stay where they are from call to call.
        slots: where others may be.
        copies: is told why they are copied though they are in a slot.
    """
    if not isinstance(execution, CapturedGraph):
        return execution
    inputs = [at for at, stays in enumerate(bound) if not stays]

    def variants(graph: CapturedGraph) -> Variants:
        return Variants(graph, inputs, slots, partial(_recaptured, graph), copies.because)

    return Places(execution, arguments, variants, _recaptured)


def _host(graph: CapturedGraph, pools: GraphPools) -> GraphPool:
    """The pool of the model's graphs; that of this one where there is none yet, or none that takes another graph."""
    pool = pools.get(graph.device)
    if pool is None or pool.failed:
        pool = pools[graph.device] = graph.pool
    return pool


def _recaptured(
    graph: CapturedGraph, read: Sequence[Tensor], arguments: Sequence[Tensor], pool: GraphPool | None = None
) -> CapturedGraph:
    """A graph captured again; the arguments of the program, and the generators of random numbers, are as before.

    Args:
        graph: the former one.
        read: what the other reads; static tensors of the former one get what the call has there.
        arguments: of a call, some of which are read.
        pool: by default that of the former one.

    Raises:
        CaptureError: the capture failed.
    """
    with preparing, torch.inference_mode(False), torch.no_grad():
        # What an earlier call left there may be no index into what this call's model holds.
        graph.fill([at for at, static in graph.static.items() if read[at] is static], arguments)
        with undone(read, graph.written, [str(graph.device)]) as restore:
            return graph.recaptured(read, pool or graph.pool, restore)
