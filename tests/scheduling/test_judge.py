"""The judge of large schedules finds what plain brute force finds, on small ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autostream.ir import FORK, Arena, Launch, Schedule
from autostream.scheduling.synchronize import synchronize
from tests.scheduling.brute_force import (
    arenas,
    assignments,
    conflict_graphs,
    is_covered,
    is_releasable,
    is_safe_arena,
    is_safe_release,
    placeable,
    schedules,
    waits_are_legal,
)
from tests.scheduling.graphs import graph_of
from tests.scheduling.judge import Judge
from tests.scheduling.mistakes import with_a_release_at, with_neighbours_swapped


@given(st.data())
def test_waits_and_their_order(data: st.DataObject) -> None:
    graph = data.draw(conflict_graphs())
    for plan in (data.draw(schedules(graph)), synchronize(graph, data.draw(assignments(graph)))):
        for changed in (plan, *with_neighbours_swapped(plan)):
            fault = "" if is_covered(graph, changed) else "order" if waits_are_legal(changed) else "wait"
            assert Judge(graph).fault(changed) == fault


@given(st.data())
def test_a_release_anywhere(data: st.DataObject) -> None:
    graph = data.draw(conflict_graphs())
    plan = synchronize(graph, data.draw(assignments(graph)))
    for storage in {name for op in graph.ops.values() for name in op.allocates}:
        for at in range(len(plan.launches)):
            safe = is_releasable(graph.storages[storage]) and is_safe_release(graph, plan, storage, at)
            assert (Judge(graph).fault(with_a_release_at(plan, storage, at)) == "") == safe


@given(st.data())
def test_an_arena_with_anything_anywhere(data: st.DataObject) -> None:
    graph = data.draw(conflict_graphs().flatmap(placeable))
    plan = replace(synchronize(graph, data.draw(assignments(graph))), arena=data.draw(arenas(graph)))
    assert (Judge(graph).fault(plan) == "") == is_safe_arena(graph, plan)


@pytest.mark.parametrize(
    ("launches", "fault"),
    [
        ((Launch("a", 0), Launch("b", 1, ("a",), ("b",))), ""),
        ((Launch("a", 0), Launch("b", 1, ("b",))), "wait"),
        ((Launch("a", 0), Launch("b", 0, ("a",))), "wait"),
        ((Launch("a", 0), Launch("b", 1, (FORK,))), "order"),
        ((Launch("a", 0), Launch("b", 1, ("a",), ("a",))), "release"),
        ((Launch("a", 0), Launch("b", 1, ("a",), ("b", "b"))), "release"),
        ((Launch("a", 0), Launch("b", 1, ("a",), ("x_in",))), "release"),
    ],
)
def test_by_hand(launches: tuple[Launch, ...], fault: str) -> None:
    """
    0:  a
         ╲
    1:    b      b reads a
    """
    assert Judge(graph_of("a-b")).fault(Schedule("drawn", 2, launches, ("b",))) == fault


def test_what_lies_in_the_arena_is_not_released() -> None:
    graph = graph_of("a-b")
    graph = replace(graph, storages={name: replace(s, placeable=True) for name, s in graph.storages.items()})
    plan = Schedule("drawn", 1, (Launch("a", 0), Launch("b", 0)), arena=Arena(1024, {"a": 0}))
    assert Judge(graph).fault(plan) == ""
    assert Judge(graph).fault(with_a_release_at(plan, "a", 1)) == "release"
