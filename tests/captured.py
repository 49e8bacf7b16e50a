"""Compares the order of ops in a captured CUDA graph with that of its schedule.

    capture:   linear │ relu │ …     the nodes that are new after an op belong to it
    driver:    edges between nodes ─▶ reachability ─▶ op before op
    schedule:  stream order, waits ─▶ happens-before ─▶ op before op      must be the same

Nodes and edges are read from the CUDA driver, as in ``runtime/graph_nodes.py``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import networkx as nx
import torch
from torch import Tensor, fx

from autostream.ir import FORK, OpGraph, Schedule
from autostream.runtime.capture import capture, run_first
from autostream.runtime.graph_nodes import returned
from autostream.runtime.runs import without_autocast
from autostream.runtime.streams import capture_stream, restored
from tests.planned import Planned

Edge = tuple[int, int]

MOST = 10
"""Disagreements that are returned, at most."""


@dataclass(frozen=True)
class Captured:
    """The contents of a CUDA graph.

    Attributes:
        nodes: by op, its nodes; an op that launches nothing has none.
        edges: pairs of nodes, the first before the second.
    """

    nodes: Mapping[str, frozenset[int]]
    edges: frozenset[Edge]


def disagreements(graph: OpGraph, schedule: Schedule, captured: Captured) -> list[str]:
    """Pairs of ops that only one of graph and schedule orders; then hazards that the graph does not order.

    An op is before another if all of its nodes are before all of the other's. It is unordered if no node of the one is
    before any of the other.

    Args:
        graph: the ops.
        schedule: of these ops.
        captured: the graph that was captured from it.
    """
    return list(islice(_disagreements(graph, schedule, captured), MOST))


def _disagreements(graph: OpGraph, schedule: Schedule, captured: Captured) -> Iterator[str]:
    ops = [launch.op for launch in schedule.launches if captured.nodes.get(launch.op)]
    wanted, (all_of, any_of) = _happens_before(schedule), _reached(captured, ops)
    for after in ops:
        for before in ops:
            if before in wanted[after] and before not in all_of[after]:
                yield f"{before} must be before {after}, and in the graph it is not"
            if before not in wanted[after] and before in any_of[after]:
                yield f"{before} is before {after} in the graph, and nothing asks for it"
    for hazard in graph.dependencies:
        if {hazard.before, hazard.after} <= set(ops) and hazard.before not in all_of[hazard.after]:
            yield f"{hazard.after} may start before {hazard.before} has ended: {hazard.hazard.value}"


def _happens_before(schedule: Schedule) -> Mapping[str, frozenset[str]]:
    """By op, all ops that come before it by stream order and waits."""
    before: dict[str, frozenset[str]] = {FORK: frozenset()}
    last: dict[int, frozenset[str]] = {}
    for launch in schedule.launches:
        sources = (before[wait] | {wait} for wait in launch.waits)
        before[launch.op] = last.get(launch.stream, frozenset()).union(*sources) - {FORK}
        last[launch.stream] = before[launch.op] | {launch.op}
    return before


def _reached(
    captured: Captured, ops: Sequence[str]
) -> tuple[Mapping[str, frozenset[str]], Mapping[str, frozenset[str]]]:
    """By op, the ops with all nodes before all of its nodes, and those with any node before any of its nodes.

    Sets of nodes are integers, since there are thousands.
    """
    digraph: nx.DiGraph[int] = nx.DiGraph(list(captured.edges))
    digraph.add_nodes_from(node for op in ops for node in captured.nodes[op])
    bit = {node: 1 << at for at, node in enumerate(nx.topological_sort(digraph))}
    past: dict[int, int] = {}
    for node in bit:
        past[node] = 0
        for source in digraph.predecessors(node):
            past[node] |= past[source] | bit[source]
    bits = {op: sum(bit[node] for node in captured.nodes[op]) for op in ops}
    all_of, any_of = {}, {}
    for op in ops:
        common, total = -1, 0
        for node in captured.nodes[op]:
            common, total = common & past[node], total | past[node]
        all_of[op] = frozenset(other for other in ops if bits[other] & common == bits[other])
        any_of[op] = frozenset(other for other in ops if other != op and bits[other] & total)
    return all_of, any_of


# From the driver


@torch.no_grad()
def captured(planned: Planned, schedule: Schedule, arguments: Sequence[Tensor]) -> Captured:
    """Capture a schedule as for replays, and read the graph's nodes and edges.

    Args:
        planned: the scheduled program, on a GPU.
        schedule: of any number of streams.
        arguments: of the program.
    """
    device, lowered = planned.program.device, planned.lowered(schedule)
    stream = capture_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    run = planned.run(lowered, schedule.streams)
    with torch.cuda.stream(stream):
        run_first(lambda: run(*arguments), stream)
    recorder = _Recorder(lowered, planned.graph.ops, stream.cuda_stream)

    def once() -> object:
        with restored(device), without_autocast(planned.program.level):
            return recorder.run(*arguments, enable_io_processing=False)

    graph, _outputs = capture(once, stream, keep_nodes=True)
    return Captured(recorder.nodes, edges_of(graph.raw_cuda_graph()))


class _Recorder(fx.Interpreter):
    """Runs a lowered graph in a capture, and records which nodes are new after each op."""

    def __init__(self, lowered: fx.GraphModule, ops: Collection[str], stream: int) -> None:
        super().__init__(lowered)
        self.nodes: dict[str, frozenset[int]] = {}
        self._ops, self._stream = ops, stream
        self._known: frozenset[int] = frozenset()

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.name in self._ops:
            nodes = nodes_of(graph_in_capture(self._stream))
            self.nodes[n.name], self._known = nodes - self._known, nodes
        return result


def graph_in_capture(stream: int) -> int:
    """The graph that a capturing stream is captured into."""
    driver = _driver()
    _status, _id, graph, *_ = returned(driver.cuStreamGetCaptureInfo(driver.CUstream(stream)))
    assert int(graph), "the stream is in no capture"
    return int(graph)


def nodes_of(graph: int) -> frozenset[int]:
    """All nodes of a graph: kernels, copies, and others."""
    driver = _driver()
    raw = driver.CUgraph(graph)
    _, count = returned(driver.cuGraphGetNodes(raw))
    nodes, _ = returned(driver.cuGraphGetNodes(raw, count))
    return frozenset(map(int, nodes))


def edges_of(graph: int) -> frozenset[Edge]:
    """All edges of a graph."""
    driver = _driver()
    raw = driver.CUgraph(graph)
    *_, count = returned(driver.cuGraphGetEdges(raw))
    sources, targets, *_ = returned(driver.cuGraphGetEdges(raw, count))
    return frozenset(zip(map(int, sources), map(int, targets), strict=True))


def _driver() -> Any:
    from cuda.bindings import driver  # type: ignore[import-not-found, unused-ignore]

    return driver
