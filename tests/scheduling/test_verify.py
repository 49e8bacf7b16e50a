"""The verifier accepts the schedules that brute force finds right, and names what is wrong with others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
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
    Oracle,
    arenas,
    assignments,
    conflict_graphs,
    is_placeable,
    placeable,
    schedules,
)
from tests.scheduling.graphs import graph_of
from tests.scheduling.mistakes import (
    with_neighbours_swapped,
    without_a_wait,
)


def is_accepted(graph: OpGraph, schedule: Schedule) -> bool:
    try:
        verify(graph, schedule)
    except ScheduleError:
        return False
    return True


def released_at(schedule: Schedule, storage: str, at: int) -> Schedule:
    """The same schedule with one more release."""
    launches = list(schedule.launches)
    launches[at] = replace(launches[at], releases=(*launches[at].releases, storage))
    return replace(schedule, launches=tuple(launches))


def moved_to_other_streams(schedule: Schedule) -> Iterator[Schedule]:
    for at, launch in enumerate(schedule.launches):
        for stream in range(schedule.streams):
            moved = replace(launch, stream=stream)
            yield replace(schedule, launches=(*schedule.launches[:at], moved, *schedule.launches[at + 1 :]))


def placed_at(schedule: Schedule, storage: str, offset: int) -> Schedule:
    return replace(schedule, arena=replace(schedule.arena, offsets={**schedule.arena.offsets, storage: offset}))


@given(st.data())
@settings(max_examples=80)
def test_planned_schedules_are_right_and_changes_are_judged_as_by_brute_force(data: st.DataObject) -> None:
    graph = data.draw(conflict_graphs(max_ops=9))
    plan, oracle = synchronize(graph, data.draw(assignments(graph))), Oracle(graph)
    verify(graph, place_releases(graph, plan))
    assert oracle.fault(place_releases(graph, plan)) == ""
    assert not any(is_accepted(graph, fewer) for fewer in without_a_wait(plan)), "no wait is redundant"
    for changed in (*with_neighbours_swapped(plan), *moved_to_other_streams(plan)):
        assert is_accepted(graph, changed) == (oracle.fault(changed) == "")


@given(st.data())
@settings(max_examples=100)
def test_any_streams_order_waits_and_releases(data: st.DataObject) -> None:
    graph = data.draw(conflict_graphs())
    oracle, schedule = Oracle(graph), data.draw(schedules(graph))
    assert is_accepted(graph, schedule) == (oracle.fault(schedule) == "")
    for right in (schedule, synchronize(graph, data.draw(assignments(graph)))):
        for storage in (storage for op in graph.ops.values() for storage in op.allocates):
            for at in range(len(right.launches)):
                released = released_at(right, storage, at)
                assert is_accepted(graph, released) == (oracle.fault(released) == "")


@given(st.data())
@settings(max_examples=150)
def test_an_arena_with_any_storages_at_any_offsets(data: st.DataObject) -> None:
    graph = data.draw(conflict_graphs().flatmap(placeable))
    schedule, oracle = (
        data.draw(assignments(graph).map(lambda a: synchronize(graph, a)) | schedules(graph)),
        Oracle(graph),
    )
    assume(not oracle.fault(schedule))
    placed = replace(schedule, arena=data.draw(arenas(graph)))
    assert is_accepted(graph, placed) == (oracle.fault(placed) == "")


@given(st.data())
@settings(max_examples=50)
def test_a_crowded_arena_and_one_storage_moved(data: st.DataObject) -> None:
    """All placeable storages, in any order, each at the first safe offset from a random one on."""
    graph = data.draw(conflict_graphs(max_ops=9).flatmap(placeable))
    schedule, oracle = synchronize(graph, data.draw(assignments(graph))), Oracle(graph)
    placed = replace(schedule, arena=Arena(64 * ALIGNMENT))
    for name in data.draw(st.permutations([name for name, s in graph.storages.items() if is_placeable(s)])):
        start = data.draw(st.integers(0, 3))
        candidates = (placed_at(placed, name, (start + units) * ALIGNMENT) for units in range(60))
        placed = next(candidate for candidate in candidates if not oracle.fault(candidate))
    verify(graph, placed)
    for storage in placed.arena.offsets:
        moved = placed_at(placed, storage, ALIGNMENT)
        assert is_accepted(graph, moved) == (oracle.fault(moved) == "")


def op(name: str, source: str = "", **fields: Any) -> Op:
    return Op(name, "f", (name,), source=source, **{"reads": frozenset[str](), "writes": frozenset[str](), **fields})


STATE = frozenset({"state"})


@pytest.mark.parametrize(
    ("first", "second", "hazard"),
    [
        ({"writes": STATE}, {"reads": STATE}, "read after write of storage 'state'"),
        ({"reads": STATE}, {"writes": STATE}, "write after read of storage 'state'"),
        ({"writes": STATE}, {"writes": STATE}, "write after write of storage 'state'"),
        ({"allocates": STATE}, {"reads": STATE}, "read after write of storage 'state'"),
        ({"orders": STATE}, {"orders": STATE}, "program order of resource 'state'"),
        ({"reads": STATE}, {"reads": STATE}, ""),
        ({"reads": STATE}, {"orders": STATE}, ""),
    ],
)
def test_a_hazard_without_a_wait_names_both_ops_and_their_lines(
    first: dict[str, Any], second: dict[str, Any], hazard: str
) -> None:
    """
    0:  first
                  no wait between them
    1:  second
    """
    ops = {"first": op("first", "m.py:1: f()", **first), "second": op("second", "m.py:2: g()", **second)}
    graph = OpGraph(ops, (), {}, (), "cuda:0")
    schedule = Schedule("drawn", 2, (Launch("first", 0), Launch("second", 1, (FORK,))), ("second",))
    if not hazard:
        verify(graph, schedule)
        return
    with pytest.raises(ScheduleError) as caught:
        verify(graph, schedule)
    assert str(caught.value) == (
        f"'second' (m.py:2: g()) must come after 'first' (m.py:1: f()) ({hazard}), "
        "but no wait orders 'first' on stream 0 before 'second' on stream 1"
    )
    with pytest.raises(ScheduleError, match=r"but 'second' is launched before 'first'$"):
        verify(graph, Schedule("drawn", 1, (Launch("second", 0), Launch("first", 0))))


def check(graph: OpGraph, schedule: Schedule, message: str, **options: Any) -> None:
    """Assert that the verifier accepts a schedule, or refuses it with this message."""
    if not message:
        verify(graph, schedule, **options)
        return
    with pytest.raises(ScheduleError, match=message):
        verify(graph, schedule, **options)


A, B, C = Launch("a", 0), Launch("b", 1, ("a",)), Launch("c", 0, ("b",))
DRAWN = graph_of("a-b b-c", outputs="c")
"""
0:  a ────▶ c     a ─▶ b ─▶ c; c escapes
     ╲     ╱
1:    b ──╯
"""


@pytest.mark.parametrize(
    ("launches", "join", "message"),
    [
        ((A, B, replace(C, releases=("a",))), (), ""),
        ((A, replace(B, waits=(FORK, "a", "a")), C), ("b",), ""),
        ((A, B), (), "'c' is never launched"),
        ((A, B, B, C), (), "'b' is launched twice"),
        ((A, B, C, Launch("z", 0)), (), "'z' is launched but is no op"),
        ((A, B, C, Launch(JOIN, 0)), (), f"'{JOIN}' is launched but is no op"),
        ((A, replace(B, stream=-1), C), (), "'b' is on stream -1, but streams go from 0 to 1"),
        ((A, replace(B, stream=2), C), (), "'b' is on stream 2, but streams go from 0 to 1"),
        ((A, replace(B, waits=("a", "c")), C), (), "'b' waits for 'c', which is not launched before it"),
        ((A, replace(B, waits=("a", "b")), C), (), "'b' waits for 'b', which is not launched before it"),
        ((A, replace(B, waits=("a", "z")), C), (), "'b' waits for 'z', which is not launched before it"),
        ((A, replace(B, waits=("a", JOIN)), C), (), f"'b' waits for '{JOIN}', which is not launched before it"),
        ((A, B, replace(C, waits=("a", "b"))), (), "'c' waits for 'a', but both are on stream 0"),
        ((replace(A, waits=(FORK,)), B, C), (), f"'a' waits for '{FORK}', but both are on stream 0"),
        ((A, replace(B, waits=()), C), (), rf"no wait orders '{FORK}' before 'b'.*stream 1.*not forked off"),
        ((A, B, C), ("a",), f"'{JOIN}' waits for 'a', but both are on stream 0"),
        ((A, B, C), ("z",), f"'{JOIN}' waits for 'z', which is not launched before it"),
        ((A, B, C), (JOIN,), f"'{JOIN}' waits for '{JOIN}', which is not launched before it"),
        ((A, B, replace(C, stream=1, waits=())), ("c",), ""),
        ((A, B, replace(C, stream=1, waits=())), ("b",), rf"no wait orders 'c' before '{JOIN}'.*stream 1.*not joined"),
        ((replace(A, releases=("a",)), B, C), (), "'a' is released behind 'a', but 'b' uses it and is launched later"),
        ((A, replace(B, releases=("a",)), C), (), "'b', which uses it on stream 1, before what comes next on stream 0"),
        ((A, B, replace(C, releases=("b",))), (), "'c', which uses it on stream 0, before what comes next on stream 1"),
        ((A, B, replace(C, releases=("c",))), (), "'c' is released behind 'c', but an output keeps it alive"),
        ((A, B, replace(C, releases=("x_in",))), (), "'x_in' is released behind 'c', but it is the caller's: input"),
        ((A, B, replace(C, releases=("v",))), (), "'v' is released behind 'c', but the graph has no storage of that n"),
        ((A, B, replace(C, releases=("a", "a"))), (), "'a' is released behind 'c', but it was already released beh"),
    ],
)
def test_launches_waits_and_releases(launches: tuple[Launch, ...], join: tuple[str, ...], message: str) -> None:
    check(DRAWN, Schedule("drawn", 2, launches, join), message)


def test_a_storage_with_no_or_two_allocating_ops_is_not_released() -> None:
    ghosts = replace(DRAWN, storages={"ghost": Storage("ghost", Role.INTERMEDIATE, 8, ())})
    released = replace(C, releases=("ghost",))
    check(ghosts, Schedule("drawn", 2, (A, B, released)), "'ghost' is released behind 'c', but 0 ops allocate it")
    b = DRAWN.ops["b"]
    twice = replace(b, writes=b.writes | {"a"}, allocates=b.allocates | {"a"})
    graph, released = replace(DRAWN, ops={**DRAWN.ops, "b": twice}), replace(C, releases=("a",))
    check(graph, Schedule("drawn", 2, (A, B, released)), "'a' is released behind 'c', but 2 ops allocate it")


def test_pinned_ops_stay_on_stream_0() -> None:
    schedule = Schedule("drawn", 2, (A, B, C))
    check(DRAWN, schedule, "", pinned=frozenset({"a", "c"}))
    check(DRAWN, schedule, "'b' is pinned to stream 0 but is on stream 1", pinned=frozenset({"b"}))


def test_dependencies_of_the_graph_are_not_trusted() -> None:
    """With no dependency listed, reads and writes still count."""
    schedule = Schedule("drawn", 2, (A, B, replace(C, waits=())), ("b",))
    check(replace(DRAWN, dependencies=()), schedule, "no wait orders 'b' on stream 1 before 'c' on stream 0")


@pytest.mark.parametrize(
    ("offsets", "size", "released", "message"),
    [
        ({"a": 1024, "b": 0}, 2048, "", ""),
        ({}, 0, "", ""),
        ({"a": 0}, 1024, "", ""),
        ({"b": 3072}, 4096, "a", ""),
        ({"a": 0}, 1023, "", "its 1024 bytes are not all within the 1023 that there are"),
        ({"z": 0}, 4096, "", "'z' is placed at byte 0 of the arena, but the graph has no storage of that name"),
        ({"x_in": 0}, 4096, "", "'x_in' is placed at byte 0 of the arena, but it is the caller's: input"),
        ({"d": 512}, 4096, "", "'d' is placed at byte 512 of the arena, but an output keeps it alive"),
        ({"c": 0}, 4096, "", "'c' is placed at byte 0 of the arena, but what takes its memory does more than that"),
        ({"a": 256}, 4096, "", "'a' is placed at byte 256 of the arena, but kernels expect a multiple of 512"),
        ({"a": -512}, 4096, "", "'a' is placed at byte -512 of the arena, but its 1024 bytes are not all within"),
        ({"a": 0}, 4096, "a", "'a' is released behind 'd', but it lies in the arena and has no block"),
        ({"a": 0, "b": 512}, 4096, "", "'a' and 'b' share bytes 512 to 1023 of the arena, but 'b' uses both"),
    ],
)
def test_offsets_in_the_arena(offsets: dict[str, int], size: int, released: str, message: str) -> None:
    """
    0:  a ────▶ c ─▶ d     a ─▶ b ─▶ c ─▶ d, and c reads a; d escapes, and c is not placeable
         ╲     ╱
    1:    b ──╯
    """
    graph = graph_of("a-b a-c b-c c-d", outputs="d")
    graph = replace(graph, storages={name: replace(s, placeable=name != "c") for name, s in graph.storages.items()})
    launches = (A, B, C, Launch("d", 0, releases=tuple(released)))
    check(graph, Schedule("drawn", 2, launches, arena=Arena(size, offsets)), message)


SHARING = (
    op("a", "m.py:1: a()", writes=frozenset({"A"}), allocates=frozenset({"A"})),
    op("b", "m.py:2: b()", reads=frozenset({"A"})),
    op("e", "m.py:3: e()", writes=frozenset({"E"}), allocates=frozenset({"E"})),
    op("f", "m.py:4: f()", reads=frozenset({"E"})),
    op("a2", "m.py:5: a2()", reads=frozenset({"A"})),
    op("c", "m.py:6: c()", writes=frozenset({"C"}), allocates=frozenset({"C"})),
)
UNORDERED = (
    r"'e' \(m.py:3: e\(\)\) must come after 'a' \(m.py:1: a\(\)\) \(storage 'E' has bytes {} of the arena after 'A'\), "
    "but no wait orders 'a' on stream 0 before 'e' on stream 1"
)


@pytest.mark.parametrize(
    ("order", "waits", "sizes", "offsets", "message"),
    [
        ("a b e f", "b-e", "A1 E1", "A0 E0", ""),
        ("a b e f", "fork-e", "A1 E1", "A0 E0", UNORDERED.format("0 to 511")),
        ("a b e f", "a-e", "A1 E1", "A0 E0", r"'e' .* must come after 'b' .*but no wait orders 'b' on stream 0"),
        ("a b e f a2", "b-e f-a2", "A1 E1", "A0 E0", r"'e' .* after 'a2' .*but 'e' is launched before 'a2'"),
        # bytes in common, from none to all
        ("a b e f", "fork-e", "A2 E2", "A0 E2", ""),
        ("a b e f", "fork-e", "A1+ E1", "A0 E1", UNORDERED.format("512 to 512")),
        ("a b e f", "fork-e", "A3 E1", "A0 E1", UNORDERED.format("512 to 1023")),
        # C uses some bytes of A in the middle; E finds the rest. Then E needs the bytes of both A and C
        ("a b c e f", "fork-e", "A3 C1 E1", "A0 C1 E2", r"'e' .* must come after 'a' .* after 'A'\)"),
        ("a b c e f", "b-e", "A1 C1 E2", "A1 C0 E0", r"'e' .* must come after 'c' .* after 'C'\)"),
        # a storage without bytes, and one that no op uses
        ("a b e f", "fork-e", "A1 E0", "A0 E0", ""),
        ("a b e f", "b-e", "A1 E1 C1", "A0 E0 C0", ""),
    ],
)
def test_storages_with_bytes_in_common(order: str, waits: str, sizes: str, offsets: str, message: str) -> None:
    """Sizes and offsets are in units of 512 bytes; a size with a plus is a byte more.

    0:  a ─▶ b   a2   c     a allocates "A", which b and a2 read, wherever a2 is launched; c allocates "C"
            ┊   ┊
    1:       e ─▶ f         e allocates "E", which f reads; only bytes in common require an order
    """
    names, edges = order.split(), [edge.replace("fork", FORK).split("-") for edge in waits.split()]
    units = {size[0]: int(size[1:].rstrip("+")) * ALIGNMENT + size.endswith("+") for size in sizes.split()}
    storages = {name: Storage(name, Role.INTERMEDIATE, size, (name,), placeable=True) for name, size in units.items()}
    graph = OpGraph({op.name: op for op in SHARING if op.name in names}, (), storages, (), "cuda:0")
    launches = tuple(
        Launch(name, int(name in "ef"), tuple(before for before, after in edges if after == name)) for name in names
    )
    arena = Arena(8 * ALIGNMENT, {offset[0]: int(offset[1:]) * ALIGNMENT for offset in offsets.split()})
    join = tuple(name for name in names if name in "ef")[-1:]
    check(graph, Schedule("drawn", 2, launches, join, arena=arena), message)


def test_to_allocate_is_an_access_even_if_nothing_is_written() -> None:
    """
    0:  a          a writes its storage; b only allocates one at the same offset
    1:  b
    """
    graph = graph_of("", names="ab")
    storages = {name: replace(storage, placeable=True) for name, storage in graph.storages.items()}
    ops = {**graph.ops, "b": replace(graph.ops["b"], writes=frozenset())}
    launches = (Launch("a", 0), Launch("b", 1, (FORK,)))
    schedule = Schedule("drawn", 2, launches, ("b",), arena=Arena(1024, {"a": 0, "b": 0}))
    check(replace(graph, ops=ops, storages=storages), schedule, "'b' must come after 'a'")
