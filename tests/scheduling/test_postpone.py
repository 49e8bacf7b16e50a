"""Slack is how late a launch may start; copies of weights are launched when they are needed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autostream.ir import FORK, Costs, Launch, OpGraph, Schedule
from autostream.scheduling.policies import POLICIES
from autostream.scheduling.postpone import LEAD, delayed, postponed
from autostream.scheduling.simulate import simulate
from autostream.scheduling.synchronize import synchronize
from autostream.scheduling.verify import verify
from tests.scheduling.brute_force import stream_edges, wait_edges
from tests.scheduling.graphs import PRICED, costs_of, graph_of, planned

EDGE_US = PRICED.cross_stream_edge_us


@pytest.mark.parametrize(
    ("share", "x_us", "y_us"), [(0.0, 1.0, 2.5), (0.5, (1.0 + 18.0) / 2, (2.5 + 28.0) / 2), (1.0, 18.0, 28.0)]
)
def test_a_launch_may_be_as_late_as_its_stream_and_those_that_wait_for_it_allow(
    share: float, x_us: float, y_us: float
) -> None:
    """By hand: a 0–10, b 10.5–20.5, c 21–31; x 1–2, y 2.5–3.5, and the run ends at 31.

    An edge takes 2 µs: y ends that long before the end, so starts at 28 at the latest; x before c, so at 18.

    0:  a ── b ── c          x is for c, y for the join
    1:  x ── y
    """
    graph = graph_of("a-b b-c x-c", names="axybc", outputs="cy")
    waits = {"x": (FORK,), "c": ("x",)}
    launches = tuple(Launch(name, int(name in "xy"), waits.get(name, ())) for name in "axybc")
    schedule = Schedule("by hand", 2, launches, join_waits=("y",))
    early = simulate(schedule, costs_of(graph, {**dict.fromkeys("abc", 10.0), "x": 1.0, "y": 1.0}), PRICED)
    start = delayed(schedule, early, EDGE_US, share).starts
    assert {op: start[op] for op in "abcxy"} == {"a": 0.0, "b": 10.5, "c": 21.0, "x": x_us, "y": y_us}


@given(data=st.data(), share=st.floats(0.0, 1.0))
def test_delayed_launches_keep_dependencies_durations_and_the_makespan(data: st.DataObject, share: float) -> None:
    _, costs, schedule = data.draw(planned())
    early = simulate(schedule, costs, PRICED)
    late = delayed(schedule, early, EDGE_US, share)
    for before, after in stream_edges(schedule.launches) | wait_edges(schedule):
        if before in late.starts and after in late.starts:
            assert late.ends[before] <= late.starts[after] + 1e-9
    assert all(late.starts[op] >= us for op, us in early.starts.items())
    assert late.makespan_us == pytest.approx(early.makespan_us)
    lengths = [[s.end_us - s.start_us for s in each.slices] for each in (early, late)]
    assert lengths[1] == pytest.approx(lengths[0])


LENGTH = 8


def copied(convolution_us: float) -> tuple[OpGraph, Costs, Schedule]:
    """A chain of convolutions, each with a copy of its weight, four times as large as activations.

    c0 ── c1 ── c2 ── …
    │     │     │
    w0    w1    w2
    """
    edges = [(f"w{at}", f"c{at}") for at in range(LENGTH)]
    edges += [(f"c{at}", f"c{at + 1}") for at in range(LENGTH - 1)]
    names = [name for at in range(LENGTH) for name in (f"w{at}", f"c{at}")]
    graph = graph_of(edges, names, outputs=[f"c{LENGTH - 1}"])
    storages = {n: replace(s, bytes=4096 if n[0] == "w" else s.bytes) for n, s in graph.storages.items()}
    graph = replace(graph, storages=storages)
    costs = costs_of(graph, {name: 1.0 if name[0] == "w" else convolution_us for name in names})
    return graph, costs, by_critical_path(graph, costs)


def by_critical_path(graph: OpGraph, costs: Costs) -> Schedule:
    return synchronize(graph, POLICIES["critical_path"](graph, costs, PRICED, 2, frozenset()))


@pytest.mark.parametrize("convolution_us", [10.0, 4.0])
def test_copies_of_weights_end_three_edges_before_they_are_needed(convolution_us: float) -> None:
    """That is shorter or longer than one convolution; the first copies cannot."""
    graph, costs, schedule = copied(convolution_us)
    timeline = simulate(schedule, costs, PRICED)
    found = postponed(graph, schedule, timeline, EDGE_US)
    order = found.order
    assert found.stream == schedule.stream_of
    assert [op for op in order if op[0] == "c"] == [f"c{at}" for at in range(LENGTH)]
    start = timeline.starts
    for at in range(LENGTH):
        earlier = [op for op in order[: order.index(f"w{at}")] if op[0] == "c"]
        time = max(start[f"w{at}"], start[f"c{at}"] - LEAD * EDGE_US - 1.0)
        assert all(start[op] <= time for op in earlier)
        assert sum(start[f"c{each}"] < time for each in range(LENGTH)) <= len(earlier)


def test_an_op_that_frees_as_much_as_it_allocates_stays_where_it_is() -> None:
    """A branch with slack beside c and g: d and e turn 1 KiB into 1 KiB, and only b adds some."""
    graph = graph_of("a-b b-d d-e a-c c-g g-f e-f", names="abdecgf", outputs="f")
    costs = costs_of(graph, {**dict.fromkeys("abdef", 1.0), **dict.fromkeys("cg", 25.0)})
    schedule = by_critical_path(graph, costs)
    order = postponed(graph, schedule, simulate(schedule, costs, PRICED), EDGE_US).order
    assert order == tuple(launch.op for launch in schedule.launches)


def test_a_chain_of_copies_moves_as_a_whole() -> None:
    """The copy w is made of a copy v, which c needs as well: both are made just before c."""
    graph = graph_of("v-w w-c v-c a-b b-c", names="vwabc", outputs="c")
    costs = costs_of(graph, {**dict.fromkeys("vwc", 1.0), "a": 20.0, "b": 20.0})
    schedule = by_critical_path(graph, costs)
    assert postponed(graph, schedule, simulate(schedule, costs, PRICED), EDGE_US).order == ("a", "b", "v", "w", "c")


@given(planned())
def test_a_postponed_schedule_is_right_and_has_the_same_streams(plan: tuple[OpGraph, Costs, Schedule]) -> None:
    graph, costs, schedule = plan
    found = synchronize(graph, postponed(graph, schedule, simulate(schedule, costs, PRICED), EDGE_US))
    verify(graph, found)
    assert found.stream_of == schedule.stream_of
    assert (found.policy, found.streams, found.decisions) == (schedule.policy, schedule.streams, schedule.decisions)
