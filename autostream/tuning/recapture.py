"""Capture a chosen schedule again: into the memory pool of the model, and for other addresses of its tensors.

tuned ──▶ captured_into_pool ──▶ by_address: a graph for each set of weights (``graphs_by_address.py``), and for each
                                 input buffer (``graphs_by_input.py``)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from autostream.errors import CaptureError, first_line
from autostream.ir import Decision
from autostream.runtime.cuda_graph import CapturedGraph, FlatFunction, GraphPool, GraphPools
from autostream.runtime.graphs_by_address import GraphsByAddress
from autostream.runtime.graphs_by_input import GraphsByInput
from autostream.runtime.input_buffers import BufferTable
from autostream.runtime.restore import undone
from autostream.runtime.static_inputs import ordinary
from autostream.tuning.select import Execution
from autostream.tuning.tune import Tuned
from autostream.utils.locks import preparing
from autostream.utils.logs import Log

log = Log(__name__)


def captured_into_pool(tuned: Tuned, arguments: Sequence[Tensor], pools: GraphPools) -> Tuned:
    """Capture a tuned program again, into the pool of the model's other graphs. The first graph's pool becomes theirs.

    Candidates are measured in pools of their own, since a shared pool would keep the memory of rejected candidates.

    Args:
        tuned: the tuned program.
        arguments: of a call.
        pools: of the model, by device. One is added if there is none, or if a capture into it has failed.
    """
    graph = tuned.selection.execution
    if not isinstance(graph, CapturedGraph):
        return tuned
    pool = _pool_for(graph, pools)
    if pool is graph.pool:
        return tuned
    try:
        read = [graph.static.get(at, argument) for at, argument in enumerate(arguments)]
        execution = _recaptured(graph, read, arguments, pool)
    except (CaptureError, torch.OutOfMemoryError) as error:
        _pool_for(graph, pools)  # if the pool has failed, this graph's pool replaces it
        reason = f"captured into the pool of the model's other graphs, it fails: {first_line(error)}"
        refusal = Decision("", "memory of its own", reason)
        return replace(tuned, refusals=(*tuned.refusals, refusal))
    return replace(tuned, selection=replace(tuned.selection, execution=execution))


class CopyNote:
    """Why inputs are copied although they are in an input buffer, logged once for all buffers.

    Args:
        model: its name.

    Attributes:
        refusals: the reason, if there is one.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self.refusals: tuple[Decision, ...] = ()

    def add(self, reason: str) -> None:
        """Keep and log the first reason."""
        if not self.refusals:
            self.refusals = (Decision("", "batches are copied in", reason),)
            log.warning("%s: batches are copied in: %s", self._model, reason)


def by_address(
    execution: Execution, arguments: Sequence[Tensor], bound: Sequence[bool], buffers: BufferTable, note: CopyNote
) -> FlatFunction | GraphsByAddress:
    """A function that runs calls at other addresses too, by capturing the graph again for them.

    It has no reference to its owner, so that reference counting frees both at once.

    Args:
        execution: if it is not a captured graph, it is returned unchanged.
        arguments: that it was captured with.
        bound: which of the arguments are weights, read in place.
        buffers: input buffers, read in place too.
        note: receives the reason if inputs in buffers are copied.
    """
    if not isinstance(execution, CapturedGraph):
        return execution
    inputs = [at for at, stays in enumerate(bound) if not stays]

    def by_input(graph: CapturedGraph) -> GraphsByInput:
        return GraphsByInput(graph, inputs, buffers, partial(_recaptured, graph), note.add)

    return GraphsByAddress(execution, arguments, by_input, _recaptured)


def _pool_for(graph: CapturedGraph, pools: GraphPools) -> GraphPool:
    """The pool of the model's graphs; the pool of this graph if there is none, or if it has failed."""
    pool = pools.get(graph.device)
    if pool is None or pool.failed:
        pool = pools[graph.device] = graph.pool
    return pool


def _recaptured(
    graph: CapturedGraph, read: Sequence[Tensor], arguments: Sequence[Tensor], pool: GraphPool | None = None
) -> CapturedGraph:
    """Capture a graph again; the arguments of the program and the random number generators are restored.

    Args:
        graph: the earlier one.
        read: the tensors that the new graph reads. Static inputs of the earlier graph among them are filled first.
        arguments: of a call.
        pool: the default is the pool of the earlier graph.

    Raises:
        CaptureError: the capture failed.
    """
    read = [*map(ordinary, read)]
    with preparing, torch.inference_mode(False), torch.no_grad():
        # Values of an earlier call may be indices that are out of range for the weights of this one.
        graph.fill([at for at, static in graph.static.items() if read[at] is static], arguments)
        with undone(read, graph.written, [str(graph.device)]) as restore:
            return graph.recaptured(read, pool or graph.pool, restore)
