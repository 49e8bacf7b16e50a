"""List scheduling on drawn graphs worked out by hand, and its bounds on random ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autostream.ir import Assignment, Costs, Decision, OpGraph
from autostream.scheduling.policies.critical_path import critical_path
from autostream.scheduling.simulate import simulate
from autostream.scheduling.structure import width
from autostream.scheduling.synchronize import synchronize
from tests.scheduling.graphs import (
    FREE,
    costs_of,
    critical_path_us,
    graph_of,
    profile_with,
    random_costs,
    random_graphs,
)

PRICED = profile_with(same_stream_edge_us=1.0, cross_stream_edge_us=2.0, fork_us=1.0, join_us=1.0)
NONE: frozenset[str] = frozenset()


def makespan_us(graph: OpGraph, costs: Costs, assignment: Assignment, profile: object = FREE) -> float:
    return simulate(synchronize(graph, assignment), costs, profile).makespan_us  # type: ignore[arg-type]


def test_a_branch_goes_to_a_second_stream() -> None:
    r"""All ops take 10 µs: b starts at 11 and d at 12, on stream 0 only after b, at 22; then c at 22, e at 33.

    a ─ b ─ c ─ e
     └─── d ────┘
    """
    graph = graph_of("a-b a-d b-c c-e d-e")
    costs = costs_of(graph, 10.0)
    assignment = critical_path(graph, costs, PRICED, 4, NONE)
    assert assignment.stream == {"a": 0, "b": 0, "d": 1, "c": 0, "e": 0}
    assert assignment.order == ("a", "b", "d", "c", "e")
    assert assignment.streams == 2
    assert makespan_us(graph, costs, assignment, PRICED) == 43.0
    assert assignment.decisions == (
        Decision("", "2 streams", "some ops start earlier on another by more than the edges cost"),
        Decision("d", "stream 1", "starts 10.0 µs earlier than on stream 0"),
    )


@pytest.mark.parametrize(
    ("cross_us", "join_us", "streams"),
    [
        pytest.param(2.0, 0.0, 2, id="2 µs earlier for an edge back of 1 µs"),
        pytest.param(2.0, 1.0, 1, id="the join costs the rest"),
        pytest.param(2.5, 0.0, 1, id="1.5 µs earlier for an edge back of 1.5 µs"),
    ],
)
def test_one_more_stream_is_used_only_for_a_gain(cross_us: float, join_us: float, streams: int) -> None:
    """First a(10), then b(2) and c(2): on stream 0 c starts at 14, on stream 1 at 10 + cross_us."""
    graph = graph_of("a-b a-c b-d c-d")
    profile = profile_with(same_stream_edge_us=1.0, cross_stream_edge_us=cross_us, join_us=join_us)
    assignment = critical_path(graph, costs_of(graph, {"a": 10.0, **dict.fromkeys("bcd", 2.0)}), profile, 4, NONE)
    assert assignment.streams == streams
    assert assignment.stream["c"] == streams - 1


def test_the_fork_and_the_edge_from_another_stream_count() -> None:
    """Bringing in stream 1 takes 10 µs. On stream 0, a(10) ends at 10; so does b(9) on stream 1, but c starts at 12."""
    graph = graph_of("", names="ab")
    slow_fork = profile_with(fork_us=10.0)
    assert critical_path(graph, costs_of(graph, 10.0), slow_fork, 4, NONE).stream == {"a": 0, "b": 0}
    assert critical_path(graph, costs_of(graph, 10.5), slow_fork, 4, NONE).stream == {"a": 0, "b": 1}
    graph = graph_of("a-c b-c", names="ab")
    costs = costs_of(graph, {"a": 10.0, "b": 9.0, "c": 10.0})
    assignment = critical_path(graph, costs, PRICED, 2, NONE)
    assert assignment.stream == {"a": 0, "b": 1, "c": 0}
    assert makespan_us(graph, costs, assignment, PRICED) == 22.0


def test_the_longest_path_goes_first_and_then_program_order() -> None:
    """Op s(5) is first in program order, but t(1) ─ u(9) takes longer."""
    graph = graph_of("t-u", names="stu")
    costs = costs_of(graph, {"s": 5.0, "t": 1.0, "u": 9.0})
    assert critical_path(graph, costs, FREE, 1, NONE).order == ("t", "u", "s")
    equal = graph_of("", names="dbca")
    assert critical_path(equal, costs_of(equal), FREE, 2, NONE).order == ("d", "b", "c", "a")


def test_pinned_ops_wait_for_stream_0() -> None:
    """Op d follows c on stream 1, but is pinned. Op p is pinned and ready from the start, but a ─ b ─ c is critical.

    a ─ b      p
    c ─ d      a ─ b ─ c
    """
    graph = graph_of("a-b c-d")
    assignment = critical_path(graph, costs_of(graph, 10.0), FREE, 2, frozenset("d"))
    assert assignment.stream == {"a": 0, "b": 0, "c": 1, "d": 0}
    reason = "must be on the caller's stream; what it needs is on stream 1"
    assert assignment.decisions[-1] == Decision("d", "stream 0", reason)
    graph = graph_of("a-b b-c", names="pabc")
    costs = costs_of(graph, {"p": 5.0, "a": 10.0, "b": 10.0, "c": 10.0})
    assignment = critical_path(graph, costs, FREE, 2, frozenset("p"))
    assert (assignment.order, assignment.streams) == (("a", "b", "c", "p"), 1)


@given(data=st.data(), streams=st.integers(2, 3))
def test_without_edge_costs_it_keeps_grahams_bound(data: st.DataObject, streams: int) -> None:
    graph = data.draw(random_graphs())
    costs = data.draw(random_costs(graph, shares=False))
    makespan = makespan_us(graph, costs, critical_path(graph, costs, FREE, streams, NONE))
    total_us = sum(cost.duration_us for cost in costs.values())
    assert makespan <= total_us / streams + (1 - 1 / streams) * critical_path_us(graph, costs) + 1e-9
    enough = critical_path(graph, costs, FREE, len(graph.ops), NONE)
    assert makespan_us(graph, costs, enough) == critical_path_us(graph, costs)
    assert enough.streams <= width(graph)


@given(data=st.data(), streams=st.integers(2, 5))
def test_ops_are_launched_in_the_order_in_which_they_start(data: st.DataObject, streams: int) -> None:
    """As simulated, if ops do not slow each other down."""
    graph = data.draw(random_graphs())
    costs = data.draw(random_costs(graph, shares=False))
    assignment = critical_path(graph, costs, PRICED, streams, graph.pinned)
    slices = simulate(synchronize(graph, assignment), costs, PRICED).slices
    starts = [entry.start_us for entry in slices if entry.op in costs]
    assert starts == sorted(starts)
