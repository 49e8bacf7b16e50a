"""The checker: it accepts what brute force accepts, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autostream.errors import ScheduleError
from autostream.ir import FORK, JOIN, Launch, Op, OpGraph, Role, Schedule, Storage
from autostream.scheduling.releases import place_releases
from autostream.scheduling.synchronize import synchronize
from autostream.scheduling.verify import verify
from tests.scheduling.brute_force import (
    assignments,
    conflict_graphs,
    is_covered,
    is_releasable,
    is_safe_release,
    schedules,
)
from tests.scheduling.graphs import graph_of


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


class TestAgainstBruteForce:
    @given(plans(max_ops=12))
    @settings(max_examples=200, deadline=None)
    def test_what_the_stages_plan_is_right(self, plan: tuple[OpGraph, Schedule]) -> None:
        graph, schedule = plan
        verify(graph, schedule)
        assert is_covered(graph, schedule)

    @given(st.data())
    @settings(max_examples=400, deadline=None)
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
    @settings(max_examples=300, deadline=None)
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


def sourced(name: str, source: str, **fields: frozenset[str]) -> Op:
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
    def test_an_uncovered_hazard(
        self, first: dict[str, frozenset[str]], second: dict[str, frozenset[str]], hazard: str
    ) -> None:
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
