"""What the search owes: better than what it starts from, never worse with more streams, the same every time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import islice, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autostream.ir import Assignment, Costs, Decision, DeviceProfile, OpCost, OpGraph
from autostream.scheduling.coarsen import coarsen
from autostream.scheduling.peak import Footprint
from autostream.scheduling.policies import POLICIES
from autostream.scheduling.policies import search as module
from autostream.scheduling.policies.search import EVENTS_PER_S, SLACK, search, search_by_streams, variants
from autostream.scheduling.postpone import MAX_SLACK_SHARE, delayed
from autostream.scheduling.simulate import simulate
from autostream.scheduling.synchronize import synchronize
from autostream.scheduling.verify import verify
from tests.scheduling.graphs import (
    check_assignment,
    costs_of,
    critical_path_us,
    graph_of,
    profile_with,
    random_costs,
    random_graphs,
)

NONE: frozenset[str] = frozenset()
FREE = profile_with()
PRICED = profile_with(same_stream_edge_us=0.5, cross_stream_edge_us=2.0, fork_us=1.0, join_us=1.0)


@pytest.fixture(autouse=True)
def _no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """No machine is too slow here."""
    monkeypatch.setattr(module.time, "perf_counter", lambda: 0.0)


def makespan(graph: OpGraph, costs: Costs, assignment: Assignment, profile: DeviceProfile = FREE) -> float:
    return simulate(synchronize(graph, assignment), costs, profile).makespan_us


# What it finds


def test_a_greedy_mistake_is_mended() -> None:
    """Five independent ops on two streams: list scheduling gives 3+2+2 and 3+2... in the order 3, 3, 2, 2, 2.

    It ends with 3+2+2 = 7 on one of them; 3+3 beside 2+2+2 take 6.
    """
    graph = graph_of((), names="abcde")
    costs = costs_of(graph, {"a": 3.0, "b": 3.0, "c": 2.0, "d": 2.0, "e": 2.0})
    assert makespan(graph, costs, POLICIES["critical_path"](graph, costs, FREE, 2, NONE)) == 7.0
    found = search(graph, costs, FREE, 2, NONE)
    assert makespan(graph, costs, found) == 6.0
    assert found.stream["a"] == found.stream["b"]


def test_ops_that_share_the_device_badly_are_kept_apart() -> None:
    """Side by side, two that need all of the bandwidth take as long as in turns, but their neighbours do not.

    Of four ops of 10 µs, a and b want all the bandwidth, c and d next to none: a beside c, then b beside d.
    """
    graph = graph_of((), names="abcd")
    costs = {name: OpCost(10.0, 0.1, 1.0 if name in "ab" else 0.0, "measured") for name in "abcd"}
    assert makespan(graph, costs, search(graph, costs, FREE, 2, NONE)) == 20.0


def test_the_reason_is_what_the_search_gained_and_no_other_policys() -> None:
    """By critical_path 7 µs, with reasons for single ops, which do not hold where other ops have moved."""
    graph = graph_of((), names="abcde")
    costs = costs_of(graph, {"a": 3.0, "b": 3.0, "c": 2.0, "d": 2.0, "e": 2.0})
    found = search(graph, costs, FREE, 2, NONE)
    assert found.decisions == (Decision("", "2 streams", "1.0 µs less than by critical_path"),)


@pytest.mark.parametrize(
    ("makespan_us", "waits", "reason"),
    [
        (8.4, 5, "1.6 µs less than by critical_path"),
        (9.99, 5, "as fast as by critical_path"),
        (10.0, 3, "as fast as by critical_path, with 3 waits instead of 5"),
    ],
)
def test_what_is_gained_is_told_as_a_difference(makespan_us: float, waits: int, reason: str) -> None:
    """What a replay takes is in neither time, and the same in both."""
    start = module._Plan("critical_path", (), (), {}, 10.0, 5, ())
    assert module._gain(replace(start, makespan_us=makespan_us, waits=waits), start) == reason


def test_what_fits_is_told_as_such_however_long_it_takes() -> None:
    start = module._Plan("critical_path", (), (), {}, 10.0, 5, (), excess_bytes=512.0)
    for excess_bytes, makespan_us in ((0.0, 12.0), (256.0, 9.0)):
        plan = replace(start, makespan_us=makespan_us, excess_bytes=excess_bytes)
        assert module._gain(plan, start) == "needs less memory than by critical_path, which exceeds the budget"
    assert module._gain(replace(start, makespan_us=9.0), start) == "1.0 µs less than by critical_path"


def test_a_schedule_that_cannot_be_improved_is_kept_as_it_is() -> None:
    """Of plans that take equally long, the one with fewer waits is found first: where there is none, nothing moves.

    a ─┬─ b ─┬─ d
       └─ c ─┘
    """
    graph = graph_of("a-b a-c b-d c-d")
    costs = costs_of(graph, 10.0)
    start = POLICIES["critical_path"](graph, costs, PRICED, 2, NONE)
    found = search(graph, costs, PRICED, 2, NONE)
    assert (found.order, found.stream) == (start.order, start.stream)
    assert found.decisions[0].reason == "as fast as by critical_path"


def test_a_chain_needs_no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = graph_of("a-b b-c")
    monkeypatch.setattr(module._Space, "climb", None)
    assert search(graph, costs_of(graph, 10.0), PRICED, 8, NONE).streams == 1


# Properties


@settings(max_examples=30)
@given(data=st.data(), profile=st.sampled_from([FREE, PRICED]))
def test_what_is_found_is_right_and_no_worse_than_anything_known(data: st.DataObject, profile: DeviceProfile) -> None:
    graph = data.draw(random_graphs())
    costs = data.draw(random_costs(graph))
    pinned = data.draw(st.sampled_from([NONE, graph.pinned]))
    last = float("inf")
    for streams in range(1, 5):
        found = search(graph, costs, profile, streams, pinned)
        check_assignment(graph, found, streams, pinned)
        assert set(found.stream.values()) == set(range(found.streams)), "no stream is left out"
        verify(graph, synchronize(graph, found), pinned=pinned)
        time_us = makespan(graph, costs, found, profile)
        assert time_us <= last, "more streams are no worse"
        last = time_us
        total = sum(cost.duration_us for cost in costs.values())
        assert time_us >= max(critical_path_us(graph, costs), total / streams) - 1e-9
        if streams in module.STEPS:
            for policy in ("sequential", "critical_path", "path_cover"):
                known = POLICIES[policy](graph, costs, profile, streams, pinned)
                assert time_us <= makespan(graph, costs, known, profile)


@settings(max_examples=10)
@given(data=st.data(), seed=st.integers(0, 3))
def test_the_same_seed_finds_the_same(data: st.DataObject, seed: int) -> None:
    graph = data.draw(random_graphs())
    costs = data.draw(random_costs(graph))
    first, second = (search_by_streams(graph, costs, PRICED, 4, NONE, seed=seed) for _ in range(2))
    assert first == second


def test_another_seed_may_find_something_else() -> None:
    graph, costs = towers()
    found = {tuple(search(graph, costs, PRICED, 3, NONE, 1.0, seed).stream.items()) for seed in range(4)}
    assert len(found) > 1


def test_each_is_better_than_the_one_before() -> None:
    graph, costs = towers()
    found = search_by_streams(graph, costs, PRICED, 6, NONE)
    times = [makespan(graph, costs, assignment, PRICED) for assignment in found]
    assert len(found) > 2
    assert times == sorted(times, reverse=True)
    assert found[-1] == search(graph, costs, PRICED, 6, NONE)
    fewer = search_by_streams(graph, costs, PRICED, 3, NONE)
    assert fewer == found[: len(fewer)]


@pytest.mark.parametrize("count", [5, 7, 11])
def test_numbers_of_streams_that_are_not_searched_are_used_all_the_same(count: int) -> None:
    """As many ops as streams, none of which needs another: all run side by side."""
    assert count not in module.STEPS
    graph = graph_of((), names="abcdefghijk"[:count])
    costs = costs_of(graph, 10.0, sm_share=0.01)
    assert makespan(graph, costs, search(graph, costs, FREE, count, NONE)) == 10.0


def test_more_streams_are_no_worse_whether_or_not_their_number_is_searched() -> None:
    graph, costs = towers(9, 3)
    found = [search(graph, costs, PRICED, streams, NONE, 0.2) for streams in range(1, 11)]
    times = [makespan(graph, costs, assignment, PRICED) for assignment in found]
    assert times == sorted(times, reverse=True)


def towers(count: int = 5, length: int = 6) -> tuple[OpGraph, Mapping[str, OpCost]]:
    """Chains side by side whose ops take from 4 to 11 µs and fill a third of the device."""
    names = [f"t{tower}_{at}" for tower in range(count) for at in range(length)]
    edges = [(before, after) for before, after in pairwise(names) if before[:2] == after[:2]]
    graph = graph_of(edges, names)
    return graph, costs_of(graph, {name: 4.0 + 7 * at % 8 for at, name in enumerate(names)}, sm_share=0.3)


def test_the_critical_chain_leads_back_from_the_last_end() -> None:
    """Op d waits for c, which waits for its stream, where b is; a ends earlier.

    stream 0   ─ a ────── d ─
    stream 1   ─── b ─ c ─┘
    """
    graph = graph_of("a-d c-d", names="abcd")
    costs = costs_of(graph, {"a": 3.0, "b": 4.0, "c": 5.0, "d": 1.0})
    chains = Assignment("mine", 2, ("a", "b", "c", "d"), {"a": 0, "b": 1, "c": 1, "d": 0})
    space = module._Space(graph, costs, FREE, coarsen(graph, costs, FREE, NONE), captured=True)
    assert space.simulated(chains).critical == (("d", "c"), ("c", "b"))


@pytest.mark.parametrize("captured", [True, False])
def test_what_is_to_be_captured_is_simulated_so(monkeypatch: pytest.MonkeyPatch, captured: bool) -> None:
    graph, costs = towers()
    how = []
    monkeypatch.setattr(module, "simulate", lambda *args, **kwargs: how.append(kwargs) or simulate(*args, **kwargs))
    search(graph, costs, PRICED, 2, NONE, 0.1, captured=captured)
    assert how[0] == {"captured": captured}
    assert all(kwargs == how[0] for kwargs in how)


# Effort


def test_effort_is_counted_in_simulated_launches_and_dependencies(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, costs = towers()
    each = len(graph.ops) + len(graph.dependencies)
    events = 0

    def counted(*args: Any, **how: Any) -> object:
        nonlocal events
        events += each
        return simulate(*args, **how)

    monkeypatch.setattr(module, "simulate", counted)
    for seconds in (0.1, 0.4):
        events = 0
        search(graph, costs, PRICED, 16, NONE, seconds)
        assert seconds * EVENTS_PER_S / 2 < events <= seconds * EVENTS_PER_S + each


def test_the_effort_for_some_streams_does_not_depend_on_how_many_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, costs = towers()
    climbs: list[tuple[int, int]] = []
    climb = module._Space.climb

    def logged(self: object, plan: object, streams: int, changes: int, *rest: object) -> object:
        climbs.append((streams, changes))
        return climb(self, plan, streams, changes, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(module._Space, "climb", logged)
    search(graph, costs, PRICED, 6, NONE)
    longest = list(climbs)
    climbs.clear()
    search(graph, costs, PRICED, 3, NONE)
    assert [streams for streams, _ in longest] == [2, 3, 4, 6], "five towers use five streams at most"
    assert climbs == longest[:2]


def test_a_graph_too_large_to_be_searched_gets_the_best_of_the_others() -> None:
    """There is time for one simulation, so nothing can be changed."""
    graph, costs = towers()
    found = search(graph, costs, PRICED, 5, NONE, seconds=(len(graph.ops) + len(graph.dependencies)) / EVENTS_PER_S)
    known = [POLICIES[name](graph, costs, PRICED, 5, NONE) for name in ("critical_path", "path_cover")]
    assert makespan(graph, costs, found, PRICED) == min(makespan(graph, costs, each, PRICED) for each in known)


def test_a_machine_that_is_too_slow_stops_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its clock goes a second ahead at each look: two changes at the first number of streams, then none."""
    graph, costs = towers()
    now = iter(range(1000))
    monkeypatch.setattr(module.time, "perf_counter", lambda: float(next(now)))
    simulated = []
    monkeypatch.setattr(module, "simulate", lambda *args, **how: simulated.append(1) or simulate(*args, **how))
    assert search(graph, costs, PRICED, 6, NONE, seconds=3.0).streams > 1
    assert len(simulated) <= 1 + 2 * 5 + 3


# Variants


@settings(max_examples=30)
@given(data=st.data(), streams=st.integers(1, 4))
def test_variants_are_right_all_different_and_about_as_fast(data: st.DataObject, streams: int) -> None:
    graph = data.draw(random_graphs())
    costs = data.draw(random_costs(graph))
    pinned = data.draw(st.sampled_from([NONE, graph.pinned]))
    given_ = POLICIES["critical_path"](graph, costs, PRICED, streams, pinned)
    start_us = makespan(graph, costs, given_, PRICED)
    plans = {tuple((op, given_.stream[op]) for op in given_.order)}
    found = list(islice(variants(graph, costs, PRICED, synchronize(graph, given_), streams, pinned), 20))
    for variant in found:
        check_assignment(graph, variant, streams, pinned)
        verify(graph, synchronize(graph, variant), pinned=pinned)
        assert makespan(graph, costs, variant, PRICED) <= start_us * (1 + SLACK) + 1e-9
        plans.add(tuple((op, variant.stream[op]) for op in variant.order))
    assert len(plans) == len(found) + 1


def test_a_seed_has_its_variants() -> None:
    graph, costs = towers()
    schedule = synchronize(graph, search(graph, costs, PRICED, 3, NONE))

    def first(seed: int) -> list[Assignment]:
        return list(islice(variants(graph, costs, PRICED, schedule, 4, NONE, seed), 10))

    assert len(first(0)) == 10
    assert first(0) == first(0) != first(1)
    assert max(variant.streams for variant in first(0)) <= 4


def test_where_nothing_can_be_changed_there_are_no_variants() -> None:
    """One stream: a ─▶ b"""
    graph = graph_of("a-b")
    costs = costs_of(graph, 10.0)
    schedule = synchronize(graph, POLICIES["sequential"](graph, costs, PRICED, 1, NONE))
    assert list(variants(graph, costs, PRICED, schedule, 1, NONE)) == []


def test_the_chains_that_the_search_keeps_whole_stay_whole_in_variants() -> None:
    graph = graph_of("a-b b-c x-y")
    costs = costs_of(graph, {"a": 9.0, "b": 1.0, "c": 9.0, "x": 9.0, "y": 9.0})
    assert coarsen(graph, costs, PRICED, NONE).chains["a"] == ("a", "b", "c")
    schedule = synchronize(graph, search(graph, costs, PRICED, 2, NONE))
    for variant in variants(graph, costs, PRICED, schedule, 2, NONE):
        assert len({variant.stream[name] for name in "abc"}) == 1


# Memory


ROOM = 50_000


def copied(length: int = 6) -> tuple[OpGraph, Mapping[str, OpCost]]:
    """Two chains of convolutions, each with a copy of its weight, which is large and depends on nothing.

    w0    w1    w2        c0 ── c1 ── c2 ──╮
    c0 ── c1 ── c2 …      d0 ── d1 ── d2 ── e
    """
    edges = [(f"w{side}{at}", f"{side}{at}") for side in "cd" for at in range(length)]
    edges += [(f"{side}{at}", f"{side}{at + 1}") for side in "cd" for at in range(length - 1)]
    edges += [(f"{side}{length - 1}", "e") for side in "cd"]
    names = [name for at in range(length) for side in "cd" for name in (f"w{side}{at}", f"{side}{at}")]
    graph = graph_of(edges, [*names, "e"], outputs="e")
    storages = {n: replace(s, bytes=8192 if n[0] == "w" else s.bytes) for n, s in graph.storages.items()}
    costs = costs_of(graph, {name: 3.0 if name[0] == "w" else 12.0 for name in graph.ops})
    return replace(graph, storages=storages), costs


def live(graph: OpGraph, costs: Costs, assignment: Assignment) -> int:
    """What is in use at a time where every launch is as late as it may be."""
    schedule = synchronize(graph, assignment)
    return Footprint(graph).live_bytes(delayed(schedule, simulate(schedule, costs, PRICED), 2.0, MAX_SLACK_SHARE))


def test_where_there_is_room_for_less_the_result_needs_less_and_is_fast_all_the_same() -> None:
    """Two copies at a time beside what one stream needs: all of them at once would save another 14 %."""
    graph, costs = copied()
    free = search(graph, costs, PRICED, 3, NONE)
    room = live(graph, costs, POLICIES["sequential"](graph, costs, PRICED, 1, NONE)) + 2 * 8192
    assert live(graph, costs, free) > room
    tight = search(graph, costs, PRICED, 3, NONE, room_bytes=room)
    assert live(graph, costs, tight) <= room
    assert makespan(graph, costs, tight, PRICED) <= 1.2 * makespan(graph, costs, free, PRICED)


def test_without_any_room_the_result_needs_as_little_as_was_found() -> None:
    graph, costs = copied()
    least = min(live(graph, costs, each) for each in search_by_streams(graph, costs, PRICED, 3, NONE, room_bytes=0))
    assert live(graph, costs, search(graph, costs, PRICED, 3, NONE, room_bytes=0)) == least


def test_effort_for_orders_that_need_less_is_part_of_the_effort(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take simulations of their own; where there is no time for changes, none of them is tried but the first."""
    graph, costs = copied()
    each = 2 * len(graph.ops) + len(graph.dependencies)
    simulated = 0

    def counted(*args: Any, **how: Any) -> object:
        nonlocal simulated
        simulated += 1
        return simulate(*args, **how)

    monkeypatch.setattr(module, "simulate", counted)
    for simulations in (3, 40, 400):
        simulated = 0
        search(graph, costs, PRICED, 16, NONE, (simulations + 0.5) * each / EVENTS_PER_S, room_bytes=0)
        assert simulations / 2 < simulated <= simulations + 3


def test_no_variant_needs_more_than_there_is_room_for() -> None:
    graph, costs = copied()
    found = search(graph, costs, PRICED, 3, NONE, room_bytes=ROOM)
    assert live(graph, costs, found) <= ROOM
    start = synchronize(graph, found)
    some = list(islice(variants(graph, costs, PRICED, start, 3, NONE), 40))
    assert max(live(graph, costs, each) for each in some) > ROOM
    found = list(islice(variants(graph, costs, PRICED, start, 3, NONE, room_bytes=ROOM), 40))
    assert len(found) > 5
    assert max(live(graph, costs, each) for each in found) <= ROOM
