"""List scheduling on drawn graphs worked out by hand, and against the optimum of tiny ones."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autostream.ir import Costs, Decision, OpGraph
from autostream.scheduling.policies import critical_path as module
from autostream.scheduling.policies.critical_path import critical_path
from autostream.scheduling.simulate import simulate
from autostream.scheduling.structure import width
from tests.scheduling.graphs import (
    costs_of,
    critical_path_us,
    graph_of,
    profile_with,
    random_costs,
    random_graphs,
    schedule_of,
)

FREE = profile_with()
PRICED = profile_with(same_stream_edge_us=1.0, cross_stream_edge_us=2.0, fork_us=1.0, join_us=1.0)
NONE: frozenset[str] = frozenset()

DIAMOND = graph_of("a-b a-d b-c c-e d-e")
r"""
a ─ b ─ c ─ e
 └─── d ────┘
"""


def optimum_us(graph: OpGraph, costs: Costs, streams: int) -> float:
    """The shortest makespan over all orders and streams where edges cost nothing, by exhaustion."""

    def best(finish: dict[str, float], free: tuple[float, ...]) -> float:
        ready = [
            name
            for name in graph.ops
            if name not in finish and all(before in finish for before in graph.digraph.predecessors(name))
        ]
        if not ready:
            return max(free)
        return min(best(*append(finish, free, name, moment)) for name in ready for moment in set(free))

    def append(
        finish: dict[str, float], free: tuple[float, ...], name: str, moment: float
    ) -> tuple[dict[str, float], tuple[float, ...]]:
        start = max([moment, *(finish[before] for before in graph.digraph.predecessors(name))])
        end = start + costs[name].duration_us
        others = list(free)
        others.remove(moment)
        return finish | {name: end}, tuple(sorted([*others, end]))

    return best({}, (0.0,) * streams)


def test_a_branch_leaves_for_a_second_stream() -> None:
    """All ops take 10 µs: b starts at 11 beside d at 12, c at 22, e at 33."""
    costs = costs_of(DIAMOND, 10.0)
    assignment = critical_path(DIAMOND, costs, PRICED, 4, NONE)
    assert assignment.stream == {"a": 0, "b": 0, "d": 1, "c": 0, "e": 0}
    assert assignment.order == ("a", "b", "d", "c", "e")
    assert assignment.streams == 2
    assert simulate(schedule_of(DIAMOND, assignment), costs, PRICED).makespan_us == 43.0


def test_decisions_tell_who_moved_and_what_it_gained() -> None:
    """On stream 0 the branch d would start after b, at 22; on stream 1 it starts at 12."""
    assignment = critical_path(DIAMOND, costs_of(DIAMOND, 10.0), PRICED, 4, NONE)
    assert assignment.decisions == (
        Decision("", "2 streams", "some ops start earlier on another by more than the edges cost"),
        Decision("d", "stream 1", "starts 10.0 µs earlier than on stream 0"),
    )


@pytest.mark.parametrize(
    ("cross_us", "join_us", "streams"),
    [
        pytest.param(2.0, 0.0, 2, id="ahead by 2 µs for an edge back of 1 µs"),
        pytest.param(2.0, 1.0, 1, id="the join eats the rest"),
        pytest.param(2.5, 0.0, 1, id="ahead by 1.5 µs for an edge back of 1.5 µs"),
    ],
)
def test_a_stream_is_opened_only_where_it_pays(cross_us: float, join_us: float, streams: int) -> None:
    """First a(10), then b(2) and c(2): on stream 0 c starts at 14, on stream 1 at 10 + cross_us."""
    graph = graph_of("a-b a-c b-d c-d")
    profile = profile_with(same_stream_edge_us=1.0, cross_stream_edge_us=cross_us, join_us=join_us)
    costs = costs_of(graph, {"a": 10.0, "b": 2.0, "c": 2.0, "d": 2.0})
    assignment = critical_path(graph, costs, profile, 4, NONE)
    assert assignment.streams == streams
    assert assignment.stream["c"] == streams - 1


def test_a_source_waits_for_the_fork_only_where_it_pays() -> None:
    """Ops a(10) and b(10) are independent; bringing in stream 1 takes longer than a."""
    graph = graph_of("", names="ab")
    slow_fork = profile_with(fork_us=10.0)
    assert critical_path(graph, costs_of(graph, 10.0), slow_fork, 4, NONE).stream == {"a": 0, "b": 0}
    assert critical_path(graph, costs_of(graph, 10.5), slow_fork, 4, NONE).stream == {"a": 0, "b": 1}


def test_a_join_counts_the_edge_from_the_other_stream() -> None:
    """On stream 0, a(10) ends at 10; so does b(9) on stream 1, but its edge is longer: c(10) runs from 12 to 22."""
    graph = graph_of("a-c b-c", names="ab")
    costs = costs_of(graph, {"a": 10.0, "b": 9.0, "c": 10.0})
    assignment = critical_path(graph, costs, PRICED, 2, NONE)
    assert assignment.stream == {"a": 0, "b": 1, "c": 0}
    assert simulate(schedule_of(graph, assignment), costs, PRICED).makespan_us == 22.0


def test_two_towers_share_nothing() -> None:
    """Each stays on a stream of its own.

    a1 ─ a2 ─ a3
    b1 ─ b2
    """
    graph = graph_of("a1-a2 a2-a3 b1-b2")
    assignment = critical_path(graph, costs_of(graph, 10.0), PRICED, 8, NONE)
    assert assignment.stream == {"a1": 0, "a2": 0, "a3": 0, "b1": 1, "b2": 1}
    assert [decision.op for decision in assignment.decisions] == ["", "b1"]


def test_an_inception_block_reaches_its_critical_path() -> None:
    """Four branches on four streams take as long as the longest.

           ┌─ p ─────────────┐
           ├─ q1 ─ q2 ───────┤
    stem ──┤                 ├─ cat
           ├─ r1 ─ r2 ─ r3 ──┤
           └─ s1 ─ s2 ───────┘
    """
    graph = graph_of("stem-p stem-q1 stem-r1 stem-s1 q1-q2 r1-r2 r2-r3 s1-s2 p-cat q2-cat r3-cat s2-cat")
    assignment = critical_path(graph, costs_of(graph, 10.0), FREE, 4, NONE)
    assert simulate(schedule_of(graph, assignment), costs_of(graph, 10.0), FREE).makespan_us == 50.0
    branches = ("p",), ("q1", "q2"), ("r1", "r2", "r3"), ("s1", "s2")
    streams = [{assignment.stream[name] for name in branch} for branch in branches]
    assert sorted(streams, key=min) == [{0}, {1}, {2}, {3}]
    assert assignment.stream["r3"] == assignment.stream["cat"] == assignment.stream["stem"] == 0


def test_a_fan_out_is_spread_evenly() -> None:
    """Root, then eight equal ops over four streams: two rounds."""
    graph = graph_of([("root", f"leaf{at}") for at in range(8)])
    assignment = critical_path(graph, costs_of(graph, 10.0), FREE, 4, NONE)
    assert simulate(schedule_of(graph, assignment), costs_of(graph, 10.0), FREE).makespan_us == 30.0


def test_what_more_hangs_on_goes_first() -> None:
    """Op s(5) is first in program order, but t(1) ─ u(9) takes longer."""
    graph = graph_of("t-u", names="stu")
    costs = costs_of(graph, {"s": 5.0, "t": 1.0, "u": 9.0})
    assert critical_path(graph, costs, FREE, 1, NONE).order == ("t", "u", "s")


def test_ties_are_broken_by_program_order() -> None:
    graph = graph_of("", names="dbca")
    assert critical_path(graph, costs_of(graph), FREE, 2, NONE).order == ("d", "b", "c", "a")


def test_pinned_ops_leave_their_chain_for_stream_0() -> None:
    """Though c runs on stream 1, d is pinned, and runs on stream 0 after b.

    a ─ b
    c ─ d
    """
    graph = graph_of("a-b c-d")
    assignment = critical_path(graph, costs_of(graph, 10.0), FREE, 2, frozenset("d"))
    assert assignment.stream == {"a": 0, "b": 0, "c": 1, "d": 0}
    assert assignment.decisions[-1] == Decision(
        "d", "stream 0", "must be on the caller's stream; what it needs is on stream 1"
    )


def test_a_pinned_op_lets_more_important_ones_of_stream_0_pass() -> None:
    """Op p is pinned and ready from the start, but a ─ b ─ c is critical and keeps stream 0."""
    graph = graph_of("a-b b-c", names="pabc")
    costs = costs_of(graph, {"p": 5.0, "a": 10.0, "b": 10.0, "c": 10.0})
    assignment = critical_path(graph, costs, FREE, 2, frozenset("p"))
    assert assignment.order == ("a", "b", "c", "p")
    assert assignment.streams == 1


@settings(max_examples=60, deadline=None)
@given(data=st.data(), streams=st.integers(2, 3))
def test_without_edge_costs_it_keeps_grahams_bound(data: st.DataObject, streams: int) -> None:
    graph = data.draw(random_graphs(max_ops=6))
    costs = data.draw(random_costs(graph, shares=False))
    assignment = critical_path(graph, costs, FREE, streams, NONE)
    makespan = simulate(schedule_of(graph, assignment), costs, FREE).makespan_us
    best = optimum_us(graph, costs, streams)
    assert best <= makespan <= (2 - 1 / streams) * best


@given(data=st.data(), streams=st.integers(2, 5))
def test_its_clock_is_that_of_the_simulator_where_nothing_slows_down(data: st.DataObject, streams: int) -> None:
    graph = data.draw(random_graphs())
    costs = data.draw(random_costs(graph, shares=False))
    assignment = critical_path(graph, costs, PRICED, streams, graph.pinned)
    slices = [entry for entry in simulate(schedule_of(graph, assignment), costs, PRICED).slices if entry.op in costs]
    starts = [entry.start_us for entry in slices]
    assert starts == sorted(starts)
    board = module._Board(PRICED, free=[0.0] + [PRICED.fork_us] * (streams - 1))
    module._fill(board, graph, costs, graph.pinned)
    finish = {name: board.finish[at] for at, name in enumerate(graph.ops)}
    assert finish == {entry.op: entry.end_us for entry in slices}


@given(st.data())
def test_it_needs_no_more_streams_than_ops_can_run_at_once(data: st.DataObject) -> None:
    graph = data.draw(random_graphs())
    assignment = critical_path(graph, data.draw(random_costs(graph)), FREE, 12, NONE)
    assert assignment.streams <= width(graph)


@given(st.data())
def test_with_free_edges_and_a_stream_for_each_op_it_is_as_short_as_the_critical_path(data: st.DataObject) -> None:
    graph = data.draw(random_graphs())
    costs = data.draw(random_costs(graph, shares=False))
    schedule = schedule_of(graph, critical_path(graph, costs, FREE, len(graph.ops), NONE))
    assert simulate(schedule, costs, FREE).makespan_us == critical_path_us(graph, costs)
