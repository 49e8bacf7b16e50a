"""Releases: as early as the allocating stream has seen the last access, and not before."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autostream.ir import FORK, Arena, Launch, OpGraph, Role, Schedule
from autostream.scheduling.releases import place_releases
from autostream.scheduling.synchronize import synchronize
from tests.scheduling.brute_force import assignments, conflict_graphs, is_releasable, is_safe_release, schedules
from tests.scheduling.graphs import graph_of, op


def releases(graph: OpGraph, *launches: Launch, streams: int = 3) -> dict[str, tuple[str, ...]]:
    """The releases that there are, by op behind which they stand."""
    placed = place_releases(graph, Schedule("drawn", streams, launches))
    return {launch.op: launch.releases for launch in placed.launches if launch.releases}


class TestDrawn:
    def test_an_empty_schedule_stays_empty(self) -> None:
        assert place_releases(graph_of(""), Schedule("drawn", 1, ())) == Schedule("drawn", 1, ())

    def test_on_one_stream_storages_die_at_their_last_reader(self) -> None:
        """
        0:  a ─▶ b ─▶ c            the output c stays
             ╲───────╱
        """
        graph = graph_of("a-b b-c a-c", outputs="c")
        assert releases(graph, Launch("a", 0), Launch("b", 0), Launch("c", 0)) == {"c": ("a", "b")}

    def test_a_storage_that_nobody_reads_dies_at_birth(self) -> None:
        assert releases(graph_of("", names="ab"), Launch("a", 0), Launch("b", 0)) == {"a": ("a",), "b": ("b",)}

    def test_a_foreign_reader_counts_when_the_home_stream_has_waited_for_it(self) -> None:
        """
        0:  a ──── b ─▶ d ── e     b launched after c does not wait for it, d does
             ╲         ╱
        1:    c ──────╯
        """
        graph = graph_of("a-b a-c b-d c-d", names="abcde", outputs="e")
        launches = (Launch("a", 0), Launch("c", 1, ("a",)), Launch("b", 0), Launch("d", 0, ("c",)), Launch("e", 0))
        assert releases(graph, *launches) == {"d": ("a", "b", "d")}

    def test_a_storage_whose_home_stream_never_hears_of_the_reader_is_kept(self) -> None:
        """
        0:  a ────── c             c reads nothing of b
             ╲
        1:    b
        """
        graph = graph_of("a-b", names="abc", outputs="c")
        assert releases(graph, Launch("a", 0), Launch("b", 1, ("a",)), Launch("c", 0)) == {"b": ("b",)}

    def test_a_home_stream_may_hear_of_the_reader_through_another_stream(self) -> None:
        """
        0:  a ─────────▶ d         d waits for c alone
             ╲          ╱
        1:    b        ╱
               ╲      ╱
        2:      c ───╯
        """
        graph = graph_of("a-b b-c c-d", outputs="d")
        launches = (Launch("a", 0), Launch("b", 1, ("a",)), Launch("c", 2, ("b",)), Launch("d", 0, ("c",)))
        assert releases(graph, *launches) == {"d": ("a",)}

    def test_the_last_of_several_readers_decides(self) -> None:
        """
        0:  a ── d ── e            d waits for b, e for c; both read a
            │╲  ╱    ╱
        1:  │ b     ╱
        2:  ╰── c ─╯
        """
        graph = graph_of("a-b a-c b-d c-e", names="abcde", outputs="bcde")
        launches = (
            *(Launch("a", 0), Launch("b", 1, ("a",)), Launch("c", 2, ("a",))),
            *(Launch("d", 0, ("b",)), Launch("e", 0, ("c",))),
        )
        assert releases(graph, *launches) == {"e": ("a",)}

    def test_a_write_is_an_access_too(self) -> None:
        """
        0:  a ── b ── c
                 ╰ writes a, in place
        """
        graph = graph_of("", names="abc", outputs="bc")
        graph = replace(graph, ops={**graph.ops, "b": op("b", writes=frozenset({"a", "b"}))})
        assert releases(graph, *(Launch(name, 0) for name in "abc")) == {"b": ("a",)}

    def test_the_order_of_launches_counts_and_not_that_of_the_program(self) -> None:
        graph = graph_of("a-b a-c", outputs="bc")
        assert releases(graph, Launch("a", 0), Launch("c", 0), Launch("b", 0)) == {"b": ("a",)}

    @pytest.mark.parametrize("role", [role for role in Role if role is not Role.INTERMEDIATE])
    def test_what_the_caller_owns_is_left_alone(self, role: Role) -> None:
        graph = graph_of("", names="a")
        graph = replace(graph, storages={"a": replace(graph.storages["a"], role=role)})
        assert releases(graph, Launch("a", 0)) == {}

    def test_a_storage_without_an_allocator_is_left_alone(self) -> None:
        graph = graph_of("", names="a")
        graph = replace(graph, ops={"a": op("a", allocates=frozenset())})
        assert releases(graph, Launch("a", 0)) == {}

    def test_what_lies_in_the_arena_is_left_alone(self) -> None:
        """It has no block of its own."""
        schedule = Schedule("drawn", 1, (Launch("a", 0), Launch("b", 0)), arena=Arena(1024, {"a": 0}))
        assert [launch.releases for launch in place_releases(graph_of("a-b"), schedule).launches] == [(), ("b",)]

    def test_everything_else_is_passed_on_and_older_releases_are_replaced(self) -> None:
        before = Schedule("mine", 2, (Launch("a", 1, (FORK,)), Launch("b", 0, ("a",), releases=("a",))), ("a",))
        after = place_releases(graph_of("a-b", outputs="ab"), before)
        assert after == replace(before, launches=(before.launches[0], replace(before.launches[1], releases=())))


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_every_storage_is_released_at_the_first_safe_launch(data: st.DataObject) -> None:
    graph = data.draw(conflict_graphs())
    planned = data.draw(assignments(graph).map(lambda drawn: synchronize(graph, drawn)) | schedules(graph))
    schedule = place_releases(graph, planned)
    positions = range(len(schedule.launches))
    allocated = frozenset[str]().union(*(op.allocates for op in graph.ops.values()))
    for at in positions:
        assert schedule.launches[at].releases == tuple(
            name
            for name, storage in graph.storages.items()
            if is_releasable(storage)
            and name in allocated
            and at == next((p for p in positions if is_safe_release(graph, schedule, name, p)), None)
        )
