"""Slack: as late as may be, everything still comes after what it needs, and the end stays where it is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autostream.ir import FORK, Launch, Schedule, Timeline
from autostream.scheduling.policies import POLICIES
from autostream.scheduling.postpone import delayed
from autostream.scheduling.simulate import simulate
from autostream.scheduling.synchronize import synchronize
from tests.scheduling.brute_force import stream_edges, wait_edges
from tests.scheduling.graphs import costs_of, graph_of, profile_with, random_costs, random_graphs

PROFILE = profile_with(same_stream_edge_us=0.5, cross_stream_edge_us=2.0, fork_us=1.0, join_us=1.0)
EDGE_US = 2.0

#   stream 0:  a ── b ── c          x is for c, y for nobody but the join
#   stream 1:  x ── y
GRAPH = graph_of("a-b b-c x-c", names="axybc", outputs="cy")
SCHEDULE = Schedule(
    "by hand",
    2,
    (Launch("a", 0), Launch("x", 1, (FORK,)), Launch("y", 1), Launch("b", 0), Launch("c", 0, ("x",))),
    join_waits=("y",),
)
COSTS = costs_of(GRAPH, {"a": 10.0, "b": 10.0, "c": 10.0, "x": 1.0, "y": 1.0})


def starts(timeline: Timeline) -> dict[str, float]:
    return {piece.op: piece.start_us for piece in timeline.slices}


def test_a_launch_may_be_as_late_as_the_next_on_its_stream_and_those_that_wait_for_it_allow() -> None:
    """By hand: a 0–10, b 10.5–20.5, c 21–31; x 1–2, y 2.5–3.5, and the end is at 31.

    An edge takes 2: y may end that much before the end, so start at 28; x before c, so start at 18.
    """
    early = simulate(SCHEDULE, COSTS, PROFILE)
    assert starts(early) | {"y": 2.5} == starts(early)
    late = starts(delayed(SCHEDULE, early, EDGE_US, 1.0))
    assert {op: late[op] for op in "abcxy"} == {"a": 0.0, "b": 10.5, "c": 21.0, "x": 18.0, "y": 28.0}
    half = starts(delayed(SCHEDULE, early, EDGE_US, 0.5))
    assert {op: half[op] for op in "xy"} == {"x": (1.0 + 18.0) / 2, "y": (2.5 + 28.0) / 2}


def test_without_a_share_of_it_nothing_changes() -> None:
    early = simulate(SCHEDULE, COSTS, PROFILE)
    assert delayed(SCHEDULE, early, EDGE_US, 0.0) == early


@given(data=st.data(), streams=st.integers(1, 4), share=st.floats(0.0, 1.0))
def test_nothing_starts_before_what_it_comes_after_has_ended(data: st.DataObject, streams: int, share: float) -> None:
    graph = data.draw(random_graphs())
    costs = data.draw(random_costs(graph))
    policy = data.draw(st.sampled_from(["critical_path", "path_cover"]))
    schedule = synchronize(graph, POLICIES[policy](graph, costs, PROFILE, streams, frozenset()))
    early = simulate(schedule, costs, PROFILE)
    late = delayed(schedule, early, EDGE_US, share)
    start, end = starts(late), {piece.op: piece.end_us for piece in late.slices}
    for before, after in stream_edges(schedule.launches) | wait_edges(schedule):
        if before in start and after in start:
            assert end[before] <= start[after] + 1e-9
    assert all(start[op] >= us for op, us in starts(early).items())
    assert late.makespan_us == pytest.approx(early.makespan_us)
    lengths = [[piece.end_us - piece.start_us for piece in each.slices] for each in (early, late)]
    assert lengths[1] == pytest.approx(lengths[0])
