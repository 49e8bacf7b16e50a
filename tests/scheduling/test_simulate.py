"""The simulator on schedules small enough to be worked out by hand, and what holds for all schedules."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from autostream.errors import ScheduleError
from autostream.ir import FORK, JOIN, Costs, DeviceProfile, Launch, OpCost, OpGraph, Schedule, Slice
from autostream.scheduling.simulate import simulate
from tests.scheduling.graphs import FREE, planned, profile_with
from tests.scheduling.graphs import PRICED as PLANNED_ON

PRICED = profile_with(same_stream_edge_us=0.5, cross_stream_edge_us=2.0, fork_us=4.0, join_us=3.0)


def cost(duration_us: float, sm_share: float = 0.1, bandwidth_share: float = 0.0) -> OpCost:
    return OpCost(duration_us, sm_share, bandwidth_share, "roofline")


def plan(*launches: Launch, join: tuple[str, ...] = ()) -> Schedule:
    return Schedule("test", 1 + max(launch.stream for launch in launches), launches, join_waits=join)


def spans(
    schedule: Schedule, costs: dict[str, OpCost], profile: DeviceProfile, captured: bool = True
) -> dict[str, tuple[float, float]]:
    return {s.op: (s.start_us, s.end_us) for s in simulate(schedule, costs, profile, captured=captured).slices}


PARALLEL = plan(Launch("a", 0), Launch("b", 1, waits=(FORK,)), join=("b",))
"""
stream 0   a
stream 1   b
"""


@example([48.0, 15.553372766170375])
@given(st.lists(st.floats(0.1, 100.0), min_size=1, max_size=30))
def test_one_stream_is_exact_whatever_the_durations(durations: list[float]) -> None:
    costs = {f"n{at}": cost(duration, 1.0, 1.0) for at, duration in enumerate(durations)}
    expected = -0.5
    for duration in durations:
        expected = expected + 0.5 + duration
    assert simulate(plan(*(Launch(name, 0) for name in costs)), costs, PRICED).makespan_us == expected


@pytest.mark.parametrize(
    ("sm_share", "bandwidth_share", "end"),
    [
        pytest.param(0.5, 0.5, 10.0, id="both fit"),
        pytest.param(0.75, 0.1, 15.0, id="1.5 times the multiprocessors"),
        pytest.param(0.1, 0.6, 12.0, id="1.2 times the bandwidth"),
        pytest.param(0.75, 0.6, 15.0, id="the scarcer resource decides"),
    ],
)
def test_ops_slow_each_other_down_if_they_need_more_than_there_is(
    sm_share: float, bandwidth_share: float, end: float
) -> None:
    found = spans(PARALLEL, dict.fromkeys("ab", cost(10.0, sm_share, bandwidth_share)), FREE)
    assert (found["a"], found["b"]) == (pytest.approx((0, end)), pytest.approx((0, end)))


def test_ops_run_at_full_speed_again_when_others_end() -> None:
    """All fill the device.

    Without edges b(5) ends at 10, at half speed, when a(10) has 5 µs of work left. If b(3) starts after a fork of 4 µs,
    a has done 4 before it and 3 beside it, up to 10. With c(1) at the same time, a and b(10) run at half speed up to 4,
    then all three at a third up to 7.
    """
    assert spans(PARALLEL, {"a": cost(10.0, 1.0), "b": cost(5.0, 1.0)}, FREE)["a"] == (0.0, 15.0)
    late = spans(PARALLEL, {"a": cost(10.0, 1.0), "b": cost(3.0, 1.0)}, PRICED)
    assert (late["a"], late["b"]) == ((0.0, 13.0), (4.0, 10.0))
    three = plan(Launch("a", 0), Launch("b", 1), Launch("c", 2, waits=(FORK,)), join=("b", "c"))
    found = spans(three, {"a": cost(10.0, 1.0), "b": cost(10.0, 1.0), "c": cost(1.0, 1.0)}, PRICED)
    assert [found[name][1] for name in "abc"] == pytest.approx([21.0, 21.0, 7.0])


@pytest.mark.parametrize(("b_us", "c_us"), [(2.0, 12.0), (20.0, 24.5)])
def test_a_wait_costs_an_edge_and_the_latest_input_decides(b_us: float, c_us: float) -> None:
    """Op c waits for a, up to 10, on another stream, and follows b, from 4 on, on its own."""
    schedule = plan(Launch("a", 0), Launch("b", 1, waits=(FORK,)), Launch("c", 1, waits=("a",)), join=("c",))
    assert spans(schedule, {"a": cost(10.0), "b": cost(b_us), "c": cost(1.0)}, PRICED)["c"] == (c_us, c_us + 1)


def test_fork_and_join_count_towards_the_makespan() -> None:
    """Op b ends at 24, and the join is 3 µs later, unless a ends later still. With no op on stream 0, a starts at 4."""
    for a_us, end_us in ((10.0, 27.0), (30.0, 30.0)):
        timeline = simulate(PARALLEL, {"a": cost(a_us), "b": cost(20.0)}, PRICED)
        assert timeline.slices[-1] == Slice(JOIN, 0, end_us, end_us)
        assert timeline.makespan_us == end_us
    timeline = simulate(plan(Launch("a", 1, waits=(FORK,)), join=("a",)), {"a": cost(10.0)}, PRICED)
    assert timeline.slices == (Slice(FORK, 0, 0.0, 0.0), Slice("a", 1, 4.0, 14.0), Slice(JOIN, 0, 17.0, 17.0))
    assert timeline.makespan_us == 17.0


@pytest.mark.parametrize(
    ("launches", "join", "message"),
    [
        ((Launch("a", 0, waits=("b",)), Launch("b", 1, waits=("a",))), (), "a would never start: it waits for b"),
        ((Launch("a", 0, waits=("ghost",)),), (), "a would never start: it waits for ghost"),
        ((Launch("a", 0),), ("ghost",), "<join> would never start: it waits for ghost"),
    ],
)
def test_a_schedule_that_never_ends_is_refused(
    launches: tuple[Launch, ...], join: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ScheduleError, match=message):
        simulate(plan(*launches, join=join), dict.fromkeys("ab", cost(1.0)), FREE)


@given(planned())
def test_ops_take_at_least_their_durations_after_those_they_depend_on(plan: tuple[OpGraph, Costs, Schedule]) -> None:
    """And no resource is used more than once at a time."""
    graph, costs, schedule = plan
    timeline = simulate(schedule, costs, PLANNED_ON)
    assert [s.op for s in timeline.slices if s.op not in (FORK, JOIN)] == [launch.op for launch in schedule.launches]
    start, end, profile = timeline.starts, timeline.ends, PLANNED_ON.over(schedule.streams)
    assert all(end[name] - start[name] >= cost.duration_us - 1e-9 for name, cost in costs.items())
    for before, after in graph.digraph.edges:
        same = schedule.stream_of[before] == schedule.stream_of[after]
        assert start[after] >= end[before] + (profile.same_stream_edge_us if same else profile.cross_stream_edge_us)
    for share in ("sm_share", "bandwidth_share"):
        assert timeline.makespan_us >= sum(c.duration_us * getattr(c, share) for c in costs.values()) - 1e-9


def test_the_front_end_starts_one_kernel_after_the_other() -> None:
    """Three ops are ready at 0, and the front end needs 2 µs for each.

    stream 0   a───────
    stream 1     b─────      2 later
    stream 2       c───      2 later still
    """
    schedule = plan(Launch("a", 0), Launch("b", 1, (FORK,)), Launch("c", 2, (FORK,)), join=("b", "c"))
    found = spans(schedule, dict.fromkeys("abc", cost(5.0)), profile_with(dispatch_us=2.0))
    assert [found[name] for name in ("a", "b", "c", JOIN)] == [(0.0, 5.0), (2.0, 7.0), (4.0, 9.0), (9.0, 9.0)]


def test_without_a_graph_the_host_launches_ops_in_order() -> None:
    """The host needs 4 µs for a launch; d, launched by 12, waits for c until 17."""
    schedule = plan(Launch("a", 0), Launch("b", 1, (FORK,)), Launch("c", 0), Launch("d", 0), join=("b",))
    costs = {"a": cost(1.0), "b": cost(1.0), "c": cost(9.0), "d": cost(1.0)}
    found = spans(schedule, costs, profile_with(launch_us=4.0, dispatch_us=100.0), captured=False)
    assert [found[name] for name in "abcd"] == [(0.0, 1.0), (4.0, 5.0), (8.0, 17.0), (17.0, 18.0)]
