"""Storages are released as early as is safe; waits that save memory cost no time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autostream.ir import FORK, Arena, Costs, Launch, OpGraph, Role, Schedule
from autostream.scheduling.releases import place_releases, wait_for_memory
from autostream.scheduling.simulate import simulate
from autostream.scheduling.synchronize import synchronize
from autostream.scheduling.verify import verify
from tests.scheduling.brute_force import Oracle, assignments, conflict_graphs, schedules
from tests.scheduling.graphs import PRICED, costs_of, graph_of, planned
from tests.scheduling.mistakes import with_a_release_at

EDGE_US = PRICED.cross_stream_edge_us


def releases(graph: OpGraph, *launches: Launch) -> dict[str, tuple[str, ...]]:
    """The releases, by the op after which they come."""
    placed = place_releases(graph, Schedule("drawn", 3, launches))
    return {launch.op: launch.releases for launch in placed.launches if launch.releases}


def test_storages_of_the_caller_and_in_the_arena_are_not_released() -> None:
    graph = graph_of("", names="a")
    assert (
        releases(replace(graph, storages={"a": replace(graph.storages["a"], role=Role.BUFFER)}), Launch("a", 0)) == {}
    )
    launches = (Launch("a", 1, (FORK,)), Launch("b", 0, ("a",), releases=("a",)))
    before = Schedule("mine", 2, launches, ("a",), arena=Arena(1024, {"a": 0}))
    after = (launches[0], replace(launches[1], releases=("b",)))
    assert place_releases(graph_of("a-b"), before) == replace(before, launches=after)


@given(st.data())
@settings(max_examples=60)
def test_every_storage_is_released_at_the_first_safe_launch(data: st.DataObject) -> None:
    graph = data.draw(conflict_graphs())
    bare = data.draw(assignments(graph).map(lambda drawn: synchronize(graph, drawn)) | schedules(graph))
    oracle = Oracle(graph)
    found = {name: at for at, launch in enumerate(place_releases(graph, bare).launches) for name in launch.releases}
    for storage in graph.storages:
        positions = range(len(bare.launches))
        safe = (at for at in positions if oracle.is_safe_release(with_a_release_at(bare, storage, at)))
        assert found.get(storage) == next(safe, None)


def waiting(graph: OpGraph, schedule: Schedule, costs: Costs, least_bytes: int = 1, slack: float = 0.0) -> Schedule:
    return wait_for_memory(graph, schedule, simulate(schedule, costs, PRICED), EDGE_US, least_bytes, slack)


def waits(schedule: Schedule) -> dict[str, tuple[str, ...]]:
    return {launch.op: launch.waits for launch in schedule.launches if launch.waits}


def drawn(extra: str = "", q_waits: str = "") -> tuple[OpGraph, Schedule]:
    """
    0:  a ── p ─────────────────────── q ── r      p is long
    1:       s ── t ── u ───────────
    """
    graph = graph_of(f"a-p p-q q-r a-s s-t t-u {extra}", names="apstuqr", outputs="r")
    waits = {"s": ("a",), "q": tuple(q_waits)}
    launches = tuple(Launch(name, int(name in "stu"), waits.get(name, ())) for name in "asptuqr")
    return graph, Schedule("by hand", 2, launches, ("u",))


TIMES = {"a": 1.0, "s": 1.0, "t": 1.0, "u": 1.0, "p": 30.0, "q": 1.0, "r": 1.0}


@pytest.mark.parametrize(
    ("extra", "q_waits", "p_us", "least_bytes", "expected"),
    [
        pytest.param("", "", 30.0, 1, "u", id="it ended long ago"),
        pytest.param("", "", 6.0, 1, "t", id="u has only just ended"),
        pytest.param("", "", 30.0, 3 * 1024, "u", id="s, t and u are 1 KiB each"),
        pytest.param("", "", 30.0, 3 * 1024 + 1, "", id="too little memory"),
        pytest.param("t-q", "t", 30.0, 1024, "u", id="the wait for t frees s, so u is new"),
        pytest.param("t-q", "t", 30.0, 1025, "t", id="what the wait for t frees does not count"),
        pytest.param("s-q", "s", 30.0, 1, "u", id="a later wait replaces an earlier one"),
    ],
)
def test_a_stream_waits_for_memory_that_became_free_long_ago(
    extra: str, q_waits: str, p_us: float, least_bytes: int, expected: str
) -> None:
    graph, schedule = drawn(extra, q_waits)
    costs = costs_of(graph, {**TIMES, "p": p_us})
    found = waiting(graph, schedule, costs, least_bytes)
    assert waits(found).get("q", ()) == tuple(expected)
    assert expected != "u" or found.join_waits == (), "u is over for r and so for the join"
    verify(graph, place_releases(graph, found))
    assert waits(waiting(graph, found, costs, least_bytes)) == waits(found), "no wait is added twice"


@pytest.mark.parametrize(("slack", "known"), [(0.0, {}), (0.7, {"z": "b"}), (0.9, {"y": "b", "z": "c"})])
def test_launches_wait_for_more_memory_the_more_slack_they_use(slack: float, known: dict[str, str]) -> None:
    """At once, no memory is free that the copies could use; each would be in time later.

    stream 0:  a ── b ── c ── d ── e        x, y and z are copies for c, d and e, and stream 1 is free from the start
    stream 1:  x ── y ── z
    """
    graph = graph_of("x-c y-d z-e a-b b-c c-d d-e", names="axybzcde", outputs="e")
    needs = {"x": (FORK,), "c": ("x",), "d": ("y",), "e": ("z",)}
    launches = tuple(Launch(name, int(name in "xyz"), needs.get(name, ())) for name in "axybzcde")
    schedule = Schedule("by hand", 2, launches)
    costs = costs_of(graph, {**dict.fromkeys("abcde", 10.0), **dict.fromkeys("xyz", 1.0)})
    found = waiting(graph, schedule, costs, 1, slack)
    before = {op: set(waits(found).get(op, ())) - {FORK} for op in "xyz"}
    assert before == {op: {known[op]} if op in known else set() for op in "xyz"}
    assert simulate(found, costs, PRICED).makespan_us == simulate(schedule, costs, PRICED).makespan_us
    verify(graph, place_releases(graph, found))


@settings(max_examples=80)
@given(data=st.data(), least_bytes=st.sampled_from([1, 1024, 2048]), slack=st.sampled_from([0.0, 0.3, 0.9, 0.99]))
def test_the_run_takes_no_longer_and_is_still_right(data: st.DataObject, least_bytes: int, slack: float) -> None:
    """With slack, where ops do not slow each other down: their durations are taken to stay the same."""
    graph, costs, schedule = data.draw(planned(shares=slack == 0.0))
    edge_us = PRICED.over(schedule.streams).cross_stream_edge_us
    found = wait_for_memory(graph, schedule, simulate(schedule, costs, PRICED), edge_us, least_bytes, slack)
    verify(graph, place_releases(graph, found))
    assert found.stream_of == schedule.stream_of
    makespan_us = simulate(schedule, costs, PRICED).makespan_us
    assert simulate(found, costs, PRICED).makespan_us <= makespan_us + 1e-6
