"""Lifetimes: one storage is before another exactly when happens-before orders all of their accesses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autostream.ir import FORK, Launch, OpGraph, Role, Schedule
from autostream.scheduling.lifetimes import lifetimes
from autostream.scheduling.synchronize import synchronize
from tests.scheduling.brute_force import assignments, conflict_graphs, happens_before, in_parts, schedules
from tests.scheduling.graphs import graph_of, op


def placeable(graph: OpGraph, **fields: Any) -> OpGraph:
    """The graph with storages that may lie anywhere, and ``fields`` of :class:`Storage`."""
    storages = graph.storages.items()
    return replace(graph, storages={name: replace(storage, placeable=True, **fields) for name, storage in storages})


def orders(graph: OpGraph, *launches: Launch) -> set[str]:
    """Which storage is before which, as ``"ab"`` for a before b."""
    lives = lifetimes(graph, Schedule("drawn", 3, launches))
    return {one + other for one in lives for other in lives if lives[one].before(lives[other])}


class TestDrawn:
    def test_nothing_has_no_lifetime(self) -> None:
        assert lifetimes(graph_of(""), Schedule("drawn", 1, ())) == {}

    def test_what_an_op_reads_is_not_over_when_it_writes(self) -> None:
        """0:  a ─▶ b ─▶ c ─▶ d"""
        assert orders(placeable(graph_of("a-b b-c c-d")), *(Launch(name, 0) for name in "abcd")) == {"ac", "ad", "bd"}

    def test_it_lasts_to_the_last_reader(self) -> None:
        """
        0:  a ─▶ b ─▶ c ── d
             ╲───────╱
        """
        graph = placeable(graph_of("a-b b-c a-c", names="abcd"))
        assert orders(graph, *(Launch(name, 0) for name in "abcd")) == {"ad", "bd", "cd"}

    def test_streams_that_do_not_wait_are_never_before_each_other(self) -> None:
        """
        0:  a ─▶ b ─▶ c
        1:  d ─▶ e ─▶ f      launched later
        """
        graph = placeable(graph_of("a-b b-c d-e e-f"))
        launches = (*(Launch(name, 0) for name in "abc"), Launch("d", 1, (FORK,)), Launch("e", 1), Launch("f", 1))
        assert orders(graph, *launches) == {"ac", "df"}

    def test_a_foreign_reader_counts_when_it_was_waited_for(self) -> None:
        """
        0:  a ──── b ─▶ d          b launched after c does not wait for it, d does
             ╲         ╱
        1:    c ──────╯
        """
        graph = placeable(graph_of("a-c c-d", names="acbd"))
        launches = (Launch("a", 0), Launch("c", 1, ("a",)), Launch("b", 0), Launch("d", 0, ("c",)))
        assert orders(graph, *launches) == {"ad", "bd"}

    def test_it_may_be_waited_for_through_another_stream(self) -> None:
        """
        0:  a ─────────▶ d ── e    d waits for c alone
             ╲          ╱
        1:    b        ╱
               ╲      ╱
        2:      c ───╯
        """
        graph = placeable(graph_of("a-b b-c c-d", names="abcde"))
        launches = (Launch("a", 0), Launch("b", 1, ("a",)), Launch("c", 2, ("b",)), Launch("d", 0, ("c",)))
        assert orders(graph, *launches, Launch("e", 0)) == {"ac", "ad", "ae", "bd", "be", "ce", "de"}

    def test_every_access_of_the_later_one_counts(self) -> None:
        """
        0:  a ── b                 b writes half of a storage, when a is over
        1:  c                      c writes the other half, meanwhile
        """
        graph = placeable(graph_of("", names="abc"))
        written = {"b": op("b", writes=frozenset({"b[0]"})), "c": op("c", writes=frozenset({"b[1]"}))}
        graph = replace(
            graph,
            ops={"a": graph.ops["a"], **{name: replace(half, allocates=frozenset()) for name, half in written.items()}},
            storages={**graph.storages, "b": replace(graph.storages["b"], parts=("b[0]", "b[1]"))},
        )
        assert orders(graph, Launch("a", 0), Launch("b", 0), Launch("c", 1, (FORK,))) == set()
        assert orders(graph, Launch("a", 0), Launch("b", 0), Launch("c", 1, ("a",))) == {"ab"}

    def test_a_part_is_the_storage(self) -> None:
        """0:  a ── b ── c ── d       c reads half of a"""
        graph = placeable(graph_of("", names="abcd"))
        graph = replace(
            graph,
            ops={**graph.ops, "c": op("c", ["a[1]"])},
            storages={**graph.storages, "a": replace(graph.storages["a"], parts=("a[0]", "a[1]"))},
        )
        lives = lifetimes(graph, Schedule("drawn", 1, tuple(Launch(name, 0) for name in "abcd")))
        assert list(lives) == ["a", "b", "c", "d"]
        assert [lives["a"].before(lives[name]) for name in "bcd"] == [False, False, True]
        assert (lives["a"].first, lives["a"].last) == (0, 2)

    def test_taking_memory_is_an_access(self) -> None:
        """0:  a ── b ── c            a takes c's memory, c writes it"""
        graph = placeable(graph_of("", names="abc"))
        a, c = op("a", allocates=frozenset("ac")), op("c", allocates=frozenset())
        graph = replace(graph, ops={**graph.ops, "a": a, "c": c})
        assert orders(graph, *(Launch(name, 0) for name in "abc")) == {"ab"}


class TestWhatIsPlaced:
    @pytest.mark.parametrize("role", [role for role in Role if role is not Role.INTERMEDIATE])
    def test_nothing_of_the_caller_s(self, role: Role) -> None:
        assert orders(placeable(graph_of("", names="ab"), role=role), Launch("a", 0), Launch("b", 0)) == set()

    @pytest.mark.parametrize("fields", [{"escapes": True}, {"bytes": 0}])
    def test_nothing_that_an_output_keeps_and_nothing_empty(self, fields: dict[str, Any]) -> None:
        assert orders(placeable(graph_of("", names="ab"), **fields), Launch("a", 0), Launch("b", 0)) == set()

    def test_nothing_that_its_op_takes_by_itself(self) -> None:
        assert orders(graph_of("", names="ab"), Launch("a", 0), Launch("b", 0)) == set()

    def test_nothing_that_no_op_touches(self) -> None:
        graph = placeable(graph_of("", names="ab"))
        graph = replace(graph, storages={**graph.storages, "c": replace(graph.storages["a"], name="c")})
        assert orders(graph, Launch("a", 0), Launch("b", 0)) == {"ab"}


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_before_is_what_happens_before_says(data: st.DataObject) -> None:
    graph = placeable(data.draw(conflict_graphs()))
    schedule = data.draw(assignments(graph).map(lambda drawn: synchronize(graph, drawn)) | schedules(graph))
    ordered = happens_before(schedule)
    touching = {
        name: [
            launch.op
            for launch in schedule.launches
            if in_parts(graph, [name]) & in_parts(graph, graph.ops[launch.op].reads | graph.ops[launch.op].writes)
        ]
        for name, storage in graph.storages.items()
        if storage.role is Role.INTERMEDIATE and not storage.escapes
    }
    position = {launch.op: at for at, launch in enumerate(schedule.launches)}
    lives = lifetimes(graph, schedule)
    assert list(lives) == [name for name, ops in touching.items() if ops]
    for one, life in lives.items():
        assert (life.first, life.last) == (position[touching[one][0]], position[touching[one][-1]])
        for other in lives:
            all_ordered = {(a, b) for a in touching[one] for b in touching[other]} <= ordered
            assert life.before(lives[other]) == all_ordered
