"""Schedules have the fewest waits, and none that orders more than the graph does."""

from __future__ import annotations

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autostream.errors import ScheduleError
from autostream.ir import FORK, JOIN, Assignment, Decision, OpGraph, Schedule
from autostream.scheduling.synchronize import synchronize
from tests.scheduling.brute_force import (
    assignments,
    closure,
    conflict_graphs,
    happens_before,
    required_edges,
    stream_edges,
    wait_edges,
)
from tests.scheduling.graphs import graph_of, random_graphs


def test_the_rest_of_the_assignment_is_unchanged() -> None:
    why = (Decision("", "2 streams", "because"),)
    schedule = synchronize(graph_of("a-b"), Assignment("mine", 2, ("a", "b"), {"a": 1, "b": 0}, why))
    assert (schedule.policy, schedule.streams, schedule.decisions) == ("mine", 2, why)
    assert [(launch.op, launch.stream) for launch in schedule.launches] == [("a", 1), ("b", 0)]
    assert synchronize(graph_of(""), Assignment("drawn", 3, (), {})) == Schedule("drawn", 3, ())


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ("ba", r"'b' is launched before 'a'.*read after write of 'a'.*topological"),
        ("a", "launches 'b' 0 times, and it is an op"),
        ("aba", "launches 'a' 2 times, and it is an op"),
        ("abz", "launches 'z' 1 times, and it is no op"),
    ],
)
def test_an_order_holds_every_op_once_after_those_it_depends_on(order: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        synchronize(graph_of("a-b"), Assignment("mine", 1, tuple(order), dict.fromkeys(order, 0)))


@given(st.data())
@settings(max_examples=60)
def test_waits_are_the_cross_stream_edges_of_the_transitive_reduction(data: st.DataObject) -> None:
    graph: OpGraph = data.draw(st.one_of(random_graphs(max_ops=14), conflict_graphs(max_ops=14)))
    schedule = synchronize(graph, data.draw(assignments(graph, max_streams=5)))
    edges = stream_edges(schedule.launches) | required_edges(graph)
    stream = {FORK: 0, JOIN: 0, **schedule.stream_of}
    reduced = nx.transitive_reduction(nx.DiGraph(list(edges))).edges
    assert wait_edges(schedule) == {(u, v) for u, v in reduced if stream[u] != stream[v]}
    assert schedule.wait_count == len(wait_edges(schedule))
    assert happens_before(schedule) == closure(edges)
