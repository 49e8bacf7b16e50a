"""The fluid simulator on schedules small enough to be worked out by hand, and its invariants on random ones."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from autostream.errors import ScheduleError
from autostream.ir import FORK, JOIN, Launch, OpCost, Schedule, Slice, Timeline
from autostream.scheduling.policies.critical_path import critical_path
from autostream.scheduling.simulate import simulate
from tests.scheduling.graphs import graph_of, profile_with, random_costs, random_graphs, schedule_of

FREE = profile_with()
PRICED = profile_with(same_stream_edge_us=0.5, cross_stream_edge_us=2.0, fork_us=4.0, join_us=3.0)


def cost(duration_us: float, sm_share: float = 0.1, bandwidth_share: float = 0.0) -> OpCost:
    return OpCost(duration_us, sm_share, bandwidth_share, "roofline")


def plan(*launches: Launch, join: tuple[str, ...] = ()) -> Schedule:
    return Schedule("test", 1 + max(launch.stream for launch in launches), launches, join_waits=join)


def span(timeline: Timeline, name: str) -> tuple[float, float]:
    (found,) = [entry for entry in timeline.slices if entry.op == name]
    return found.start_us, found.end_us


BESIDE = plan(Launch("a", 0), Launch("b", 1, waits=(FORK,)), join=("b",))
"""
stream 0   a
stream 1   b
"""


def test_one_stream_takes_its_ops_and_its_gaps() -> None:
    schedule = plan(Launch("a", 0), Launch("b", 0), Launch("c", 0))
    timeline = simulate(schedule, {"a": cost(10.0, 1.0, 1.0), "b": cost(3.0, 1.0), "c": cost(5.0)}, PRICED)
    assert timeline.slices == (Slice("a", 0, 0.0, 10.0), Slice("b", 0, 10.5, 13.5), Slice("c", 0, 14.0, 19.0))
    assert timeline.source == "simulated"


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
        pytest.param(0.75, 0.1, 15.0, id="multiprocessors are asked for 1.5 times"),
        pytest.param(0.1, 0.6, 12.0, id="bandwidth is asked for 1.2 times"),
        pytest.param(0.75, 0.6, 15.0, id="the scarcer resource decides"),
    ],
)
def test_ops_slow_each_other_down_where_a_resource_is_short(
    sm_share: float, bandwidth_share: float, end: float
) -> None:
    costs = dict.fromkeys("ab", cost(10.0, sm_share, bandwidth_share))
    timeline = simulate(BESIDE, costs, FREE)
    assert (span(timeline, "a"), span(timeline, "b")) == (pytest.approx((0, end)), pytest.approx((0, end)))


def test_the_rest_of_an_op_runs_at_full_speed() -> None:
    """Both fill the device: at half speed b(5) ends at 10, when a(10) has 5 µs of work left."""
    timeline = simulate(BESIDE, {"a": cost(10.0, 1.0), "b": cost(5.0, 1.0)}, FREE)
    assert (span(timeline, "a"), span(timeline, "b")) == ((0.0, 15.0), (0.0, 10.0))


def test_an_op_slows_down_when_another_starts() -> None:
    """Op b(3) starts after the fork, at 4; until 10 both run at half speed; a(10) has then done 7 and ends at 13."""
    timeline = simulate(BESIDE, {"a": cost(10.0, 1.0), "b": cost(3.0, 1.0)}, PRICED)
    assert (span(timeline, "a"), span(timeline, "b")) == ((0.0, 13.0), (4.0, 10.0))


def test_three_ops_share_the_device() -> None:
    """Until 4, a(10) and b(10) run at half speed; until 7 all three at a third; a and b then have 7 µs of work left."""
    schedule = plan(Launch("a", 0), Launch("b", 1), Launch("c", 2, waits=(FORK,)), join=("b", "c"))
    timeline = simulate(schedule, {"a": cost(10.0, 1.0), "b": cost(10.0, 1.0), "c": cost(1.0, 1.0)}, PRICED)
    assert [span(timeline, name)[1] for name in "abc"] == pytest.approx([21.0, 21.0, 7.0])


def test_a_wait_costs_an_edge_and_the_latest_input_decides() -> None:
    """Op c waits for a, 0 to 10, on another stream, and follows b, 4 to 6, on its own: 12 is later than 6.5."""
    schedule = plan(Launch("a", 0), Launch("b", 1, waits=(FORK,)), Launch("c", 1, waits=("a",)), join=("c",))
    timeline = simulate(schedule, {"a": cost(10.0), "b": cost(2.0), "c": cost(1.0)}, PRICED)
    assert span(timeline, "c") == (12.0, 13.0)
    longer = simulate(schedule, {"a": cost(10.0), "b": cost(20.0), "c": cost(1.0)}, PRICED)
    assert span(longer, "c") == (24.5, 25.5)


def test_the_join_counts_towards_the_makespan() -> None:
    """Op b ends at 4 + 20, and stream 0 goes on 3 µs later; where a ends later than that, the join is free."""
    timeline = simulate(BESIDE, {"a": cost(10.0), "b": cost(20.0)}, PRICED)
    assert timeline.slices[-1] == Slice(JOIN, 0, 27.0, 27.0)
    assert timeline.makespan_us == 27.0
    longer = simulate(BESIDE, {"a": cost(30.0), "b": cost(20.0)}, PRICED)
    assert longer.slices[-1] == Slice(JOIN, 0, 30.0, 30.0)
    assert longer.makespan_us == 30.0


def test_the_fork_counts_towards_the_makespan() -> None:
    """Nothing runs on stream 0, and the only op cannot start before 4."""
    schedule = plan(Launch("a", 1, waits=(FORK,)), join=("a",))
    timeline = simulate(schedule, {"a": cost(10.0)}, PRICED)
    assert timeline.slices == (Slice(FORK, 0, 0.0, 0.0), Slice("a", 1, 4.0, 14.0), Slice(JOIN, 0, 17.0, 17.0))
    assert timeline.makespan_us == 17.0


@pytest.mark.parametrize(
    ("launches", "message"),
    [
        ((Launch("a", 0, waits=("b",)), Launch("b", 1, waits=("a",))), "a would never start: it waits for b"),
        ((Launch("a", 0, waits=("ghost",)),), "a would never start: it waits for ghost"),
    ],
)
def test_a_schedule_that_waits_for_itself_is_refused(launches: tuple[Launch, ...], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        simulate(plan(*launches), dict.fromkeys("ab", cost(1.0)), FREE)


def test_a_join_with_what_is_not_launched_is_refused() -> None:
    with pytest.raises(ScheduleError, match="<join> would never start: it waits for ghost"):
        simulate(plan(Launch("a", 0), join=("ghost",)), {"a": cost(1.0)}, FREE)


@given(data=st.data(), streams=st.integers(1, 4))
def test_invariants(data: st.DataObject, streams: int) -> None:
    """Each op takes its duration or longer, after all that it must follow; resources are not handed out twice."""
    graph = data.draw(random_graphs())
    costs = data.draw(random_costs(graph))
    schedule = schedule_of(graph, critical_path(graph, costs, PRICED, streams, frozenset()))
    timeline = simulate(schedule, costs, PRICED)
    at = {entry.op: entry for entry in timeline.slices}
    assert [name for name in at if name not in (FORK, JOIN)] == [launch.op for launch in schedule.launches]
    for name, needs in costs.items():
        assert at[name].end_us - at[name].start_us >= needs.duration_us - 1e-9
    for before, after in graph.digraph.edges:
        edge = PRICED.same_stream_edge_us if at[before].stream == at[after].stream else PRICED.cross_stream_edge_us
        assert at[after].start_us >= at[before].end_us + edge
    assert timeline.makespan_us >= sum(needs.duration_us * needs.sm_share for needs in costs.values()) - 1e-9
    assert timeline.makespan_us >= sum(needs.duration_us * needs.bandwidth_share for needs in costs.values()) - 1e-9


def test_an_empty_schedule_takes_no_time() -> None:
    graph = graph_of("")
    assert simulate(schedule_of(graph, critical_path(graph, {}, FREE, 2, frozenset())), {}, FREE).slices == ()


def test_ten_thousand_ops_on_eight_streams() -> None:
    """Eight towers that each fill an eighth of the device run as if alone."""
    graph = graph_of([(f"t{tower}_{at}", f"t{tower}_{at + 1}") for tower in range(8) for at in range(1249)])
    costs = dict.fromkeys(graph.ops, cost(2.0, 0.125, 0.125))
    schedule = schedule_of(graph, critical_path(graph, costs, FREE, 8, frozenset()))
    assert simulate(schedule, costs, FREE).makespan_us == 2500.0


def test_the_front_end_starts_one_kernel_after_the_other() -> None:
    """Three ops are ready at 0, and the front end needs 2 µs for each.

    stream 0   a───────
    stream 1     b─────      2 later
    stream 2       c───      2 later still
    """
    schedule = plan(Launch("a", 0), Launch("b", 1, (FORK,)), Launch("c", 2, (FORK,)), join=("b", "c"))
    timeline = simulate(schedule, dict.fromkeys("abc", cost(5.0)), profile_with(dispatch_us=2.0))
    assert [span(timeline, name) for name in "abc"] == [(0.0, 5.0), (2.0, 7.0), (4.0, 9.0)]
    assert span(timeline, JOIN) == (9.0, 9.0)


def test_uncaptured_ops_wait_for_the_host_that_launches_them_in_order() -> None:
    """The host needs 4 µs for a launch: nothing starts before its turn, but d, launched by 12, waits for c until 17."""
    schedule = plan(Launch("a", 0), Launch("b", 1, (FORK,)), Launch("c", 0), Launch("d", 0), join=("b",))
    costs = {"a": cost(1.0), "b": cost(1.0), "c": cost(9.0), "d": cost(1.0)}
    profile = profile_with(launch_us=4.0, dispatch_us=100.0)
    timeline = simulate(schedule, costs, profile, captured=False)
    assert [span(timeline, name) for name in "abcd"] == [(0.0, 1.0), (4.0, 5.0), (8.0, 17.0), (17.0, 18.0)]


def test_edges_between_streams_grow_with_the_streams_in_use() -> None:
    """Two streams: b starts 2.0 after a. With a third in use, each edge between streams costs 0.5 more."""
    profile = profile_with(cross_stream_edge_us=2.0, fork_us=1.0, join_us=1.0, per_stream_us=0.5)
    two = plan(Launch("a", 0), Launch("b", 1, ("a",)), join=("b",))
    assert simulate(two, dict.fromkeys("ab", cost(1.0)), profile).makespan_us == 1 + 2 + 1 + 1
    three = plan(Launch("a", 0), Launch("b", 1, ("a",)), Launch("c", 2, (FORK,)), join=("b", "c"))
    timeline = simulate(three, dict.fromkeys("abc", cost(1.0)), profile)
    assert timeline.makespan_us == 1 + 2.5 + 1 + 1.5
    assert span(timeline, "c") == (1.5, 2.5)
