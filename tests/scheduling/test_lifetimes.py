"""Vector clocks and lifetimes say what happens-before says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autostream.ir import Launch, OpGraph, Role, Schedule
from autostream.scheduling.lifetimes import clocks, lifetimes
from autostream.scheduling.synchronize import synchronize
from tests.scheduling.brute_force import assignments, conflict_graphs, happens_before, in_parts, schedules
from tests.scheduling.graphs import graph_of


def placeable(graph: OpGraph, **fields: Any) -> OpGraph:
    """The graph with placeable storages that have these fields."""
    storages = graph.storages.items()
    return replace(graph, storages={name: replace(storage, placeable=True, **fields) for name, storage in storages})


def orders(graph: OpGraph, *launches: Launch) -> set[str]:
    """Which storage is before which, as ``"ab"`` for a before b."""
    lives = lifetimes(graph, Schedule("drawn", 3, launches))
    return {one + other for one in lives for other in lives if lives[one].before(lives[other])}


@pytest.mark.parametrize(
    "fields",
    [{"role": Role.INPUT}, {"escapes": True}, {"bytes": 0}, {"placeable": False}],
)
def test_other_storages_have_no_lifetime(fields: dict[str, Any]) -> None:
    graph = placeable(graph_of("", names="abc"))
    assert orders(graph, *(Launch(name, 0) for name in "abc")) == {"ab", "ac", "bc"}
    unused = replace(graph.storages["a"], name="unused")
    storages = {**graph.storages, "a": replace(graph.storages["a"], **fields), "unused": unused}
    assert orders(replace(graph, storages=storages), *(Launch(name, 0) for name in "abc")) == {"bc"}


@given(st.data())
@settings(max_examples=80)
def test_clocks_and_lifetimes_agree_with_happens_before(data: st.DataObject) -> None:
    """An op has happened if the clock is as late on its stream; one storage is before another if all accesses are."""
    graph = placeable(data.draw(conflict_graphs()))
    schedule = data.draw(assignments(graph).map(lambda drawn: synchronize(graph, drawn)) | schedules(graph))
    ordered, position = happens_before(schedule), {launch.op: at for at, launch in enumerate(schedule.launches)}
    for launch, clock in zip(schedule.launches, clocks(schedule), strict=True):
        for other in schedule.launches:
            assert (clock[other.stream] >= position[other.op]) == ((other.op, launch.op) in ordered)
    users = {
        name: [
            launch.op
            for launch in schedule.launches
            if in_parts(graph, [name]) & in_parts(graph, graph.ops[launch.op].reads | graph.ops[launch.op].writes)
        ]
        for name, storage in graph.storages.items()
        if storage.role is Role.INTERMEDIATE and not storage.escapes
    }
    lives = lifetimes(graph, schedule)
    assert list(lives) == [name for name, ops in users.items() if ops]
    for one, life in lives.items():
        assert (life.first, life.last) == (position[users[one][0]], position[users[one][-1]])
        for other in lives:
            assert life.before(lives[other]) == ({(a, b) for a in users[one] for b in users[other]} <= ordered)
