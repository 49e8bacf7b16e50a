"""The search is never slower than other policies nor with more streams, and gives the same result every time."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autostream.ir import Assignment, Costs, Decision, DeviceProfile, OpGraph
from autostream.scheduling.coarsen import coarsen
from autostream.scheduling.peak import Footprint
from autostream.scheduling.policies import POLICIES
from autostream.scheduling.policies import search as module
from autostream.scheduling.policies.search import EVENTS_PER_S, SLACK, search, variants
from autostream.scheduling.postpone import MAX_SLACK_SHARE, delayed
from autostream.scheduling.simulate import simulate
from autostream.scheduling.synchronize import synchronize
from autostream.scheduling.verify import verify
from tests.scheduling.graphs import (
    FREE,
    PRICED,
    check_assignment,
    costs_of,
    graph_of,
    random_costs,
    random_graphs,
)

NONE: frozenset[str] = frozenset()


@pytest.fixture(autouse=True)
def _no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """No machine is too slow here."""
    monkeypatch.setattr(module.time, "perf_counter", lambda: 0.0)


@pytest.fixture
def simulations(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The keyword arguments of each simulation of a search, from now on."""
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(module, "simulate", lambda *args, **how: found.append(how) or simulate(*args, **how))
    return found


def makespan(graph: OpGraph, costs: Costs, assignment: Assignment, profile: DeviceProfile = PRICED) -> float:
    return simulate(synchronize(graph, assignment), costs, profile).makespan_us


def towers(count: int = 5, length: int = 6) -> tuple[OpGraph, Costs]:
    """Parallel chains whose ops take from 4 to 11 µs and fill a third of the device."""
    names = [f"t{tower}_{at}" for tower in range(count) for at in range(length)]
    edges = [(before, after) for before, after in pairwise(names) if before[:2] == after[:2]]
    graph = graph_of(edges, names)
    return graph, costs_of(graph, {name: 4.0 + 7 * at % 8 for at, name in enumerate(names)}, sm_share=0.3)


def test_a_greedy_mistake_is_corrected_and_the_reason_says_what_was_gained() -> None:
    """Five independent ops on two streams: list scheduling gives 3+2+2 = 7 on one, but 3+3 and 2+2+2 take 6."""
    graph = graph_of((), names="abcde")
    costs = costs_of(graph, {"a": 3.0, "b": 3.0, "c": 2.0, "d": 2.0, "e": 2.0})
    assert makespan(graph, costs, POLICIES["critical_path"](graph, costs, FREE, 2, NONE), FREE) == 7.0
    found = search(graph, costs, FREE, 2, NONE)[-1]
    assert makespan(graph, costs, found, FREE) == 6.0
    assert found.stream["a"] == found.stream["b"]
    assert found.decisions == (Decision("", "2 streams", "1.0 µs less than by critical_path"),)


def test_a_schedule_that_cannot_be_improved_stays_as_it_is(simulations: list[dict[str, Any]]) -> None:
    """A chain is not searched at all.

    a ─┬─ b ─┬─ d
       └─ c ─┘
    """
    graph = graph_of("a-b a-c b-d c-d")
    costs = costs_of(graph, 10.0)
    start = POLICIES["critical_path"](graph, costs, PRICED, 2, NONE)
    found = search(graph, costs, PRICED, 2, NONE)[-1]
    assert (found.order, found.stream) == (start.order, start.stream)
    assert found.decisions[0].reason == "as fast as by critical_path"
    simulations.clear()
    chain = graph_of("a-b b-c")
    assert search(chain, costs_of(chain, 10.0), PRICED, 8, NONE)[-1].streams == 1
    assert len(simulations) == 1


@settings(max_examples=15)
@given(data=st.data(), profile=st.sampled_from([FREE, PRICED]))
def test_the_result_is_right_and_no_slower_than_other_policies_or_fewer_streams(
    data: st.DataObject, profile: DeviceProfile
) -> None:
    graph = data.draw(random_graphs())
    costs = data.draw(random_costs(graph))
    pinned = data.draw(st.sampled_from([NONE, graph.pinned]))
    last = float("inf")
    for streams in range(1, 5):
        found = search(graph, costs, profile, streams, pinned, 0.2)[-1]
        check_assignment(graph, found, streams, pinned)
        assert set(found.stream.values()) == set(range(found.streams)), "no stream is unused"
        verify(graph, synchronize(graph, found), pinned=pinned)
        time_us = makespan(graph, costs, found, profile)
        assert time_us <= last, "more streams are no slower"
        last = time_us
        if streams in module.STEPS:
            for policy in ("sequential", "critical_path", "path_cover"):
                other = POLICIES[policy](graph, costs, profile, streams, pinned)
                assert time_us <= makespan(graph, costs, other, profile)


def test_results_depend_on_the_seed_and_not_on_how_many_streams_are_allowed() -> None:
    graph, costs = towers()
    found = search(graph, costs, PRICED, 6, NONE, 0.4)
    times = [makespan(graph, costs, assignment) for assignment in found]
    assert len(found) > 2
    assert times == sorted(times, reverse=True)
    assert found[-1] == search(graph, costs, PRICED, 6, NONE, 0.4)[-1]
    fewer = search(graph, costs, PRICED, 3, NONE, 0.4)
    assert fewer == found[: len(fewer)]
    seeded = {tuple(search(graph, costs, PRICED, 3, NONE, 0.4, seed)[-1].stream.items()) for seed in range(3)}
    assert len(seeded) > 1


def test_numbers_of_streams_between_the_searched_ones_are_used_too() -> None:
    """As many independent ops as streams: all run at the same time."""
    count = 5
    assert count not in module.STEPS
    graph = graph_of((), names="abcde")
    costs = costs_of(graph, 10.0, sm_share=0.01)
    assert makespan(graph, costs, search(graph, costs, FREE, count, NONE)[-1], FREE) == 10.0


def test_a_graph_too_large_to_be_searched_gets_the_best_of_the_other_policies() -> None:
    """There is time for one simulation, so nothing can be changed."""
    graph, costs = towers()
    found = search(graph, costs, PRICED, 5, NONE, seconds=(len(graph.ops) + len(graph.dependencies)) / EVENTS_PER_S)[-1]
    others = [POLICIES[name](graph, costs, PRICED, 5, NONE) for name in ("critical_path", "path_cover")]
    assert makespan(graph, costs, found) == min(makespan(graph, costs, each) for each in others)


def test_a_machine_that_is_too_slow_stops_in_time(
    monkeypatch: pytest.MonkeyPatch, simulations: list[dict[str, Any]]
) -> None:
    """Its clock advances a second at each look: two changes at the first number of streams, then none."""
    graph, costs = towers()
    now = iter(range(1000))
    monkeypatch.setattr(module.time, "perf_counter", lambda: float(next(now)))
    assert search(graph, costs, PRICED, 6, NONE, seconds=3.0)[-1].streams > 1
    assert len(simulations) <= 1 + 2 * 5 + 3


@settings(max_examples=20)
@given(data=st.data(), streams=st.integers(1, 4))
def test_variants_are_right_all_different_and_about_as_fast(data: st.DataObject, streams: int) -> None:
    graph = data.draw(random_graphs())
    costs = data.draw(random_costs(graph))
    pinned = data.draw(st.sampled_from([NONE, graph.pinned]))
    start = POLICIES["critical_path"](graph, costs, PRICED, streams, pinned)
    plans = {tuple((op, start.stream[op]) for op in start.order)}
    found = list(islice(variants(graph, costs, PRICED, synchronize(graph, start), streams, pinned), 20))
    for variant in found:
        check_assignment(graph, variant, streams, pinned)
        verify(graph, synchronize(graph, variant), pinned=pinned)
        assert makespan(graph, costs, variant) <= makespan(graph, costs, start) * (1 + SLACK) + 1e-9
        plans.add(tuple((op, variant.stream[op]) for op in variant.order))
        for chain in coarsen(graph, costs, PRICED, pinned).chains.values():
            assert len({variant.stream[name] for name in chain}) == 1
    assert len(plans) == len(found) + 1


def test_variants_depend_on_the_seed_and_end_where_nothing_can_be_changed() -> None:
    graph, costs = towers()
    schedule = synchronize(graph, search(graph, costs, PRICED, 3, NONE)[-1])
    one, same, other = (list(islice(variants(graph, costs, PRICED, schedule, 4, NONE, seed), 10)) for seed in (0, 0, 1))
    assert len(one) == 10
    assert one == same != other
    assert max(variant.streams for variant in one) <= 4
    chain = graph_of("a-b")
    alone = synchronize(chain, POLICIES["sequential"](chain, {}, PRICED, 1, NONE))
    assert list(variants(chain, costs_of(chain, 10.0), PRICED, alone, 1, NONE)) == []


def copied() -> tuple[OpGraph, Costs]:
    """Two chains of convolutions, each with a copy of its weight, which is large and depends on nothing.

    wc0   wc1   wc2       c0 ── c1 ── c2 ──╮
    wd0   wd1   wd2 …     d0 ── d1 ── d2 ── e
    """
    edges = [(f"w{side}{at}", f"{side}{at}") for side in "cd" for at in range(6)]
    edges += [(f"{side}{at}", f"{side}{at + 1}") for side in "cd" for at in range(5)]
    names = [name for at in range(6) for side in "cd" for name in (f"w{side}{at}", f"{side}{at}")]
    graph = graph_of([*edges, ("c5", "e"), ("d5", "e")], [*names, "e"], outputs="e")
    storages = {n: replace(s, bytes=8192 if n[0] == "w" else s.bytes) for n, s in graph.storages.items()}
    costs = costs_of(graph, {name: 3.0 if name[0] == "w" else 12.0 for name in graph.ops})
    return replace(graph, storages=storages), costs


def live(graph: OpGraph, costs: Costs, assignment: Assignment) -> int:
    """The most memory in use at a time if launches use up their slack."""
    schedule = synchronize(graph, assignment)
    return Footprint(graph).live_bytes(delayed(schedule, simulate(schedule, costs, PRICED), 2.0, MAX_SLACK_SHARE))


def test_with_a_memory_limit_the_result_needs_less_and_is_nearly_as_fast() -> None:
    """There is memory for two copies besides what one stream needs; if there is none, the result needs the least."""
    graph, costs = copied()
    free = search(graph, costs, PRICED, 3, NONE)[-1]
    limit = live(graph, costs, POLICIES["sequential"](graph, costs, PRICED, 1, NONE)) + 2 * 8192
    assert live(graph, costs, free) > limit
    found = search(graph, costs, PRICED, 3, NONE, room_bytes=limit)[-1]
    assert live(graph, costs, found) <= limit
    assert makespan(graph, costs, found) <= 1.2 * makespan(graph, costs, free)
    least = search(graph, costs, PRICED, 3, NONE, room_bytes=0)
    assert live(graph, costs, least[-1]) == min(live(graph, costs, each) for each in least)


def test_no_variant_exceeds_the_memory_limit() -> None:
    graph, costs = copied()
    limit = 50_000
    start = search(graph, costs, PRICED, 3, NONE, room_bytes=limit)[-1]
    assert live(graph, costs, start) <= limit
    schedule = synchronize(graph, start)
    some = list(islice(variants(graph, costs, PRICED, schedule, 3, NONE), 40))
    assert max(live(graph, costs, each) for each in some) > limit
    within = list(islice(variants(graph, costs, PRICED, schedule, 3, NONE, room_bytes=limit), 40))
    assert len(within) > 5
    assert max(live(graph, costs, each) for each in within) <= limit
