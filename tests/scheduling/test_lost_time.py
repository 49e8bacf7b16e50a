"""What each cause adds to a schedule's time, on schedules small enough to be worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from autostream.ir import FORK, Costs, DeviceProfile, Launch, OpGraph, Schedule
from autostream.scheduling.lost_time import Cause, Chain, break_down, longest_chain, wait_us
from autostream.scheduling.policies.sequential import one_stream
from autostream.scheduling.simulate import run_us, simulate
from tests.scheduling.graphs import FREE, costs_of, graph_of, planned, profile_with

EDGES = profile_with(same_stream_edge_us=1.0, cross_stream_edge_us=2.0, fork_us=3.0, join_us=4.0)

PAIR = graph_of((), names="ab")
THREE = graph_of((), names="abc")
CHAIN = graph_of("a-b b-c")
BRANCHES = graph_of("a-b a-d b-c c-e d-e", names="abcde")
"""
┌─ b 4 ── c 4 ─┐      18 µs of work, 12 of it in line; two streams that never wait would take 9
a 2            e 2
└───── d 6 ────┘
"""
TWO = (Launch("a", 0), Launch("b", 1, waits=(FORK,)))
PARALLEL = Schedule("test", 2, TWO, join_waits=("b",))
IN_TURN = Schedule("test", 2, (*TWO, Launch("c", 0)), join_waits=("b",))
ASIDE = Schedule("test", 3, (*TWO, Launch("c", 2, waits=(FORK,))), join_waits=("b", "c"))
BRANCHED = Schedule(
    "test",
    2,
    (Launch("a", 0), Launch("b", 0), Launch("d", 1, waits=("a",)), Launch("c", 0), Launch("e", 0, ("d",))),
)
SHORT = {"a": 2.0, "b": 4.0, "c": 4.0, "d": 6.0, "e": 2.0}
THREE_STREAMS = profile_with(fork_us=1.0, join_us=1.0, per_stream_us=2.0)


@pytest.mark.parametrize(
    ("graph", "schedule", "costs", "profile", "predicted_us", "ideal_us", "losses"),
    [
        pytest.param(PAIR, PARALLEL, {}, FREE, 10.0, 10.0, {}, id="two streams that are always busy"),
        pytest.param(CHAIN, one_stream(CHAIN), {}, EDGES, 32.0, 32.0, {}, id="one stream: its gaps are no cause"),
        pytest.param(
            PAIR, PARALLEL, {"sm_share": 0.75}, FREE, 15.0, 10.0, {Cause.MULTIPROCESSORS: 5.0}, id="multiprocessors"
        ),
        pytest.param(
            PAIR, PARALLEL, {"bandwidth_share": 0.6}, FREE, 12.0, 10.0, {Cause.BANDWIDTH: 2.0}, id="bandwidth"
        ),
        pytest.param(
            *(PAIR, PARALLEL, {"sm_share": 0.6, "bandwidth_share": 0.75}, FREE, 15.0, 10.0),
            {Cause.BANDWIDTH: 3.0, Cause.MULTIPROCESSORS: 2.0},
            id="bandwidth takes less, so it counts first",
        ),
        pytest.param(PAIR, PARALLEL, {}, EDGES, 17.0, 10.0, {Cause.WAITS: 7.0}, id="fork and join"),
        pytest.param(THREE, ASIDE, {}, THREE_STREAMS, 16.0, 10.0, {Cause.WAITS: 6.0}, id="waits of three streams"),
        pytest.param(BRANCHES, BRANCHED, {"durations": SHORT}, FREE, 12.0, 9.0, {Cause.CHAIN: 3.0}, id="a chain"),
        pytest.param(
            THREE, IN_TURN, {}, FREE, 20.0, 15.0, {Cause.BUSY: 5.0}, id="c could run beside a, but is after it"
        ),
        pytest.param(PAIR, PARALLEL, {}, profile_with(replay_us=3.0), 13.0, 13.0, {}, id="the overhead of a replay"),
    ],
)
def test_the_losses_of_drawn_schedules(
    graph: OpGraph,
    schedule: Schedule,
    costs: dict[str, object],
    profile: DeviceProfile,
    predicted_us: float,
    ideal_us: float,
    losses: dict[Cause, float],
) -> None:
    """Ops take 10 µs unless given otherwise."""
    found = break_down(graph, schedule, costs_of(graph, **{"durations": 10.0, **costs}), profile)  # type: ignore[arg-type]
    assert (found.predicted_us, found.ideal_us) == pytest.approx((predicted_us, ideal_us))
    assert {cause: us for cause, us in found.losses_us.items() if us} == pytest.approx(losses)
    assert found.lost_us == pytest.approx(sum(losses.values()))
    assert sum(found.share(cause) for cause in Cause) == pytest.approx(1.0 if losses else 0.0)


@pytest.mark.parametrize(("fields", "captured"), [({"launch_us": 3.0}, False), ({"dispatch_us": 3.0}, True)])
def test_launches_count_for_the_host_without_a_graph_and_for_the_device_with_one(
    fields: dict[str, float], captured: bool
) -> None:
    """The second op starts at 3 µs, on whatever stream, and ends at 13."""
    costs = costs_of(PAIR, 10.0)
    found = break_down(PAIR, PARALLEL, costs, profile_with(**fields), captured=captured)
    assert (found.predicted_us, found.ideal_us, found.losses_us[Cause.LAUNCHES]) == (13.0, 10.0, 3.0)
    assert break_down(PAIR, PARALLEL, costs, profile_with(**fields), captured=not captured).lost_us == 0.0


def test_waits_cost_more_where_more_streams_are_in_use() -> None:
    profile = profile_with(cross_stream_edge_us=2.0, per_stream_us=0.5)
    assert [wait_us(profile, streams) for streams in (1, 2, 3, 4)] == [2.0, 2.0, 2.5, 3.0]


def test_gaps_are_part_of_a_chain() -> None:
    """So a-b-c, with 3 µs and two gaps, is longer than d, with 4 µs."""
    graph = graph_of("a-b b-c", names="abcd")
    costs = costs_of(graph, {"d": 4.0})
    assert longest_chain(graph, costs, EDGES) == Chain(("a", "b", "c"), 3.0, 5.0)
    assert longest_chain(graph, costs, FREE) == Chain(("d",), 4.0, 4.0)
    assert longest_chain(graph_of(()), {}, EDGES) == Chain((), 0.0, 0.0)


@given(planned())
def test_ideal_and_losses_add_up_to_the_predicted_time(plan: tuple[OpGraph, Costs, Schedule]) -> None:
    graph, costs, schedule = plan
    gpu = replace(EDGES, per_stream_us=0.5, dispatch_us=1.5, replay_us=2.0)
    found = break_down(graph, schedule, costs, gpu)
    assert found.predicted_us == run_us(schedule, costs, gpu)
    assert found.ideal_us + sum(found.losses_us.values()) == pytest.approx(found.predicted_us)
    assert all(us >= 0 for us in found.losses_us.values())
    assert longest_chain(graph, costs, gpu).us <= found.predicted_us + 1e-6, "no schedule is faster than its chain"
    one_us = simulate(one_stream(graph), costs, gpu).makespan_us
    assert found.ideal_us <= one_us / schedule.streams + gpu.replay_us
