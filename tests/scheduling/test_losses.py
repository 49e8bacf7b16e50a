"""What each cause adds to a schedule's time, on schedules small enough to be worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autostream.ir import FORK, Launch, OpCost, OpGraph, Schedule
from autostream.scheduling.losses import Breakdown, Cause, Chain, break_down, longest_chain, wait_us
from autostream.scheduling.policies import POLICIES
from autostream.scheduling.policies.sequential import one_stream
from autostream.scheduling.simulate import run_us, simulate
from autostream.scheduling.synchronize import synchronize
from tests.scheduling.graphs import costs_of, graph_of, profile_with, random_costs, random_graphs

FREE = profile_with()
PRICED = profile_with(same_stream_edge_us=1.0, cross_stream_edge_us=2.0, fork_us=3.0, join_us=4.0)
GPU = replace(PRICED, per_stream_us=0.5, dispatch_us=1.5, replay_us=2.0)
"""With a front end that some of the ops have to wait for."""

PAIR = graph_of((), names="ab")
SIDE_BY_SIDE = Schedule("test", 2, (Launch("a", 0), Launch("b", 1, waits=(FORK,))), join_waits=("b",))
"""
stream 0   a
stream 1   b
"""


def parts_of(found: Breakdown) -> dict[Cause, float]:
    """The causes that cost anything."""
    return {cause: us for cause, us in found.losses_us.items() if us}


def test_nothing_is_lost_where_two_streams_are_busy_all_the_time() -> None:
    found = break_down(PAIR, SIDE_BY_SIDE, costs_of(PAIR, 10.0), FREE)
    assert (found.predicted_us, found.ideal_us, found.lost_us, parts_of(found)) == (10.0, 10.0, 0.0, {})
    assert {found.share(cause) for cause in Cause} == {0.0}, "no division by zero"


def test_one_stream_loses_to_nothing_but_what_it_is() -> None:
    """Its gaps are no cause: there is no stream without them."""
    chain = graph_of("a-b b-c")
    alone = Schedule("sequential", 1, tuple(Launch(name, 0) for name in "abc"))
    found = break_down(chain, alone, costs_of(chain, 10.0), PRICED)
    assert (found.predicted_us, found.ideal_us, parts_of(found)) == (32.0, 32.0, {})


@pytest.mark.parametrize(
    ("sm_share", "bandwidth_share", "parts"),
    [
        pytest.param(0.75, 0.25, {Cause.MULTIPROCESSORS: 5.0}, id="multiprocessors are asked for 1.5 times"),
        pytest.param(0.25, 0.6, {Cause.BANDWIDTH: 2.0}, id="bandwidth is asked for 1.2 times"),
        pytest.param(0.6, 0.75, {Cause.BANDWIDTH: 3.0, Cause.MULTIPROCESSORS: 2.0}, id="both; the first takes less"),
    ],
)
def test_what_is_asked_for_more_than_once_is_lost_time(
    sm_share: float, bandwidth_share: float, parts: dict[Cause, float]
) -> None:
    found = break_down(PAIR, SIDE_BY_SIDE, costs_of(PAIR, 10.0, sm_share, bandwidth_share), FREE)
    assert parts_of(found) == pytest.approx(parts)


def test_fork_and_join_are_waits() -> None:
    """b(10) starts at 3 and ends at 13, the run 4 later; one stream would take 21, so two could do it in 10.5."""
    found = break_down(PAIR, SIDE_BY_SIDE, costs_of(PAIR, 10.0), PRICED)
    assert (found.predicted_us, found.ideal_us) == (17.0, 10.0), "no gap is on a stream with one op"
    assert parts_of(found) == {Cause.WAITS: 7.0}


def test_a_chain_of_data_keeps_streams_idle() -> None:
    """Whatever is done, d is too short to fill the second stream.

    ┌─ b 4 ── c 4 ─┐      18 µs of work, 12 of it in line; two streams that never wait would take 9
    a 2            e 2
    └───── d 6 ────┘
    """
    graph = graph_of("a-b a-d b-c c-e d-e", names="abcde")
    costs = costs_of(graph, {"a": 2.0, "b": 4.0, "c": 4.0, "d": 6.0, "e": 2.0})
    launches = (Launch("a", 0), Launch("b", 0), Launch("d", 1, waits=("a",)), Launch("c", 0), Launch("e", 0, ("d",)))
    found = break_down(graph, Schedule("test", 2, launches), costs, FREE)
    assert (found.predicted_us, found.ideal_us) == (12.0, 9.0)
    assert parts_of(found) == {Cause.CHAIN: 3.0}
    assert found.share(Cause.CHAIN) == 1.0


def test_ops_that_could_start_wait_their_turn() -> None:
    """Op c could run beside both, but comes after a.

    stream 0   a ── c
    stream 1   b
    """
    three = graph_of((), names="abc")
    launches = (Launch("a", 0), Launch("b", 1, waits=(FORK,)), Launch("c", 0))
    found = break_down(three, Schedule("test", 2, launches, join_waits=("b",)), costs_of(three, 10.0), FREE)
    assert (found.predicted_us, found.ideal_us) == (20.0, 15.0)
    assert parts_of(found) == {Cause.TURNS: 5.0}


@pytest.mark.parametrize(
    ("fields", "captured"),
    [({"launch_us": 3.0}, False), ({"dispatch_us": 3.0}, True)],
)
def test_what_starts_one_after_the_other_is_late(fields: dict[str, float], captured: bool) -> None:
    """The second op starts at 3 µs, on whatever stream, and ends at 13."""
    costs = costs_of(PAIR, 10.0)
    found = break_down(PAIR, SIDE_BY_SIDE, costs, profile_with(**fields), captured=captured)
    assert (found.predicted_us, found.ideal_us, parts_of(found)) == (13.0, 10.0, {Cause.LAUNCHES: 3.0})
    other = break_down(PAIR, SIDE_BY_SIDE, costs, profile_with(**fields), captured=not captured)
    assert parts_of(other) == {}, "either the host launches the ops or the device the kernels of a graph"


def test_what_a_replay_takes_is_lost_to_nothing() -> None:
    costs = costs_of(PAIR, 10.0)
    found = break_down(PAIR, SIDE_BY_SIDE, costs, profile_with(replay_us=3.0))
    assert (found.predicted_us, found.ideal_us, found.lost_us) == (13.0, 13.0, 0.0)
    assert break_down(PAIR, SIDE_BY_SIDE, costs, profile_with(replay_us=3.0), captured=False).predicted_us == 10.0


def test_what_more_streams_add_to_a_wait_is_part_of_it() -> None:
    """Side streams start 1 + 2 µs late, and the join is as late again."""
    three = graph_of((), names="abc")
    sides = (Launch("a", 0), Launch("b", 1, waits=(FORK,)), Launch("c", 2, waits=(FORK,)))
    profile = profile_with(fork_us=1.0, join_us=1.0, per_stream_us=2.0)
    found = break_down(three, Schedule("test", 3, sides, join_waits=("b", "c")), costs_of(three, 10.0), profile)
    assert (found.predicted_us, parts_of(found)) == (16.0, {Cause.WAITS: 6.0})


def test_waits_cost_more_where_more_streams_are_in_use() -> None:
    profile = profile_with(cross_stream_edge_us=2.0, per_stream_us=0.5)
    assert [wait_us(profile, streams) for streams in (1, 2, 3, 4)] == [2.0, 2.0, 2.5, 3.0]


def test_gaps_are_part_of_a_chain() -> None:
    chain = graph_of("a-b b-c")
    assert longest_chain(chain, costs_of(chain, 10.0), PRICED) == Chain(("a", "b", "c"), 30.0, 32.0)
    assert longest_chain(graph_of(()), {}, PRICED) == Chain((), 0.0, 0.0)


def test_many_short_ops_are_a_longer_chain_than_few_long_ones() -> None:
    """a-b-c takes 3 µs and two gaps, d 4 µs."""
    graph = graph_of("a-b b-c", names="abcd")
    costs = costs_of(graph, {"d": 4.0})
    assert longest_chain(graph, costs, PRICED) == Chain(("a", "b", "c"), 3.0, 5.0)
    assert longest_chain(graph, costs, FREE) == Chain(("d",), 4.0, 4.0)


@st.composite
def planned(draw: st.DrawFn) -> tuple[OpGraph, Schedule, dict[str, OpCost]]:
    graph = draw(random_graphs())
    costs = dict(draw(random_costs(graph)))
    policy, streams = draw(st.sampled_from(sorted(POLICIES))), draw(st.integers(1, 4))
    return graph, synchronize(graph, POLICIES[policy](graph, costs, PRICED, streams, frozenset())), costs


@given(planned())
def test_the_parts_add_up_to_what_is_predicted(plan: tuple[OpGraph, Schedule, dict[str, OpCost]]) -> None:
    graph, schedule, costs = plan
    found = break_down(graph, schedule, costs, GPU)
    assert found.predicted_us == run_us(schedule, costs, GPU)
    assert found.ideal_us + sum(found.losses_us.values()) == pytest.approx(found.predicted_us)
    assert all(us >= 0 for us in found.losses_us.values())
    assert longest_chain(graph, costs, GPU).us <= found.predicted_us + 1e-6, "no schedule is faster than its chain"
    one_us = simulate(one_stream(graph), costs, GPU).makespan_us
    assert found.ideal_us <= one_us / schedule.streams + GPU.replay_us
