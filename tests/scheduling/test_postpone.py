"""Just in time: copies of weights are made when they are needed, nothing else moves, and the order stays right."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autostream.ir import Assignment, Costs, OpGraph, Schedule
from autostream.scheduling.peak import Footprint
from autostream.scheduling.policies import POLICIES
from autostream.scheduling.postpone import LEAD, MAX_SLACK_SHARE, delayed, postponed
from autostream.scheduling.simulate import simulate
from autostream.scheduling.synchronize import synchronize
from autostream.scheduling.verify import verify
from tests.scheduling.graphs import costs_of, graph_of, profile_with, random_costs, random_graphs

PROFILE = profile_with(same_stream_edge_us=0.5, cross_stream_edge_us=2.0, fork_us=1.0, join_us=1.0)
EDGE_US = 2.0
LENGTH = 8


def copied(length: int = LENGTH, convolution_us: float = 10.0) -> tuple[OpGraph, Costs]:
    """A chain of convolutions, each with a copy of its weight in another layout, four times as large as what flows.

    c0 ── c1 ── c2 ── …
    │     │     │
    w0    w1    w2
    """
    edges = [(f"w{at}", f"c{at}") for at in range(length)]
    edges += [(f"c{at}", f"c{at + 1}") for at in range(length - 1)]
    names = [name for at in range(length) for name in (f"w{at}", f"c{at}")]
    graph = graph_of(edges, names, outputs=[f"c{length - 1}"])
    storages = {n: replace(s, bytes=4096 if n[0] == "w" else s.bytes) for n, s in graph.storages.items()}
    graph = replace(graph, storages=storages)
    return graph, costs_of(graph, {name: 1.0 if name[0] == "w" else convolution_us for name in names})


def eager(graph: OpGraph, costs: Costs, streams: int = 2) -> Schedule:
    return synchronize(graph, POLICIES["critical_path"](graph, costs, PROFILE, streams, frozenset()))


def late(graph: OpGraph, schedule: Schedule, costs: Costs) -> Schedule:
    return synchronize(graph, postponed(graph, schedule, simulate(schedule, costs, PROFILE), EDGE_US))


def test_copies_of_weights_are_launched_when_they_are_needed() -> None:
    """Before, all of them come first on stream 1; then each a bit before the convolution that reads it."""
    graph, costs = copied()
    before = eager(graph, costs)
    after = late(graph, before, costs)
    assert after.stream_of == before.stream_of
    order = [launch.op for launch in after.launches]
    assert all(order.index(f"c{at - 2}") < order.index(f"w{at}") < order.index(f"c{at}") for at in range(3, LENGTH))
    assert [op for op in order if op[0] == "c"] == [f"c{at}" for at in range(LENGTH)]


@pytest.mark.parametrize("convolution_us", [10.0, 4.0])
def test_the_lead_is_kept(convolution_us: float) -> None:
    """Each copy would end ``LEAD`` edges before its convolution starts; the first ones cannot.

    That is shorter than one convolution, or longer.
    """
    graph, costs = copied(convolution_us=convolution_us)
    schedule = eager(graph, costs)
    timeline = simulate(schedule, costs, PROFILE)
    start = {piece.op: piece.start_us for piece in timeline.slices}
    order = postponed(graph, schedule, timeline, EDGE_US).order
    for at in range(LENGTH):
        earlier = [op for op in order[: order.index(f"w{at}")] if op[0] == "c"]
        moment = max(start[f"w{at}"], start[f"c{at}"] - LEAD * EDGE_US - 1.0)
        assert all(start[op] <= moment for op in earlier)
        assert sum(start[f"c{each}"] < moment for each in range(LENGTH)) <= len(earlier)


def test_what_frees_as_much_as_it_takes_stays_where_it_is() -> None:
    """A branch that nothing hurries, beside c and g: d and e turn 1 KiB into 1 KiB, and only b adds some."""
    graph = graph_of("a-b b-d d-e a-c c-g g-f e-f", names="abdecgf", outputs="f")
    costs = costs_of(graph, {**dict.fromkeys("abdef", 1.0), **dict.fromkeys("cg", 25.0)})
    schedule = eager(graph, costs)
    timeline = simulate(schedule, costs, PROFILE)
    assert postponed(graph, schedule, timeline, EDGE_US).order == tuple(launch.op for launch in schedule.launches)


def test_a_chain_that_grows_moves_as_a_whole() -> None:
    """The copy w is made of a copy v, which is still needed elsewhere at the end: both wait for the time of c."""
    graph = graph_of("v-w w-c v-c a-b b-c", names="vwabc", outputs="c")
    costs = costs_of(graph, {**dict.fromkeys("vwc", 1.0), "a": 20.0, "b": 20.0})
    schedule = eager(graph, costs)
    order = late(graph, schedule, costs)
    assert [launch.op for launch in order.launches] == ["a", "b", "v", "w", "c"]


def test_what_is_needed_early_lets_copies_that_are_not_go_last() -> None:
    """On stream 1, s comes behind sixteen copies, and c3 needs it: so the copies must be made before, all but three.

    stream 0:  c0 ────────────── c1 ── c2 ── c3 …
    stream 1:  w0 ── … ── w15 ── s
    """
    edges = [(f"w{at}", f"c{at}") for at in range(16)] + [(f"c{at}", f"c{at + 1}") for at in range(15)]
    copies, chain = ([f"{kind}{at}" for at in range(16)] for kind in "wc")
    graph = graph_of([*edges, ("c0", "s"), ("s", "c3")], [*copies, "c0", "s", *chain[1:]], outputs=["c15"])
    costs = costs_of(graph, {name: 1.0 if name in copies else 10.0 for name in graph.ops})
    stream = {name: int(name in (*copies, "s")) for name in graph.ops}
    schedule = synchronize(graph, Assignment("by hand", 2, tuple(graph.ops), stream))
    after = late(graph, schedule, costs)
    order = [launch.op for launch in after.launches if launch.stream == 1]
    assert order.index("s") < 6

    def live(each: Schedule) -> int:
        timeline = delayed(each, simulate(each, costs, PROFILE), EDGE_US, MAX_SLACK_SHARE)
        return Footprint(graph).live_bytes(timeline) // 1024

    assert live(schedule) >= 16, "all copies are there when s runs"
    assert live(after) <= 6


@given(data=st.data(), streams=st.integers(1, 4))
def test_the_order_stays_right_and_so_do_the_streams(data: st.DataObject, streams: int) -> None:
    graph = data.draw(random_graphs())
    costs = data.draw(random_costs(graph))
    policy = data.draw(st.sampled_from(["critical_path", "path_cover"]))
    schedule = synchronize(graph, POLICIES[policy](graph, costs, PROFILE, streams, frozenset()))
    found = late(graph, schedule, costs)
    verify(graph, found)
    assert found.stream_of == schedule.stream_of
    assert (found.policy, found.streams, found.decisions) == (schedule.policy, schedule.streams, schedule.decisions)
