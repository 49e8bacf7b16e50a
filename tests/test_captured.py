"""Captured graphs held against schedules: on drawn ones, and with a driver of ours in the place of CUDA's."""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import combinations
from random import Random
from typing import Any

import networkx as nx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from autostream.costs import occupancy
from autostream.ir import FORK, Dependency, Hazard, Launch, OpGraph, Schedule
from tests import captured as module
from tests.captured import Captured, Edge, disagreements, edges_of, graph_in_capture, nodes_of
from tests.planned import planned
from tests.runtime.programs import random_schedule, sample, schedule_of

HALVES = schedule_of(
    [Launch("a", 0), Launch("b", 1, (FORK,)), Launch("c", 1), Launch("d", 0, ("c",))],
)
"""
stream 0:  a ───────▶ d
stream 1:  b ─▶ c ────┘
"""

NO_HAZARDS = OpGraph({}, (), {}, (), "cuda:0")


def drawn(nodes: Mapping[str, Collection[int]], *edges: Edge) -> Captured:
    return Captured({op: frozenset(own) for op, own in nodes.items()}, frozenset(edges))


def test_a_graph_with_the_edges_of_its_schedule() -> None:
    """
    a: 1 ─▶ 2 ─────▶ 5 : d
    b: 3 ─▶ 4 : c ───┘
    """
    graph = drawn({"a": {1, 2}, "b": {3}, "c": {4}, "d": {5}}, (1, 2), (2, 5), (3, 4), (4, 5))
    assert disagreements(NO_HAZARDS, HALVES, graph) == []


def test_an_edge_that_is_missing_and_one_that_is_too_much() -> None:
    nodes = {"a": {1, 2}, "b": {3}, "c": {4}, "d": {5}}
    assert disagreements(NO_HAZARDS, HALVES, drawn(nodes, (1, 2), (2, 5), (3, 4))) == [
        "b must be before d, and in the graph it is not",
        "c must be before d, and in the graph it is not",
    ]
    assert disagreements(NO_HAZARDS, HALVES, drawn(nodes, (1, 2), (2, 5), (3, 4), (4, 5), (1, 4))) == [
        "a is before c in the graph, and nothing asks for it"
    ]


def test_all_nodes_of_an_op_come_before_all_of_the_next() -> None:
    """The second node of ``a`` is not awaited, only the first one is."""
    graph = drawn({"a": {1, 2}, "b": {3}, "c": {4}, "d": {5}}, (1, 2), (1, 5), (3, 4), (4, 5))
    assert disagreements(NO_HAZARDS, HALVES, graph) == ["a must be before d, and in the graph it is not"]


def test_an_op_without_nodes_is_passed_over() -> None:
    """
    a: 1 ─────▶ 5 : d        c launches nothing
    b: 3 ───────┘
    """
    graph = drawn({"a": {1}, "b": {3}, "c": (), "d": {5}}, (1, 5), (3, 5))
    assert disagreements(NO_HAZARDS, HALVES, graph) == []


def test_hazards_are_held_against_the_graph_itself() -> None:
    """A schedule that forgets one is no excuse."""
    hazards = (Dependency("a", "c", Hazard.RAW, "a"), Dependency("b", "c", Hazard.WAR, "x"))
    graph = replace(NO_HAZARDS, dependencies=hazards)
    found = drawn({"a": {1}, "b": {3}, "c": {4}, "d": {5}}, (1, 5), (3, 4), (4, 5))
    assert disagreements(graph, HALVES, found) == ["c may start before a has ended: read after write"]


@given(st.integers(0, 10**6))
def test_random_schedules_and_what_a_capture_makes_of_them(seed: int) -> None:
    """Each op becomes up to three nodes in a row; whoever waits, waits for the last one. An edge more or less shows.

    Less: one that does not follow from others, between ops. More: one between ops that were in no order.
    """
    graph, choose = sample("towers").graph, Random(seed)
    schedule = random_schedule(graph, streams=3, seed=seed)
    right = _as_captured(schedule, choose)
    assert disagreements(graph, schedule, right) == []

    order: nx.DiGraph[int] = nx.DiGraph(list(right.edges))
    needed = [edge for edge in nx.transitive_reduction(order).edges if not _is_inner(right, edge)]
    less = replace(right, edges=right.edges - {choose.choice(needed)})
    assert any("in the graph it is not" in told for told in disagreements(graph, schedule, less))

    ordered = nx.transitive_closure_dag(order)
    free = [pair for pair in combinations(sorted(order), 2) if not ordered.has_edge(*pair)]
    if free:
        more = replace(right, edges=right.edges | {choose.choice(free)})
        assert any("nothing asks for it" in told for told in disagreements(graph, schedule, more))


def _as_captured(schedule: Schedule, choose: Random) -> Captured:
    nodes: dict[str, tuple[int, ...]] = {}
    edges, last, count = set[Edge](), dict[int, int](), 0
    for launch in schedule.launches:
        nodes[launch.op] = tuple(range(count, count := count + choose.randint(1, 3)))
        before = [last.get(launch.stream), *(nodes[wait][-1] for wait in launch.waits if wait != FORK)]
        edges |= {(source, nodes[launch.op][0]) for source in before if source is not None}
        edges |= set(zip(nodes[launch.op], nodes[launch.op][1:], strict=False))
        last[launch.stream] = nodes[launch.op][-1]
    return Captured({op: frozenset(own) for op, own in nodes.items()}, frozenset(edges))


def _is_inner(graph: Captured, edge: Edge) -> bool:
    return any(set(edge) <= own for own in graph.nodes.values())


# The driver


class Driver:
    """Answers as CUDA's driver does, through pointers: a graph with handle 77, of three nodes in a row."""

    nodes, edges = (10, 20, 30), ((10, 20), (20, 30))

    def cuStreamGetCaptureInfo_v3(self, stream: Any, status: Any, _id: Any, graph: Any, *rest: Any) -> int:  # noqa: N802
        status._obj.value, graph._obj.value = 1, 77 if stream.value == 5 else None
        return 0

    def cuGraphGetNodes(self, graph: Any, nodes: Any, count: Any) -> int:  # noqa: N802
        count._obj.value = len(self.nodes)
        if nodes is not None:
            nodes[:] = [ctypes.c_void_p(node) for node in self.nodes]
        return int(graph.value != 77)

    def cuGraphGetEdges_v2(self, graph: Any, sources: Any, targets: Any, data: Any, count: Any) -> int:  # noqa: N802
        count._obj.value = len(self.edges)
        if sources is not None:
            assert ctypes.sizeof(data) == 8 * len(self.edges)
            for at, (source, target) in enumerate(self.edges):
                sources[at], targets[at] = ctypes.c_void_p(source), ctypes.c_void_p(target)
        return int(graph.value != 77)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(occupancy, "_driver", Driver)


@pytest.mark.usefixtures("driver")
def test_nodes_and_edges_are_read() -> None:
    assert graph_in_capture(5) == 77
    assert nodes_of(77) == {10, 20, 30}
    assert edges_of(77) == {(10, 20), (20, 30)}
    with pytest.raises(AssertionError, match="in no capture"):
        graph_in_capture(6)
    with pytest.raises(occupancy._Refused):
        edges_of(78)


def test_nodes_belong_to_the_op_after_which_they_are_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """An op that launches nothing, and one that launches two kernels."""
    model = planned(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Tanh()), [(torch.ones(1, 2),)])
    lowered = model.lowered(model.schedule("sequential", 1, captured=True))
    answers = iter([frozenset({1}), frozenset({1}), frozenset({1, 2, 3})])
    monkeypatch.setattr(module, "graph_in_capture", lambda stream: stream)
    monkeypatch.setattr(module, "nodes_of", lambda graph: next(answers))
    noting = module._Noting(lowered, model.graph.ops, 5)
    with torch.no_grad():
        noting.run(*model.arguments[0])
    assert list(noting.nodes.values()) == [{1}, set(), {2, 3}]


def test_without_a_driver_there_is_nothing_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(occupancy, "_driver", lambda: None)
    with pytest.raises(AssertionError, match="no CUDA driver"):
        nodes_of(77)
