"""Captured graphs are compared with schedules: graphs written by hand, and those of a fake driver."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import combinations
from random import Random

import networkx as nx
from hypothesis import given, settings
from hypothesis import strategies as st

from autostream.ir import FORK, Dependency, Hazard, Launch, OpGraph, Schedule
from tests.captured import Captured, Edge, disagreements
from tests.runtime.programs import random_schedule, sample, schedule_of

HALVES = schedule_of(
    [Launch("a", 0), Launch("b", 1, (FORK,)), Launch("c", 1), Launch("d", 0, ("c",))],
)
"""
stream 0:  a ───────▶ d
stream 1:  b ─▶ c ────┘
"""

NO_HAZARDS = OpGraph({}, (), {}, (), "cuda:0")


NODES: Mapping[str, Collection[int]] = {"a": {1, 2}, "b": {3}, "c": {4}, "d": {5}}


def test_hazards_are_compared_with_the_graph_itself() -> None:
    """Also one that the schedule does not order."""
    hazards = (Dependency("a", "c", Hazard.RAW, "a"), Dependency("b", "c", Hazard.WAR, "x"))
    graph = Captured({op: frozenset(each) for op, each in NODES.items()}, frozenset([(1, 2), (2, 5), (3, 4), (4, 5)]))
    assert disagreements(replace(NO_HAZARDS, dependencies=hazards), HALVES, graph) == [
        "c may start before a has ended: read after write"
    ]


@settings(max_examples=30)
@given(st.integers(0, 10**6))
def test_graphs_of_random_schedules_with_an_edge_more_or_less(seed: int) -> None:
    """Each op has up to three nodes in a row; a wait is for the last one.

    Less: an edge between ops that does not follow from others. More: an edge between unordered ops.
    """
    graph, choose = sample("towers").graph, Random(seed)
    schedule = random_schedule(graph, streams=3, seed=seed)
    right = _as_captured(schedule, choose)
    assert disagreements(graph, schedule, right) == []

    order: nx.DiGraph[int] = nx.DiGraph(list(right.edges))
    needed = [edge for edge in nx.transitive_reduction(order).edges if not _is_inner(right, edge)]
    less = replace(right, edges=right.edges - {choose.choice(needed)})
    assert any("in the graph it is not" in line for line in disagreements(graph, schedule, less))

    ordered = nx.transitive_closure_dag(order)
    free = [pair for pair in combinations(sorted(order), 2) if not ordered.has_edge(*pair)]
    if free:
        more = replace(right, edges=right.edges | {choose.choice(free)})
        assert any("nothing asks for it" in line for line in disagreements(graph, schedule, more))


def _as_captured(schedule: Schedule, choose: Random) -> Captured:
    nodes: dict[str, tuple[int, ...]] = {}
    edges, last, count = set[Edge](), dict[int, int](), 0
    for launch in schedule.launches:
        nodes[launch.op] = tuple(range(count, count := count + choose.randint(1, 3)))
        before = [last.get(launch.stream), *(nodes[wait][-1] for wait in launch.waits if wait != FORK)]
        edges |= {(source, nodes[launch.op][0]) for source in before if source is not None}
        edges |= set(zip(nodes[launch.op], nodes[launch.op][1:], strict=False))
        last[launch.stream] = nodes[launch.op][-1]
    return Captured({op: frozenset(each) for op, each in nodes.items()}, frozenset(edges))


def _is_inner(graph: Captured, edge: Edge) -> bool:
    return any(set(edge) <= nodes for nodes in graph.nodes.values())
