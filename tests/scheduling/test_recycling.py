"""Waits for memory: only where they hold nobody up, and only for memory that is worth one."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autostream.ir import FORK, Costs, Launch, OpGraph, Schedule
from autostream.scheduling.policies import POLICIES
from autostream.scheduling.releases import place_releases, wait_for_memory
from autostream.scheduling.simulate import simulate
from autostream.scheduling.synchronize import synchronize
from autostream.scheduling.verify import verify
from tests.scheduling.graphs import costs_of, graph_of, profile_with, random_costs, random_graphs

PROFILE = profile_with(same_stream_edge_us=0.5, cross_stream_edge_us=2.0, fork_us=1.0, join_us=1.0)
EDGE_US = 2.0


def waiting(graph: OpGraph, schedule: Schedule, costs: Costs, least_bytes: int = 1) -> Schedule:
    return wait_for_memory(graph, schedule, simulate(schedule, costs, PROFILE), EDGE_US, least_bytes)


def waits(schedule: Schedule) -> dict[str, tuple[str, ...]]:
    return {launch.op: launch.waits for launch in schedule.launches if launch.waits}


#   stream 0:  a ── p ─────────────────────── q ── r
#   stream 1:       s ── t ── u ───────────
GRAPH = graph_of("a-p p-q q-r a-s s-t t-u", names="apstuqr", outputs="r")
LAUNCHES = (
    Launch("a", 0),
    Launch("s", 1, ("a",)),
    Launch("p", 0),
    Launch("t", 1),
    Launch("u", 1),
    Launch("q", 0),
    Launch("r", 0),
)
PLAN = Schedule("by hand", 2, LAUNCHES, ("u",))
TIMES = {"a": 1.0, "s": 1.0, "t": 1.0, "u": 1.0, "p": 30.0, "q": 1.0, "r": 1.0}


def test_a_stream_waits_for_what_ended_long_ago() -> None:
    """While p runs, stream 1 is done with s, t and u: from q on, stream 0 knows."""
    found = waiting(GRAPH, PLAN, costs_of(GRAPH, TIMES))
    assert waits(found) == {"s": ("a",), "q": ("u",)}
    assert found.join_waits == (), "behind r, all that u did is known"


def test_nobody_waits_for_what_has_only_just_ended() -> None:
    """The edge would take longer than what is left until q starts."""
    times = {**TIMES, "p": 6.0}  # u ends at 9.0 µs, and q starts at 8.0 µs
    timeline = simulate(PLAN, costs_of(GRAPH, times), PROFILE)
    start, end = (
        {piece.op: at(piece) for piece in timeline.slices} for at in (lambda p: p.start_us, lambda p: p.end_us)
    )
    found = waits(waiting(GRAPH, PLAN, costs_of(GRAPH, times)))
    for waiter, before in found.items():
        assert waiter == "s" or all(end[op] + EDGE_US <= start[waiter] for op in before)
    assert "u" not in found.get("q", ())


@pytest.mark.parametrize(("least_bytes", "waited_for"), [(1, True), (3 * 1024, True), (3 * 1024 + 1, False)])
def test_little_memory_is_not_worth_a_wait(least_bytes: int, waited_for: bool) -> None:
    """Three storages of 1,024 bytes: those of s, t and u."""
    found = waiting(GRAPH, PLAN, costs_of(GRAPH, TIMES), least_bytes)
    assert ("u" in waits(found).get("q", ())) == waited_for


def test_memory_that_a_stream_knows_to_be_free_is_not_waited_for_again() -> None:
    found = waiting(GRAPH, PLAN, costs_of(GRAPH, TIMES))
    assert waits(waiting(GRAPH, found, costs_of(GRAPH, TIMES))) == waits(found)


@pytest.mark.parametrize(("least_bytes", "waited_for"), [(1024, ("u",)), (1025, ("t",))])
def test_only_memory_that_a_stream_does_not_know_to_be_free_counts(
    least_bytes: int, waited_for: tuple[str, ...]
) -> None:
    """Op q waits for t because of data, and so knows that what s made, which t read, is free: what u made is news."""
    graph = graph_of("a-p p-q q-r a-s s-t t-u t-q", names="apstuqr", outputs="r")
    launches = tuple(replace(launch, waits=("t",)) if launch.op == "q" else launch for launch in LAUNCHES)
    found = waiting(graph, replace(PLAN, launches=launches), costs_of(graph, TIMES), least_bytes)
    assert waits(found)["q"] == waited_for


def test_a_wait_takes_the_place_of_an_earlier_one() -> None:
    """Op q waits for s because of data; t and u come after s on the same stream."""
    graph = graph_of("a-p p-q q-r a-s s-t t-u s-q", names="apstuqr", outputs="r")
    launches = tuple(replace(launch, waits=("s",)) if launch.op == "q" else launch for launch in LAUNCHES)
    found = waiting(graph, replace(PLAN, launches=launches), costs_of(graph, TIMES))
    assert waits(found)["q"] == ("u",)
    verify(graph, place_releases(graph, found))


def test_waits_that_follow_from_others_are_gone() -> None:
    """Op e needs x; for memory it waits for y, which waits for x itself, and so the join needs no wait for y."""
    graph = graph_of("a-b b-e x-y x-e", names="axybe", outputs="e")
    launches = (
        Launch("a", 0), Launch("x", 1, (FORK,)), Launch("y", 2, ("x",)), Launch("b", 0), Launch("e", 0, ("x",)),
    )  # fmt: skip
    schedule = Schedule("by hand", 3, launches, ("y",))
    found = waiting(graph, schedule, costs_of(graph, {"a": 20.0, "b": 20.0, "e": 1.0, "x": 1.0, "y": 1.0}))
    assert waits(found) == {"x": (FORK,), "y": ("x",), "b": ("y",)}
    assert found.join_waits == ()
    verify(graph, place_releases(graph, found))


def test_memory_that_others_gave_back_is_waited_for_again_and_again() -> None:
    """Chains of ten on two streams: what each has done with is known to the other one op later."""
    left, right = ([f"{side}{at}" for at in range(10)] for side in "lr")
    edges = [*pairwise(left), *pairwise(right)]
    names = [name for pair in zip(left, right, strict=True) for name in pair]
    graph = graph_of(edges, names, outputs=["l9", "r9"])
    launches = tuple(Launch(name, int(name[0] == "r"), (FORK,) if name == "r0" else ()) for name in names)
    schedule = Schedule("by hand", 2, launches, ("r9",))
    found = waiting(graph, schedule, costs_of(graph, 10.0))
    assert found.wait_count > 10
    verify(graph, place_releases(graph, found))


@settings(max_examples=60)
@given(data=st.data(), streams=st.integers(1, 4), least_bytes=st.sampled_from([1, 1024, 2048]))
def test_the_run_takes_no_longer_and_is_still_right(data: st.DataObject, streams: int, least_bytes: int) -> None:
    graph = data.draw(random_graphs())
    costs = data.draw(random_costs(graph))
    policy = data.draw(st.sampled_from(["critical_path", "path_cover"]))
    schedule = synchronize(graph, POLICIES[policy](graph, costs, PROFILE, streams, frozenset()))
    edge_us = PROFILE.over(schedule.streams).cross_stream_edge_us
    found = wait_for_memory(graph, schedule, simulate(schedule, costs, PROFILE), edge_us, least_bytes)
    verify(graph, place_releases(graph, found))
    assert simulate(found, costs, PROFILE).makespan_us == pytest.approx(simulate(schedule, costs, PROFILE).makespan_us)


#   stream 0:  a ── b ── c ── d ── e        x, y and z are copies for c, d and e, and stream 1 is free from the start
#   stream 1:  x ── y ── z
COPIES = graph_of("x-c y-d z-e a-b b-c c-d d-e", names="axybzcde", outputs="e")
COPYING = Schedule(
    "by hand",
    2,
    tuple(
        Launch(name, int(name in "xyz"), {"x": (FORK,), "c": ("x",), "d": ("y",), "e": ("z",)}.get(name, ()))
        for name in "axybzcde"
    ),
)
COPY_US = {**dict.fromkeys("abcde", 10.0), **dict.fromkeys("xyz", 1.0)}


@pytest.mark.parametrize(("slack", "known"), [(0.0, {}), (0.7, {"z": "b"}), (0.9, {"y": "b", "z": "c"})])
def test_what_can_wait_waits_longer_the_more_of_its_slack_it_may_use_up(slack: float, known: dict[str, str]) -> None:
    """At once, nothing is free that the copies could use; each would be in time later."""
    costs = costs_of(COPIES, COPY_US)
    timeline = simulate(COPYING, costs, PROFILE)
    found = wait_for_memory(COPIES, COPYING, timeline, EDGE_US, 1, slack)
    before = {op: set(waits(found).get(op, ())) - {FORK} for op in "xyz"}
    assert before == {op: {known[op]} if op in known else set() for op in "xyz"}
    assert simulate(found, costs, PROFILE).makespan_us == timeline.makespan_us
    verify(COPIES, place_releases(COPIES, found))


@settings(max_examples=60)
@given(data=st.data(), streams=st.integers(1, 4), slack=st.sampled_from([0.3, 0.9, 0.99]))
def test_slack_is_what_a_launch_can_be_late_by(data: st.DataObject, streams: int, slack: float) -> None:
    """Where ops do not slow each other down: then the run takes no longer than an edge or so for each rounding."""
    graph = data.draw(random_graphs())
    costs = {
        name: replace(cost, sm_share=0.01, bandwidth_share=0.01)
        for name, cost in data.draw(random_costs(graph)).items()
    }
    policy = data.draw(st.sampled_from(["critical_path", "path_cover"]))
    schedule = synchronize(graph, POLICIES[policy](graph, costs, PROFILE, streams, frozenset()))
    profile = PROFILE.over(schedule.streams)
    timeline = simulate(schedule, costs, PROFILE)
    found = wait_for_memory(graph, schedule, timeline, profile.cross_stream_edge_us, 1, slack)
    verify(graph, place_releases(graph, found))
    assert found.stream_of == schedule.stream_of
    assert simulate(found, costs, PROFILE).makespan_us <= timeline.makespan_us + 1e-6
