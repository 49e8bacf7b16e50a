"""Collectives on a stream of their own, by every policy, and the time in which nothing hides them.

b0 ──▶ b1 ──▶ b2        a backward; each gradient is reduced (r), waited for (w) and used (u)
│      │      │
r0 ──▶ r1 ──▶ r2        ORDER of one process group
w0-u0  w1-u1  w2-u2
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice, pairwise

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autostream.ir import Dependency, Hazard, OpCost, OpGraph, Slice, Timeline
from autostream.scheduling.coarsen import coarsen
from autostream.scheduling.communication import exposed_us, followers
from autostream.scheduling.peak import Footprint
from autostream.scheduling.policies import POLICIES
from autostream.scheduling.policies.search import EVENTS_PER_S, search, variants
from autostream.scheduling.simulate import simulate
from autostream.scheduling.synchronize import synchronize
from autostream.scheduling.verify import verify
from tests.scheduling.graphs import PRICED, graph_of, random_costs, random_graphs

LAYERS = 4
REDUCTIONS = {f"r{at}" for at in range(LAYERS)}
NONE = frozenset[str]()


def backward(us: float = 10.0) -> tuple[OpGraph, dict[str, OpCost]]:
    """The graph above, and costs: each op takes 10 µs and a third of the device, a reduction ``us``, a wait nothing."""
    chain = [(f"b{at}", f"b{at + 1}") for at in range(LAYERS - 1)]
    used = [(f"{a}{at}", f"{b}{at}") for at in range(LAYERS) for a, b in ("br", "rw", "wu")]
    names = [*(f"b{at}" for at in range(LAYERS)), *(f"{kind}{at}" for at in range(LAYERS) for kind in "rwu")]
    graph = graph_of([*chain, *used], names=names)
    order = [Dependency(f"r{at}", f"r{at + 1}", Hazard.ORDER, "collective:0") for at in range(LAYERS - 1)]
    group = {name: {"group": "0", "processes": 2, "orders": frozenset({"collective:0"})} for name in REDUCTIONS}
    ops = {name: replace(op, **group.get(name, {})) for name, op in graph.ops.items()}  # type: ignore[arg-type]
    took = {"r": OpCost(us, 0.1, 0.1, "roofline"), "w": OpCost(0.0, 0.01, 0.0, "roofline")}
    costs = {name: took.get(name[0], OpCost(10.0, 0.3, 0.1, "roofline")) for name in ops}
    return replace(graph, ops=ops, dependencies=(*graph.dependencies, *order)), costs


@pytest.mark.parametrize("policy", sorted(POLICIES.keys() - {"sequential"}))
@pytest.mark.parametrize("streams", [2, 3, 4])
def test_collectives_have_a_stream_of_their_own_in_every_policy(policy: str, streams: int) -> None:
    graph, costs = backward()
    found = POLICIES[policy](graph, costs, PRICED, streams, NONE)
    schedule = synchronize(graph, found)
    verify(graph, schedule)
    assert found.streams <= streams
    last = found.streams - 1
    assert {name for name, at in found.stream.items() if at == last} == REDUCTIONS
    timeline = simulate(schedule, costs, PRICED)
    alone = simulate(synchronize(graph, POLICIES["sequential"](graph, costs, PRICED, 1, NONE)), costs, PRICED)
    assert timeline.makespan_us < alone.makespan_us - 25, "all but the last reduction are hidden"
    assert exposed_us(timeline, graph) < 16


def test_one_stream_holds_all_and_exposes_all() -> None:
    graph, costs = backward()
    for policy in POLICIES.values():
        assert set(policy(graph, costs, PRICED, 1, NONE).stream.values()) == {0}
    timeline = simulate(synchronize(graph, POLICIES["sequential"](graph, costs, PRICED, 1, NONE)), costs, PRICED)
    assert exposed_us(timeline, graph) == pytest.approx(10.0 * LAYERS)


def test_a_collective_starts_when_its_input_is_there_however_long_earlier_ones_take() -> None:
    """Reductions of 30 µs delay each other, and the backward not at all: it ends after four ops of 10 µs and 3 gaps."""
    graph, costs = backward(30.0)
    timeline = simulate(synchronize(graph, POLICIES["critical_path"](graph, costs, PRICED, 2, NONE)), costs, PRICED)
    assert timeline.ends["b3"] == pytest.approx(40 + 3 * PRICED.same_stream_edge_us)
    assert timeline.starts["r0"] == pytest.approx(10 + PRICED.cross_stream_edge_us)
    assert timeline.starts["r1"] == pytest.approx(timeline.ends["r0"] + PRICED.same_stream_edge_us)


@pytest.mark.parametrize("policy", sorted(POLICIES.keys() - {"sequential"}))
@pytest.mark.parametrize("streams", [2, 3, 4])
def test_late_collectives_hold_back_only_what_needs_them(policy: str, streams: int) -> None:
    """Reductions take 10 µs in the plan, and 100 when it runs: another process was late."""
    graph, costs = backward()
    schedule = synchronize(graph, POLICIES[policy](graph, costs, PRICED, streams, NONE))
    planned, late = (simulate(schedule, each, PRICED) for each in (costs, backward(100.0)[1]))
    for at in range(LAYERS):
        assert late.ends[f"b{at}"] == pytest.approx(planned.ends[f"b{at}"], abs=2.0)
    assert late.makespan_us > planned.makespan_us + 80


def test_updates_begin_while_the_backward_runs() -> None:
    """With three streams, one is left for them."""
    graph, costs = backward()
    for policy in ("critical_path", "path_cover", "search"):
        timeline = simulate(synchronize(graph, POLICIES[policy](graph, costs, PRICED, 3, NONE)), costs, PRICED)
        assert timeline.ends["u0"] < timeline.starts["b3"] + 5.0, policy


@pytest.mark.parametrize("policy", ["critical_path", "path_cover", "search"])
def test_no_stream_is_kept_for_a_wait_at_the_end(policy: str) -> None:
    """
    b0 ─▶ b1 ─▶ b2 ─▶ b3 ─╮
    c0 ─▶ c1 ─▶ c2 ─▶ c3 ─┴─▶ s ─▶ r ─▶ w        the sum is reduced and returned
    """
    rows = [[f"{row}{at}" for at in range(LAYERS)] for row in "bc"]
    edges = (
        [pair for row in rows for pair in pairwise(row)] + [(row[-1], "s") for row in rows] + [("s", "r"), ("r", "w")]
    )
    graph = graph_of(edges, outputs="w")
    graph = replace(
        graph, ops={name: replace(op, group="0" * (name == "r"), processes=2) for name, op in graph.ops.items()}
    )
    costs = {name: OpCost(0.0 if name == "w" else 10.0, 0.3, 0.1, "roofline") for name in graph.ops}
    found = POLICIES[policy](graph, costs, PRICED, 3, NONE)
    assert found.streams == 3
    assert simulate(synchronize(graph, found), costs, PRICED).makespan_us < 75, "four ops, the sum and the reduction"


def test_a_search_of_one_stream_leaves_collectives_on_it() -> None:
    graph, costs = backward()
    for simulations in (1, 10, 100):
        events = len(graph.ops) + len(graph.dependencies)
        found = search(graph, costs, PRICED, 1, NONE, seconds=simulations * events / EVENTS_PER_S)
        assert [each.streams for each in found] == [1]


def test_all_collectives_may_be_pinned() -> None:
    graph, costs = backward()
    for name in POLICIES.keys() - {"sequential"}:
        found = POLICIES[name](graph, costs, PRICED, 2, frozenset(REDUCTIONS))
        assert found.streams == 2, name
        verify(graph, synchronize(graph, found))


def test_updates_run_early_where_memory_asks_for_it() -> None:
    """A gradient of each of eight layers is reduced, and the update, which comes next, releases it."""
    layers = range(8)
    edges = [(f"{a}{at}", f"{b}{at}") for at in layers for a, b in ("br", "rw", "wu")]
    names = [f"{kind}{at}" for at in layers for kind in "brwu"]
    graph = graph_of([*edges, *((f"b{at}", f"b{at + 1}") for at in layers[:-1])], names=names)
    graph = replace(
        graph, ops={name: replace(op, group="0" * (name[0] == "r"), processes=2) for name, op in graph.ops.items()}
    )
    costs = {name: OpCost({"r": 30.0, "w": 0.0}.get(name[0], 20.0), 0.3, 0.1, "roofline") for name in graph.ops}
    sequential = synchronize(graph, POLICIES["sequential"](graph, costs, PRICED, 1, NONE))
    slow = simulate(sequential, costs, PRICED)
    room = 1.5 * Footprint(graph).live_bytes(slow)
    *_, best = search(graph, costs, PRICED, 4, NONE, room_bytes=room)
    schedule = synchronize(graph, best)
    fast = simulate(schedule, costs, PRICED)
    assert fast.makespan_us < 0.8 * slow.makespan_us
    assert Footprint(graph).live_bytes(fast) <= room
    assert [*islice(variants(graph, costs, PRICED, schedule, 4, NONE, room_bytes=room), 3)] != []


@given(graph=random_graphs(), data=st.data())
@settings(max_examples=40, deadline=None)
def test_what_follows_collectives_comes_last_on_its_stream(graph: OpGraph, data: st.DataObject) -> None:
    """In every policy without a limit of memory, and in variants of its schedule. No collective is such an op.

    On one stream, which may be as fast, all ops run in order.
    """
    names = [*graph.ops]
    reductions = sorted(data.draw(st.sets(st.sampled_from(names), min_size=1, max_size=3)), key=names.index)
    ops = {name: replace(op, group="0" * (name in reductions)) for name, op in graph.ops.items()}
    order = [Dependency(*pair, Hazard.ORDER, "collective:0") for pair in pairwise(reductions)]
    graph = replace(graph, ops=ops, dependencies=(*graph.dependencies, *order))
    after = {name for each in reductions for name in nx.descendants(graph.digraph, each)}
    needed = {name for each in reductions for name in nx.ancestors(graph.digraph, each)}
    following = after - needed - {*reductions}
    assert followers(graph) == following
    costs, streams = data.draw(random_costs(graph)), data.draw(st.integers(2, 5))
    policy = data.draw(st.sampled_from(sorted(POLICIES.keys() - {"sequential"})))
    first = POLICIES[policy](graph, costs, PRICED, streams, NONE)
    others = variants(graph, costs, PRICED, synchronize(graph, first), streams, NONE)
    for assignment in (first, *islice(others, 3)):
        schedule = synchronize(graph, assignment)
        verify(graph, schedule)
        for stream in range(schedule.streams) if schedule.streams > 1 else ():
            follows = [launch.op in following for launch in schedule.launches if launch.stream == stream]
            assert follows == sorted(follows), assignment


def test_pinned_collectives_stay_on_the_callers_stream() -> None:
    graph, costs = backward()
    for name in POLICIES.keys() - {"sequential"}:
        found = POLICIES[name](graph, costs, PRICED, 3, frozenset({"r0"}))
        assert found.stream["r0"] == 0
        assert len({found.stream[each] for each in REDUCTIONS - {"r0"}} - set(range(found.streams - 1))) == 1


def test_no_chain_holds_a_collective_and_variants_leave_it_where_it_is() -> None:
    graph, costs = backward()
    short = dict.fromkeys(graph.ops, OpCost(0.1, 0.1, 0.1, "roofline"))
    chains = coarsen(graph, short, PRICED, NONE).chains
    assert all(len(chain) == 1 for chain in chains.values() if REDUCTIONS & set(chain))
    schedule = synchronize(graph, POLICIES["critical_path"](graph, costs, PRICED, 3, NONE))
    for variant, _ in zip(variants(graph, costs, PRICED, schedule, 3, NONE), range(20), strict=False):
        assert {name for name, at in variant.stream.items() if at == variant.streams - 1} == REDUCTIONS


def test_exposed_time_is_that_of_collectives_beside_which_nothing_runs() -> None:
    """0 ─ b0 ─ 2     3 ─ b1 ─ 4; the reductions run from 1 to 6 and from 5 to 8: 2 to 3 and 4 to 8 are exposed."""
    graph, _ = backward()
    spans = {"b0": (0, 2), "b1": (3, 4), "r0": (1, 6), "r1": (5, 8)}
    slices = tuple(Slice(name, 0, float(start), float(end)) for name, (start, end) in spans.items())
    assert exposed_us(Timeline(slices), graph) == 5.0
    assert exposed_us(Timeline(slices[:2]), graph) == 0.0
