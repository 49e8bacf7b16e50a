"""The checker: it accepts what brute force accepts, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autostream.errors import ScheduleError
from autostream.ir import FORK, JOIN, Arena, Launch, Op, OpGraph, Role, Schedule, Storage
from autostream.scheduling.releases import place_releases
from autostream.scheduling.synchronize import synchronize
from autostream.scheduling.verify import ALIGNMENT, verify
from tests.scheduling.brute_force import (
    arenas,
    assignments,
    conflict_graphs,
    is_covered,
    is_placeable,
    is_releasable,
    is_safe_arena,
    is_safe_release,
    placeable,
    schedules,
)
from tests.scheduling.graphs import graph_of
from tests.scheduling.mistakes import with_a_lifetime_shortened, with_two_storages_too_close


def is_accepted(graph: OpGraph, schedule: Schedule) -> bool:
    try:
        verify(graph, schedule)
    except ScheduleError:
        return False
    return True


@st.composite
def plans(draw: st.DrawFn, max_ops: int = 7) -> tuple[OpGraph, Schedule]:
    """A graph and a right and minimal schedule of it."""
    graph = draw(conflict_graphs(max_ops))
    return graph, place_releases(graph, synchronize(graph, draw(assignments(graph))))


def with_launch(schedule: Schedule, at: int, launch: Launch) -> Schedule:
    return replace(schedule, launches=(*schedule.launches[:at], launch, *schedule.launches[at + 1 :]))


def released_at(schedule: Schedule, storage: str, at: int) -> Schedule:
    """The same schedule with one more release."""
    launch = schedule.launches[at]
    return with_launch(schedule, at, replace(launch, releases=(*launch.releases, storage)))


def without_releases(schedule: Schedule) -> Schedule:
    return replace(schedule, launches=tuple(replace(launch, releases=()) for launch in schedule.launches))


def without(names: tuple[str, ...], name: str) -> tuple[str, ...]:
    return tuple(other for other in names if other != name)


@st.composite
def crowds(draw: st.DrawFn, graph: OpGraph, schedule: Schedule) -> Schedule:
    """All that may be placed, one after the other in any order at the first safe place from a few on."""
    names = draw(st.permutations([name for name, storage in graph.storages.items() if is_placeable(storage)]))
    placed = replace(schedule, arena=Arena(64 * ALIGNMENT))
    for name in names:
        start = draw(st.integers(0, 3))
        candidates = (placed_at(placed, name, (start + units) * ALIGNMENT) for units in range(60))
        placed = next(candidate for candidate in candidates if is_safe_arena(graph, candidate))
    return placed


def placed_at(schedule: Schedule, storage: str, offset: int) -> Schedule:
    """The same schedule with one storage elsewhere."""
    return replace(schedule, arena=replace(schedule.arena, offsets={**schedule.arena.offsets, storage: offset}))


def side_by_side(graph: OpGraph) -> Arena:
    """All storages that may lie in an arena, none on the bytes of another."""
    offsets, end = {}, 0
    for name, storage in graph.storages.items():
        if is_placeable(storage):
            offsets[name] = end
            end += -(-storage.bytes // ALIGNMENT) * ALIGNMENT
    return Arena(end, offsets)


class TestAgainstBruteForce:
    @given(plans(max_ops=12))
    @settings(max_examples=200, deadline=None)
    def test_what_the_stages_plan_is_right(self, plan: tuple[OpGraph, Schedule]) -> None:
        graph, schedule = plan
        verify(graph, schedule)
        assert is_covered(graph, schedule)

    @given(st.data())
    @settings(max_examples=250, deadline=None)
    def test_any_streams_order_and_waits(self, data: st.DataObject) -> None:
        graph = data.draw(conflict_graphs())
        schedule = data.draw(schedules(graph))
        assert is_accepted(graph, schedule) == is_covered(graph, schedule)

    @given(plans())
    @settings(max_examples=200, deadline=None)
    def test_no_wait_of_a_minimal_schedule_can_be_left_out(self, plan: tuple[OpGraph, Schedule]) -> None:
        graph, schedule = plan
        for at, launch in enumerate(schedule.launches):
            for producer in launch.waits:
                fewer = with_launch(schedule, at, replace(launch, waits=without(launch.waits, producer)))
                assert not is_covered(graph, fewer)
                assert not is_accepted(graph, fewer)
        for producer in schedule.join_waits:
            fewer = replace(schedule, join_waits=without(schedule.join_waits, producer))
            assert not is_covered(graph, fewer)
            assert not is_accepted(graph, fewer)

    @given(plans())
    @settings(max_examples=200, deadline=None)
    def test_launches_that_change_places(self, plan: tuple[OpGraph, Schedule]) -> None:
        graph, schedule = plan
        schedule = without_releases(schedule)
        for at in range(len(schedule.launches) - 1):
            first, second = schedule.launches[at : at + 2]
            swapped = with_launch(with_launch(schedule, at, second), at + 1, first)
            assert is_accepted(graph, swapped) == is_covered(graph, swapped)

    @given(st.data())
    @settings(max_examples=200, deadline=None)
    def test_a_launch_that_changes_streams(self, data: st.DataObject) -> None:
        graph, schedule = data.draw(plans())
        assume(schedule.launches)
        at = data.draw(st.integers(0, len(schedule.launches) - 1))
        moved = replace(schedule.launches[at], stream=data.draw(st.integers(0, schedule.streams - 1)))
        elsewhere = without_releases(with_launch(schedule, at, moved))
        assert is_accepted(graph, elsewhere) == is_covered(graph, elsewhere)

    @given(st.data())
    @settings(max_examples=200, deadline=None)
    def test_a_release_anywhere(self, data: st.DataObject) -> None:
        """One launch earlier than planned is never safe, later ones are; with more waits, more is safe."""
        graph = data.draw(conflict_graphs())
        minimal = assignments(graph).map(lambda drawn: synchronize(graph, drawn))
        schedule = data.draw(minimal | schedules(graph).filter(lambda drawn: is_covered(graph, drawn)))
        allocated = [storage for op in graph.ops.values() for storage in op.allocates]
        for storage in allocated:
            for at in range(len(schedule.launches)):
                expected = is_releasable(graph.storages[storage]) and is_safe_release(graph, schedule, storage, at)
                assert is_accepted(graph, released_at(schedule, storage, at)) == expected

    @given(st.data())
    @settings(max_examples=250, deadline=None)
    def test_an_arena_with_anything_anywhere(self, data: st.DataObject) -> None:
        graph = data.draw(conflict_graphs().flatmap(placeable))
        right = assignments(graph).map(lambda drawn: synchronize(graph, drawn))
        schedule = data.draw(right | schedules(graph))
        assume(is_covered(graph, schedule))
        placed = replace(schedule, arena=data.draw(arenas(graph)))
        assert is_accepted(graph, placed) == is_safe_arena(graph, placed)

    @given(st.data())
    @settings(max_examples=80, deadline=None)
    def test_an_arena_as_crowded_as_can_be_and_one_storage_moved(self, data: st.DataObject) -> None:
        graph = data.draw(conflict_graphs(max_ops=9).flatmap(placeable))
        schedule = synchronize(graph, data.draw(assignments(graph)))
        crowded = data.draw(crowds(graph, schedule))
        verify(graph, crowded)
        for storage in crowded.arena.offsets:
            moved = placed_at(crowded, storage, ALIGNMENT)
            assert is_accepted(graph, moved) == is_safe_arena(graph, moved)

    @given(st.data())
    @settings(max_examples=200, deadline=None)
    def test_two_storages_anywhere(self, data: st.DataObject) -> None:
        """Each pair of places of two storages, ordered or not, side by side or not."""
        graph = data.draw(conflict_graphs().flatmap(placeable))
        schedule = synchronize(graph, data.draw(assignments(graph)))
        places = [0, ALIGNMENT, 2 * ALIGNMENT]
        for a, b in combinations([name for name, storage in graph.storages.items() if is_placeable(storage)], 2):
            for at in places:
                placed = replace(schedule, arena=Arena(8 * ALIGNMENT, {a: ALIGNMENT, b: at}))
                assert is_accepted(graph, placed) == is_safe_arena(graph, placed)

    @given(st.data())
    @settings(max_examples=200, deadline=None)
    def test_each_mistake_in_an_arena_is_found(self, data: st.DataObject) -> None:
        graph = data.draw(conflict_graphs(max_ops=9).flatmap(placeable))
        plan = synchronize(graph, data.draw(assignments(graph)))
        plan = replace(plan, arena=side_by_side(graph))
        verify(graph, plan)
        for first, second, mistaken in (
            *with_two_storages_too_close(graph, plan),
            *with_a_lifetime_shortened(graph, plan),
        ):
            with pytest.raises(ScheduleError, match="of the arena") as caught:
                verify(graph, mistaken)
            assert repr(first) in str(caught.value)
            assert repr(second) in str(caught.value)


def sourced(name: str, source: str, **fields: Any) -> Op:
    empty = frozenset[str]()
    return Op(name, "aten.relu.default", (name,), source=source, **{"reads": empty, "writes": empty, **fields})


STATE = frozenset({"state"})


class TestMessages:
    """
    0:  first
                  no wait between them
    1:  second
    """

    @pytest.mark.parametrize(
        ("first", "second", "hazard"),
        [
            ({"writes": STATE}, {"reads": STATE}, "read after write of storage 'state'"),
            ({"reads": STATE}, {"writes": STATE}, "write after read of storage 'state'"),
            ({"writes": STATE}, {"writes": STATE}, "write after write of storage 'state'"),
            ({"allocates": STATE}, {"reads": STATE}, "read after write of storage 'state'"),
            ({"orders": STATE}, {"orders": STATE}, "program order of resource 'state'"),
        ],
    )
    def test_an_uncovered_hazard(self, first: dict[str, Any], second: dict[str, Any], hazard: str) -> None:
        ops = {"first": sourced("first", "m.py:1: f()", **first), "second": sourced("second", "m.py:2: g()", **second)}
        graph = OpGraph(ops, (), {}, (), "cuda:0")
        with pytest.raises(ScheduleError) as caught:
            verify(graph, Schedule("drawn", 2, (Launch("first", 0), Launch("second", 1, (FORK,))), ("second",)))
        assert str(caught.value) == (
            f"'second' (m.py:2: g()) must come after 'first' (m.py:1: f()) ({hazard}), "
            "but no wait orders 'first' on stream 0 before 'second' on stream 1"
        )
        with pytest.raises(ScheduleError, match=r"but 'second' is launched before 'first'$"):
            verify(graph, Schedule("drawn", 1, (Launch("second", 0), Launch("first", 0))))

    def test_reads_do_not_conflict_and_names_of_storages_and_resources_do_not_meet(self) -> None:
        ops = {
            "first": sourced("first", "", reads=STATE),
            "second": sourced("second", "", reads=STATE),
            "third": sourced("third", "", orders=STATE),
        }
        launches = (Launch("third", 0), Launch("second", 1, (FORK,)), Launch("first", 0))
        verify(OpGraph(ops, (), {}, (), "cuda:0"), Schedule("drawn", 2, launches, ("second",)))


BOTH = Storage("both", Role.INTERMEDIATE, 8, ("both",), parts=("both[0]", "both[1]"))


class TestParts:
    """
    0:  stem ──▶ left ───▶ sum      stem allocates "both"; left and right write a part of it, sum reads all
            ╲             ╱
    1:       ╰─▶ right ──╯
    """

    @staticmethod
    def verify(right: tuple[str, ...], total: tuple[str, ...], released: str = "", written: str = "both[1]") -> None:
        ops = [
            sourced("stem", "", writes=frozenset({"both"}), allocates=frozenset({"both"})),
            sourced("left", "", writes=frozenset({"both[0]"})),
            sourced("right", "", writes=frozenset({written})),
            sourced("sum", "", reads=frozenset({"both"})),
        ]
        graph = OpGraph({op.name: op for op in ops}, (), {"both": BOTH}, (), "cuda:0")
        waits = {"right": right, "sum": total}
        launches = tuple(
            Launch(op.name, int(op.name == "right"), waits.get(op.name, ()), ("both",) if op.name == released else ())
            for op in ops
        )
        verify(graph, Schedule("drawn", 2, launches, () if total else ("right",)))

    def test_writers_of_different_parts_need_no_order(self) -> None:
        self.verify(("stem",), ("right",), released="sum")

    def test_writers_of_one_part_do(self) -> None:
        with pytest.raises(ScheduleError, match=r"'right' must come after 'left' \(write after write.*'both\[0\]'"):
            self.verify(("stem",), ("right",), written="both[0]")

    def test_a_reader_of_the_whole_comes_after_the_writers_of_all_parts(self) -> None:
        with pytest.raises(ScheduleError, match=r"'sum' must come after 'right' \(read after write.*'both\[1\]'"):
            self.verify(("stem",), ())

    def test_a_part_is_not_written_before_its_storage_is_allocated(self) -> None:
        with pytest.raises(ScheduleError, match=r"'right' must come after 'stem' \(write after write"):
            self.verify((FORK,), ("right",))

    @pytest.mark.parametrize("released", ["left", "right"])
    def test_a_storage_is_released_behind_the_users_of_all_parts(self, released: str) -> None:
        with pytest.raises(ScheduleError, match="'both' is released behind"):
            self.verify(("stem",), ("right",), released)


A, B, C = Launch("a", 0), Launch("b", 1, ("a",)), Launch("c", 0, ("b",))


class TestAdversarial:
    """
    0:  a ────▶ c     a ─▶ b ─▶ c; c escapes; a is released behind c
         ╲     ╱
    1:    b ──╯
    """

    graph = graph_of("a-b b-c", outputs="c")

    def verify(self, *launches: Launch, join: tuple[str, ...] = (), streams: int = 2) -> None:
        verify(self.graph, Schedule("drawn", streams, launches, join))

    def test_the_schedule_as_drawn_is_right(self) -> None:
        self.verify(A, B, replace(C, releases=("a",)))

    def test_an_empty_schedule_of_an_empty_graph_is_right(self) -> None:
        verify(graph_of(""), Schedule("drawn", 1, ()))

    @pytest.mark.parametrize(
        ("launches", "message"),
        [
            ((), "'a' is never launched"),
            ((A, B), "'c' is never launched"),
            ((A, B, B, C), "'b' is launched twice"),
            ((A, B, C, Launch("a", 1, (FORK,))), "'a' is launched twice"),
            ((A, B, C, Launch("z", 0)), "'z' is launched but is no op"),
            ((A, B, C, Launch(JOIN, 0)), f"'{JOIN}' is launched but is no op"),
            ((A, replace(B, stream=-1), C), "'b' is on stream -1, but streams go from 0 to 1"),
            ((A, replace(B, stream=2), C), "'b' is on stream 2, but streams go from 0 to 1"),
        ],
    )
    def test_launches(self, launches: tuple[Launch, ...], message: str) -> None:
        with pytest.raises(ScheduleError, match=message):
            self.verify(*launches)

    @pytest.mark.parametrize(
        ("launches", "message"),
        [
            ((A, replace(B, waits=("a", "c")), C), "'b' waits for 'c', which is not launched before it"),
            ((A, replace(B, waits=("a", "b")), C), "'b' waits for 'b', which is not launched before it"),
            ((A, replace(B, waits=("a", "z")), C), "'b' waits for 'z', which is not launched before it"),
            ((A, replace(B, waits=("a", JOIN)), C), f"'b' waits for '{JOIN}', which is not launched before it"),
            ((A, B, replace(C, waits=("a", "b"))), "'c' waits for 'a', but both are on stream 0"),
            ((replace(A, waits=(FORK,)), B, C), f"'a' waits for '{FORK}', but both are on stream 0"),
            ((B, A, C), "'b' waits for 'a', which is not launched before it"),
            ((A, replace(B, waits=()), C), rf"no wait orders '{FORK}' before 'b'.*stream 1.*not forked off"),
        ],
    )
    def test_waits(self, launches: tuple[Launch, ...], message: str) -> None:
        with pytest.raises(ScheduleError, match=message):
            self.verify(*launches)

    @pytest.mark.parametrize(
        ("join", "message"),
        [
            (("a",), f"'{JOIN}' waits for 'a', but both are on stream 0"),
            ((FORK,), f"'{JOIN}' waits for '{FORK}', but both are on stream 0"),
            (("z",), f"'{JOIN}' waits for 'z', which is not launched before it"),
            ((JOIN,), f"'{JOIN}' waits for '{JOIN}', which is not launched before it"),
        ],
    )
    def test_join_waits(self, join: tuple[str, ...], message: str) -> None:
        with pytest.raises(ScheduleError, match=message):
            self.verify(A, B, C, join=join)

    def test_a_missing_join(self) -> None:
        c_aside = replace(C, stream=1, waits=())
        self.verify(A, B, c_aside, join=("c",))
        with pytest.raises(ScheduleError, match=rf"no wait orders 'c' before '{JOIN}'.*stream 1.*not joined"):
            self.verify(A, B, c_aside, join=("b",))

    def test_waits_that_others_imply_do_no_harm(self) -> None:
        self.verify(A, replace(B, waits=(FORK, "a", "a")), C, join=("b",))

    @pytest.mark.parametrize(
        ("at", "storage", "message"),
        [
            (0, "a", "'a' is released behind 'a', but 'b' uses it and is launched later"),
            (0, "b", "'b' is released behind 'a', but 'b' uses it and is launched later"),
            (
                1,
                "a",
                "behind 'b', but no wait orders 'b', which uses it on stream 1, before what comes next on stream 0",
            ),
            (
                2,
                "b",
                "behind 'c', but no wait orders 'c', which uses it on stream 0, before what comes next on stream 1",
            ),
            (2, "c", "'c' is released behind 'c', but an output keeps it alive"),
            (2, "x_in", "'x_in' is released behind 'c', but it is the caller's: input"),
            (2, "b_view", "'b_view' is released behind 'c', but the graph has no storage of that name"),
        ],
    )
    def test_releases(self, at: int, storage: str, message: str) -> None:
        with pytest.raises(ScheduleError, match=message):
            verify(self.graph, released_at(Schedule("drawn", 2, (A, B, C)), storage, at))

    def test_a_release_twice(self) -> None:
        with pytest.raises(ScheduleError, match="'a' is released behind 'c', but it was already released behind 'c'"):
            self.verify(A, B, replace(C, releases=("a", "a")))

    def test_a_storage_that_no_op_allocates_is_not_released(self) -> None:
        graph = replace(self.graph, storages={"ghost": Storage("ghost", Role.INTERMEDIATE, 8, ())})
        with pytest.raises(ScheduleError, match="'ghost' is released behind 'c', but 0 ops allocate it"):
            verify(graph, released_at(Schedule("drawn", 2, (A, B, C)), "ghost", 2))

    def test_a_storage_that_two_ops_allocate_is_not_released(self) -> None:
        b = self.graph.ops["b"]
        twice = replace(b, writes=b.writes | {"a"}, allocates=b.allocates | {"a"})
        graph = replace(self.graph, ops={**self.graph.ops, "b": twice})
        with pytest.raises(ScheduleError, match="'a' is released behind 'c', but 2 ops allocate it"):
            verify(graph, released_at(Schedule("drawn", 2, (A, B, C)), "a", 2))

    @pytest.mark.parametrize("role", [role for role in Role if role is not Role.INTERMEDIATE])
    def test_what_the_caller_owns_is_not_released(self, role: Role) -> None:
        graph = replace(self.graph, storages={"a": replace(self.graph.storages["a"], role=role)})
        with pytest.raises(ScheduleError, match=f"'a' is released behind 'c', but it is the caller's: {role.value}"):
            verify(graph, released_at(Schedule("drawn", 2, (A, B, C)), "a", 2))

    def test_pinned_ops_stay_on_stream_0(self) -> None:
        schedule = Schedule("drawn", 2, (A, B, C))
        verify(self.graph, schedule, pinned=frozenset({"a", "c"}))
        with pytest.raises(ScheduleError, match="'b' is pinned to stream 0 but is on stream 1"):
            verify(self.graph, schedule, pinned=frozenset({"b"}))

    def test_dependencies_of_the_graph_are_not_trusted(self) -> None:
        """With no dependency listed, the reads and writes still count."""
        graph = replace(self.graph, dependencies=())
        with pytest.raises(ScheduleError, match="no wait orders 'b' on stream 1 before 'c' on stream 0"):
            verify(graph, Schedule("drawn", 2, (A, B, replace(C, waits=())), ("b",)))


class TestArena:
    """
    0:  a ────▶ c ─▶ d     a ─▶ b ─▶ c ─▶ d, and c reads a; d escapes
         ╲     ╱
    1:    b ──╯
    """

    graph = graph_of("a-b a-c b-c c-d", outputs="d")
    graph = replace(graph, storages={name: replace(s, placeable=name != "c") for name, s in graph.storages.items()})
    launches = (Launch("a", 0), Launch("b", 1, ("a",)), Launch("c", 0, ("b",)), Launch("d", 0))

    def verify(self, offsets: Mapping[str, int], size: int = 4096, releases: tuple[str, ...] = ()) -> None:
        launches = (*self.launches[:3], replace(self.launches[3], releases=releases))
        verify(self.graph, Schedule("drawn", 2, launches, arena=Arena(size, offsets)))

    def test_side_by_side_is_right(self) -> None:
        self.verify({"a": 1024, "b": 0}, size=2048)

    def test_no_arena_is_right_whatever_its_size(self) -> None:
        self.verify({}, size=0)

    def test_taking_memory_is_an_access_even_if_nothing_is_written(self) -> None:
        """
        0:  a          b only takes memory, where a writes
        1:  b
        """
        graph = graph_of("", names="ab")
        storages = {name: replace(storage, placeable=True) for name, storage in graph.storages.items()}
        ops = {**graph.ops, "b": replace(graph.ops["b"], writes=frozenset())}
        launches = (Launch("a", 0), Launch("b", 1, (FORK,)))
        beside = Schedule("drawn", 2, launches, ("b",), arena=Arena(1024, {"a": 0, "b": 0}))
        with pytest.raises(ScheduleError, match="'b' must come after 'a'"):
            verify(replace(graph, ops=ops, storages=storages), beside)

    def test_the_last_byte_of_a_storage_may_be_the_arenas_last(self) -> None:
        self.verify({"a": 0}, size=1024)
        with pytest.raises(ScheduleError, match="its 1024 bytes are not all within the 1023 that there are"):
            self.verify({"a": 0}, size=1023)

    @pytest.mark.parametrize(
        ("offsets", "message"),
        [
            ({"z": 0}, "'z' is placed at byte 0 of the arena, but the graph has no storage of that name"),
            ({"x_in": 0}, "'x_in' is placed at byte 0 of the arena, but it is the caller's: input"),
            ({"d": 512}, "'d' is placed at byte 512 of the arena, but an output keeps it alive"),
            ({"c": 0}, "'c' is placed at byte 0 of the arena, but what takes its memory does more than that"),
            ({"a": 256}, "'a' is placed at byte 256 of the arena, but kernels expect a multiple of 512"),
            ({"a": -512}, "'a' is placed at byte -512 of the arena, but its 1024 bytes are not all within the 4096 th"),
            ({"b": 3584}, "'b' is placed at byte 3584 of the arena, but its 1024 bytes are not all within the 4096 th"),
        ],
    )
    def test_places(self, offsets: dict[str, int], message: str) -> None:
        with pytest.raises(ScheduleError, match=message):
            self.verify(offsets)

    def test_the_last_bytes_of_an_arena_are_part_of_it(self) -> None:
        self.verify({"b": 3072})

    def test_what_lies_in_the_arena_is_not_released(self) -> None:
        self.verify({"b": 0}, releases=("a",))
        with pytest.raises(ScheduleError, match="'a' is released behind 'd', but it lies in the arena and has no bloc"):
            self.verify({"a": 0}, releases=("a",))

    def test_an_op_does_not_read_what_it_overwrites(self) -> None:
        with pytest.raises(ScheduleError, match="'a' and 'b' share bytes 512 to 1023 of the arena, but 'b' uses both"):
            self.verify({"a": 0, "b": 512})


class TestTenants:
    """
    0:  a ─▶ b   a2   c     a allocates "A", which b reads, and a2, where it is launched; c allocates "C"
            ┊   ┊
    1:       e ─▶ f         e allocates "E", which f reads; nothing but bytes that "A" and "E" share asks for an order
    """

    ops = (
        sourced("a", "m.py:1: a()", writes=frozenset({"A"}), allocates=frozenset({"A"})),
        sourced("b", "m.py:2: b()", reads=frozenset({"A"})),
        sourced("e", "m.py:3: e()", writes=frozenset({"E"}), allocates=frozenset({"E"})),
        sourced("f", "m.py:4: f()", reads=frozenset({"E"})),
        sourced("a2", "m.py:5: a2()", reads=frozenset({"A"})),
        sourced("c", "m.py:6: c()", writes=frozenset({"C"}), allocates=frozenset({"C"})),
    )
    on_1 = frozenset({"e", "f"})

    def verify(self, order: str, *waits: tuple[str, str], sizes: str = "A1 E1 C1", places: str = "A0 E0") -> None:
        """Launch ops in this order with these waits, and with these sizes and places in units of 512 bytes.

        A size with a plus is a byte more.
        """
        names = order.split()
        units = {size[0]: int(size[1:].rstrip("+")) * ALIGNMENT + size.endswith("+") for size in sizes.split()}
        storages = {
            name: Storage(name, Role.INTERMEDIATE, size, (name,), placeable=True) for name, size in units.items()
        }
        graph = OpGraph({op.name: op for op in self.ops if op.name in names}, (), storages, (), "cuda:0")
        launches = tuple(
            Launch(name, int(name in self.on_1), tuple(before for before, after in waits if after == name))
            for name in names
        )
        arena = Arena(8 * ALIGNMENT, {place[0]: int(place[1:]) * ALIGNMENT for place in places.split()})
        join = tuple(name for name in names if name in self.on_1)[-1:]
        verify(graph, Schedule("drawn", 2, launches, join, arena=arena))

    def test_one_after_the_other(self) -> None:
        self.verify("a b e f", ("b", "e"))

    def test_no_order(self) -> None:
        with pytest.raises(ScheduleError) as caught:
            self.verify("a b e f", (FORK, "e"))
        assert str(caught.value) == (
            "'e' (m.py:3: e()) must come after 'a' (m.py:1: a()) (storage 'E' has bytes 0 to 511 of the arena after "
            "'A'), but no wait orders 'a' on stream 0 before 'e' on stream 1"
        )

    def test_after_the_writer_only(self) -> None:
        with pytest.raises(ScheduleError, match=r"'e' .* must come after 'b' .*but no wait orders 'b' on stream 0"):
            self.verify("a b e f", ("a", "e"))

    def test_an_owner_that_comes_back(self) -> None:
        """Even where all is ordered: what a2 reads has been overwritten."""
        with pytest.raises(ScheduleError, match=r"'e' .* must come after 'a2' .*but 'e' is launched before 'a2'"):
            self.verify("a b e f a2", ("b", "e"), ("f", "a2"))

    def test_a_launch_order_is_no_order(self) -> None:
        """E is launched first and A later: what holds for the one order holds for the other."""
        self.verify("e f a b", (FORK, "e"), ("f", "a"))
        with pytest.raises(ScheduleError, match=r"'a' .* must come after 'f' .*but no wait orders 'f' on stream 1"):
            self.verify("e f a b", (FORK, "e"), ("e", "a"))

    def test_ranges_that_touch_do_not_overlap(self) -> None:
        self.verify("a b e f", (FORK, "e"), sizes="A2 E2", places="A0 E2")
        self.verify("a b e f", (FORK, "e"), sizes="A2 E2", places="A2 E0")

    @pytest.mark.parametrize("places", ["A0 E1", "A1 E0"])
    def test_one_unit_in_common(self, places: str) -> None:
        with pytest.raises(ScheduleError, match="has bytes 512 to 1023 of the arena after 'A'"):
            self.verify("a b e f", (FORK, "e"), sizes="A2 E2", places=places)

    def test_one_byte_in_common(self) -> None:
        with pytest.raises(ScheduleError, match="has bytes 512 to 512 of the arena after 'A'"):
            self.verify("a b e f", (FORK, "e"), sizes="A1+ E1", places="A0 E1")

    def test_within_another(self) -> None:
        with pytest.raises(ScheduleError, match="has bytes 512 to 1023 of the arena after 'A'"):
            self.verify("a b e f", (FORK, "e"), sizes="A3 E1", places="A0 E1")

    @pytest.mark.parametrize("places", ["A0 C1 E0", "A0 C0 E1", "A0 C1 E2"])
    def test_an_owner_of_whose_bytes_others_took_some(self, places: str) -> None:
        """C takes some bytes of A, in front, behind or in the midst of which E finds what is left of it."""
        with pytest.raises(ScheduleError, match=r"'e' .* must come after 'a' .* after 'A'\)"):
            self.verify("a b c e f", (FORK, "e"), sizes="A3 C1 E1", places=places)

    @pytest.mark.parametrize("places", ["A0 C1 E0", "A1 C0 E0"])
    def test_all_whose_bytes_it_takes(self, places: str) -> None:
        self.verify("a b c e f", ("c", "e"), sizes="A1 C1 E2", places=places)
        with pytest.raises(ScheduleError, match=r"'e' .* must come after 'c' .* after 'C'\)"):
            self.verify("a b c e f", ("b", "e"), sizes="A1 C1 E2", places=places)

    def test_a_storage_of_no_bytes_has_none_in_common(self) -> None:
        self.verify("a b e f", (FORK, "e"), sizes="A1 E0")
        self.verify("a b e f", (FORK, "e"), sizes="A0 E0")

    def test_a_storage_that_is_not_used_is_nobody_s_neighbour(self) -> None:
        self.verify("a b e f", ("b", "e"), places="A0 E0 C0")

    def test_each_access_and_not_only_the_first(self) -> None:
        """
        0:  a ─▶ b ─▶ left     left and right write parts of "both", which no op allocates: it is taken before the fork
                  ╲
        1:         right       left sees b, which says nothing of right
        """
        both = Storage("both", Role.INTERMEDIATE, 8, ("both",), parts=("both[0]", "both[1]"), placeable=True)
        ops = (
            *self.ops[:2],
            sourced("left", "", writes=frozenset({"both[0]"})),
            sourced("right", "", writes=frozenset({"both[1]"})),
        )
        first = Storage("A", Role.INTERMEDIATE, 8, ("A",), placeable=True)
        graph = OpGraph({op.name: op for op in ops}, (), {"A": first, "both": both}, (), "cuda:0")
        launches = (Launch("a", 0), Launch("b", 0), Launch("left", 0))
        arena = Arena(512, {"A": 0, "both": 0})
        verify(graph, Schedule("drawn", 2, (*launches, Launch("right", 1, ("b",))), ("right",), arena=arena))
        with pytest.raises(ScheduleError, match=r"'right' must come after 'b' .*'both' has bytes 0 to 7 .* after 'A'"):
            verify(graph, Schedule("drawn", 2, (*launches, Launch("right", 1, ("a",))), ("right",), arena=arena))
