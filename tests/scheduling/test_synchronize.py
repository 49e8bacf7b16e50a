"""Waits: the fewest, and never one that orders more than was asked for."""

from __future__ import annotations

from itertools import combinations

import networkx as nx
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autostream.errors import ScheduleError
from autostream.ir import FORK, JOIN, Assignment, Decision, OpGraph, Schedule
from autostream.scheduling.synchronize import synchronize
from tests.scheduling.brute_force import (
    Pair,
    assignments,
    closure,
    conflict_graphs,
    happens_before,
    required_edges,
    stream_edges,
    wait_edges,
)
from tests.scheduling.graphs import graph_of, random_graphs


def planned(edges: str, streams: str, names: str = "") -> Schedule:
    """Schedule ``edges`` with ``streams`` such as ``"ab cd"``, one word each, launched in alphabetical order."""
    graph = graph_of(edges, names)
    stream = {op: at for at, ops in enumerate(streams.split()) for op in ops}
    return synchronize(graph, Assignment("drawn", len(streams.split()), tuple(sorted(graph.ops)), stream))


def waits(schedule: Schedule) -> dict[str, tuple[str, ...]]:
    """The waits that there are, by op."""
    return {launch.op: launch.waits for launch in schedule.launches if launch.waits}


class TestDrawn:
    def test_an_empty_graph_has_no_waits(self) -> None:
        schedule = synchronize(graph_of(""), Assignment("drawn", 3, (), {}))
        assert schedule == Schedule("drawn", 3, ())

    def test_one_stream_needs_none(self) -> None:
        """
        0:  a ─▶ b ─▶ c
             ╲───────╱
        """
        assert planned("a-b b-c a-c", "abc").wait_count == 0

    def test_a_diamond_needs_one_wait_out_and_one_back(self) -> None:
        """
        0:  a ─▶ b ─▶ d
             ╲       ╱
        1:    ──▶ c
        """
        schedule = planned("a-b a-c b-d c-d", "abd c")
        assert waits(schedule) == {"c": ("a",), "d": ("c",)}
        assert schedule.join_waits == ()

    def test_an_independent_side_stream_is_forked_and_joined_once(self) -> None:
        """
        0:  a
        1:  b ─▶ c
        """
        schedule = planned("b-c", "a bc", names="abc")
        assert waits(schedule) == {"b": (FORK,)}
        assert schedule.join_waits == ("c",)

    def test_waiting_for_a_forked_stream_is_as_good_as_forking(self) -> None:
        """
        0:
        1:  a
             ╲
        2:    ▶ b          a waits for the fork, so b needs not
        """
        schedule = planned("a-b", "_ a b")
        assert waits(schedule) == {"a": (FORK,), "b": ("a",)}
        assert schedule.join_waits == ("b",)

    def test_later_launches_of_a_stream_stand_for_earlier_ones(self) -> None:
        """
        0:  a ─▶ b
             ╲    ╲
        1:    ─────▶ c     b comes after a: one wait
        """
        assert waits(planned("a-b a-c b-c", "ab c")) == {"c": ("b",)}

    def test_what_a_stream_has_waited_for_it_has_seen(self) -> None:
        """
        0:  a
             ╲ ╲
        1:    b  c         c follows b, which waited for a
        """
        schedule = planned("a-b a-c", "a bc")
        assert waits(schedule) == {"b": ("a",)}
        assert schedule.join_waits == ("c",)

    def test_a_wait_implied_by_another_of_the_same_op_is_left_out(self) -> None:
        """
        0:  a
             ╲
        1:    b
               ╲
        2:      c          a ─▶ c goes through b
        """
        assert waits(planned("a-b b-c a-c", "a b c")) == {"b": ("a",), "c": ("b",)}

    def test_waits_for_several_streams_are_in_launch_order(self) -> None:
        """
        0:  a ──╮
        1:  b ──┼─▶ d on stream 3
        2:  c ──╯
        """
        schedule = planned("c-d b-d a-d", "a b c d", names="abcd")
        assert waits(schedule) == {"b": (FORK,), "c": (FORK,), "d": ("a", "b", "c")}
        assert schedule.join_waits == ("d",)

    def test_everything_else_is_passed_on(self) -> None:
        why = (Decision("", "2 streams", "because"),)
        schedule = synchronize(graph_of("a-b"), Assignment("mine", 2, ("a", "b"), {"a": 1, "b": 0}, why))
        assert (schedule.policy, schedule.streams, schedule.decisions) == ("mine", 2, why)
        assert [(launch.op, launch.stream) for launch in schedule.launches] == [("a", 1), ("b", 0)]


class TestRefused:
    def test_an_order_against_a_dependency_names_both_ops(self) -> None:
        with pytest.raises(ScheduleError, match=r"'b' is launched before 'a'.*read after write of 'a'.*topological"):
            synchronize(graph_of("a-b"), Assignment("mine", 1, ("b", "a"), {"a": 0, "b": 0}))

    @pytest.mark.parametrize(
        ("order", "message"),
        [
            ("a", "launches 'b' 0 times, and it is an op"),
            ("aba", "launches 'a' 2 times, and it is an op"),
            ("abz", "launches 'z' 1 times, and it is no op"),
        ],
    )
    def test_an_order_holds_every_op_once(self, order: str, message: str) -> None:
        with pytest.raises(ScheduleError, match=message):
            synchronize(graph_of("a-b"), Assignment("mine", 1, tuple(order), dict.fromkeys(order, 0)))


def in_order(points: list[str], edges: set[Pair]) -> dict[str, set[str]]:
    """All that comes before each point; a plain closure, quick enough to be called for every subset of waits."""
    before: dict[str, set[str]] = {}
    for point in points:
        direct = {u for u, v in edges if v == point}
        before[point] = direct.union(*(before[u] for u in direct))
    return before


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_no_smaller_set_of_waits_orders_the_same(data: st.DataObject) -> None:
    graph = data.draw(conflict_graphs(max_ops=6))
    schedule = synchronize(graph, data.draw(assignments(graph)))
    stream = {FORK: 0, JOIN: 0, **schedule.stream_of}
    points = [FORK, *(launch.op for launch in schedule.launches), JOIN]
    given_order = stream_edges(schedule.launches)
    wanted = in_order(points, given_order | required_edges(graph))
    assert in_order(points, given_order | wait_edges(schedule)) == wanted

    # A set with fewer waits could be filled up with others that are wanted, so one size is enough.
    possible = [(u, v) for v in points for u in wanted[v] if stream[u] != stream[v]]
    assume(schedule.wait_count > 0 and len(possible) <= 16)
    for fewer in combinations(possible, schedule.wait_count - 1):
        assert in_order(points, given_order | set(fewer)) != wanted


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_waits_are_the_cross_stream_edges_of_the_transitive_reduction(data: st.DataObject) -> None:
    graph: OpGraph = data.draw(st.one_of(random_graphs(max_ops=14), conflict_graphs(max_ops=14)))
    schedule = synchronize(graph, data.draw(assignments(graph, max_streams=5)))
    edges = stream_edges(schedule.launches) | required_edges(graph)
    stream = {FORK: 0, JOIN: 0, **schedule.stream_of}
    reduced = nx.transitive_reduction(nx.DiGraph(list(edges))).edges
    assert wait_edges(schedule) == {(u, v) for u, v in reduced if stream[u] != stream[v]}
    assert schedule.wait_count == len(wait_edges(schedule))
    assert happens_before(schedule) == closure(edges)
