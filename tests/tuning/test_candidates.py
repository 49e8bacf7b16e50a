"""Candidates: the best of each policy, within the memory budget; variants of one; an earlier choice."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autostream.errors import CostError, ScheduleError
from autostream.ir import Assignment, Candidate, DeviceProfile, Limit, OpGraph, Schedule, Timeline
from autostream.options import Options
from autostream.scheduling.peak import peak_bytes
from autostream.scheduling.policies import POLICIES
from autostream.scheduling.releases import place_releases
from autostream.scheduling.simulate import run_us, simulate
from autostream.scheduling.synchronize import synchronize
from autostream.scheduling.verify import verify
from autostream.tuning import budget
from autostream.tuning import candidates as module
from autostream.tuning.candidates import SHORTLIST, best_of, candidates_again, candidates_for, variants_of
from autostream.tuning.pricing import Priced
from autostream.utils.stopwatch import Stopwatch
from tests.scheduling.graphs import costs_of, graph_of, profile_with

#   a ─┬─ b ── c ─┬─ h        three branches of 9 µs each
#      ├─ d ── e ─┤
#      └─ f ── g ─┘
BRANCHES = graph_of("a-b b-c a-d d-e a-f f-g c-h e-h g-h", names="abcdefgh", outputs="h")


def priced(
    graph: OpGraph = BRANCHES,
    profile: DeviceProfile | None = None,
    duration_us: float | Mapping[str, float] = 9.0,
) -> Priced:
    return Priced(
        graph,
        profile or profile_with(same_stream_edge_us=1.0, cross_stream_edge_us=1.0),
        costs_of(graph, duration_us),
        (),
    )


def candidates(capture: bool = True, given: Priced | None = None, **options: Any) -> tuple[Candidate, ...]:
    return candidates_for(given or priced(), options_of(options), capture, Stopwatch())


def options_of(options: Mapping[str, Any]) -> Options:
    """These options, without a memory budget."""
    return Options(**{"memory_budget": math.inf, **options})


# An earlier choice


def again(schedule: Schedule, **options: Any) -> tuple[Candidate, ...]:
    return candidates_again(priced(), options_of(options), schedule, Stopwatch())


def test_an_earlier_choice_is_a_candidate_besides_the_sequential_one() -> None:
    first, best, *_ = candidates()
    assert again(best.schedule) == (first, best)
    assert again(first.schedule) == (first,)


def test_an_earlier_choice_is_verified() -> None:
    first, best, *_ = candidates()
    hasty = replace(best.schedule, launches=tuple(replace(launch, waits=()) for launch in best.schedule.launches))
    fewer = replace(first.schedule, launches=first.schedule.launches[:-1])
    for wrong in (hasty, fewer):
        with pytest.raises(ScheduleError):
            again(wrong)
    with pytest.raises(ScheduleError, match=r"chosen before needs .* the budget is"):
        again(best.schedule, memory_budget=first.memory_bytes + 101)


def test_candidates_are_complete_distinct_and_ordered_by_simulated_time() -> None:
    """Eight ops of 9 µs with seven gaps of 1 µs one after another; four with three if the branches run concurrently.

    Three branches give no work to a fourth stream, so more than three are not tried. One stream holds the ends of the
    three branches and what was just computed, of 1 KiB each; concurrently, it is more.
    """
    own = priced()
    first, *others = candidates(given=own)
    assert (first.schedule.policy, first.schedule.streams) == ("sequential", 1)
    assert (first.predicted_us, others[0].predicted_us, first.memory_bytes) == (8 * 9 + 7, 4 * 9 + 3, 4 * 1024)
    assert [each.predicted_us for each in others] == sorted(each.predicted_us for each in others)
    plans = {tuple(sorted((at, op) for op, at in each.schedule.stream_of.items())) for each in (first, *others)}
    assert len(plans) == 1 + len(others) > 3
    assert max(each.schedule.streams for each in others) == 3
    for each in (first, *others):
        assert each.predicted_us == simulate(each.schedule, own.costs, own.profile).makespan_us
        assert each.memory_bytes == peak_bytes(BRANCHES, each.schedule)
        assert each.schedule == place_releases(BRANCHES, each.schedule)
        assert any(launch.releases for launch in each.schedule.launches)
    replayed = priced(profile=replace(own.profile, replay_us=1.5))
    assert candidates(given=replayed)[0].predicted_us == first.predicted_us + 1.5, "a replay takes time once"
    assert candidates(False, replayed)[0].predicted_us == candidates(False, own)[0].predicted_us


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"policy": "sequential"}, {("sequential", 1)}),
        ({"streams": 1}, {("sequential", 1)}),
        ({"streams": 2}, {("sequential", 1), ("critical_path", 2), ("search", 2), ("path_cover", 2)}),
        ({"policy": "path_cover", "streams": 3}, {("sequential", 1), ("path_cover", 3)}),
        ({"policy": "search", "streams": 2}, {("sequential", 1), ("search", 2)}),
    ],
)
def test_only_the_policies_and_streams_that_are_asked_for_are_tried(
    options: dict[str, Any], expected: set[tuple[str, int]]
) -> None:
    assert {(each.schedule.policy, each.schedule.streams) for each in candidates(**options)} == expected
    assert [each.schedule.launches for each in candidates(given=priced(graph_of(())), **options)] == [()]


@pytest.mark.parametrize(("cores", "streams"), [(1, 1), (3, 2), (64, 3)])
def test_a_cpu_has_no_more_streams_than_cores(cores: int, streams: int) -> None:
    """There are three branches."""
    given = priced(replace(BRANCHES, device="cpu"), profile_with(multiprocessors=cores))
    assert max(each.schedule.streams for each in candidates(given=given)) == streams


def test_the_search_finds_schedules_that_other_policies_do_not() -> None:
    """List scheduling puts 30 + 20 + 20 µs on one of two streams; 30 + 30 beside 20 + 20 + 20 are found by search."""
    graph = graph_of((), names="abcde")
    costs = costs_of(graph, {"a": 30.0, "b": 30.0, "c": 20.0, "d": 20.0, "e": 20.0})
    found = candidates(given=Priced(graph, profile_with(), costs, ()), streams=2)
    assert [(c.schedule.policy, c.predicted_us) for c in found[:2]] == [("sequential", 120.0), ("search", 60.0)]


def rival(policy: str, predicted_us: float, streams: int = 2) -> Candidate:
    return Candidate(Schedule(policy, streams, ()), captured=True, predicted_us=predicted_us)


def shortlisted(rivals: list[Candidate], refused: Callable[[Candidate], bool] = lambda rival: False) -> list[Candidate]:
    """The shortlist where some turn out to be refused."""

    def complete(rival: module._Simulated) -> list[Candidate]:
        candidate = rival.candidate
        return [replace(candidate, refusal="too large") if refused(candidate) else candidate]

    return module._shortlist([module._Simulated(rival, Timeline(())) for rival in rivals], complete)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 99), st.booleans()), max_size=20))
def test_any_shortlist_has_up_to_six_that_may_run_and_the_best_of_each_policy(
    drawn: list[tuple[str, float, bool]],
) -> None:
    rivals = [rival(policy, predicted_us) for policy, predicted_us, _ in drawn]
    large = [each for each, (_, _, is_large) in zip(rivals, drawn, strict=True) if is_large]
    found = shortlisted(rivals, large.__contains__)
    allowed, fitting = [c for c in found if not c.refusal], [c for c in rivals if c not in large]
    assert len(allowed) == min(len(fitting), SHORTLIST)
    assert [c.predicted_us for c in found] == sorted(c.predicted_us for c in found)
    for policy in {each.schedule.policy for each in fitting}:
        best_us = min(each.predicted_us for each in fitting if each.schedule.policy == policy)
        assert any((each.schedule.policy, each.predicted_us) == (policy, best_us) for each in allowed)


#   stream 0:  a ── p ───────────────────── q ── r      t and q make 8 KiB, the others 1 KiB; p takes long
#   stream 1:       s ── t ── u ──────────
WIDE = graph_of("a-p p-q q-r a-s s-t t-u", names="apstuqr", outputs="r")
WIDE = replace(
    WIDE,
    storages={
        name: replace(storage, placeable=name in "apstuq", bytes=8192 if name in "tq" else 1024)
        for name, storage in WIDE.storages.items()
    },
)


#   w0    w1    w2        copies of weights that depend on nothing, of 16 KiB each, all else is 1 KiB
#   c0 ── c1 ── c2 …      two chains of convolutions that read them
#   d0 ── d1 ── d2 …
def copying(length: int = 6) -> Priced:
    edges = [(f"w{side}{at}", f"{side}{at}") for side in "cd" for at in range(length)]
    edges += [(f"{side}{at}", f"{side}{at + 1}") for side in "cd" for at in range(length - 1)]
    edges += [(f"{side}{length - 1}", "e") for side in "cd"]
    names = [name for at in range(length) for side in "cd" for name in (f"w{side}{at}", f"{side}{at}")]
    graph = graph_of(edges, [*names, "e"], outputs="e")
    storages = {
        name: replace(storage, bytes=16384 if name[0] == "w" else 1024, placeable=name in graph.ops)
        for name, storage in graph.storages.items()
    }
    graph = replace(graph, storages=storages)
    costs = costs_of(graph, {name: 1.0 if name[0] == "w" else 12.0 for name in graph.ops})
    return Priced(graph, profile_with(same_stream_edge_us=0.5, cross_stream_edge_us=1.5), costs, ())


@pytest.mark.usefixtures("to_the_byte")
def test_copies_of_weights_do_not_force_all_ops_on_one_stream() -> None:
    """List scheduling makes all copies at once and needs twelve of them; one stream needs one, and the budget is four.

    So it was with GoogLeNet: all schedules were refused, and with them a speed of 1.6 times that of one stream.
    """
    free = candidates(given=copying())
    alone, *others = candidates(given=copying(), memory_budget=4.0)
    assert min(each.memory_bytes for each in free[1:]) > 4.0 * alone.memory_bytes
    best = best_of(others)
    assert best.memory_bytes <= 4.0 * alone.memory_bytes
    assert best.predicted_us <= 1.15 * best_of(free).predicted_us
    verify(copying().graph, best.schedule)


@pytest.mark.usefixtures("to_the_byte")
def test_faster_candidates_that_are_too_large_are_kept_for_the_report() -> None:
    """It says what the budget costs. There is room for two copies."""
    others = candidates(given=copying(), memory_budget=2.2, policy="critical_path")[1:]
    large, small = ([each for each in others if bool(each.refusal) == refused] for refused in (True, False))
    assert large
    assert small
    assert max(each.predicted_us for each in large) < min(each.predicted_us for each in small)
    assert all("(memory_budget)" in each.refusal and each.limit is Limit.BUDGET for each in large)
    assert all(each.limit is None for each in small)
    assert [each.predicted_us for each in others] == sorted(each.predicted_us for each in others)


def _variants(given: Priced, capture: bool = True, **options: Any) -> list[Candidate]:
    alone, *others = candidates(capture, given, **options)
    best = next(candidate for candidate in others if not candidate.refusal)
    return list(islice(variants_of(given, options_of(options), alone, best), 10))


@pytest.mark.parametrize("capture", [True, False])
def test_variants_are_complete_candidates(capture: bool) -> None:
    given = priced()
    found = _variants(given, capture)
    assert len(found) == 10
    for variant in found:
        assert (variant.captured, variant.schedule.policy) == (capture, "search")
        assert variant.schedule == place_releases(BRANCHES, variant.schedule)
        assert variant.memory_bytes == peak_bytes(BRANCHES, variant.schedule)
        assert variant.predicted_us == run_us(variant.schedule, given.costs, given.profile, captured=capture)
        pinned = frozenset() if capture else BRANCHES.pinned
        verify(BRANCHES, variant.schedule, pinned=pinned)


@pytest.fixture
def to_the_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """Budgets without slack, since these graphs are small."""
    monkeypatch.setattr(budget, "SLACK_BYTES", 0)


@pytest.mark.usefixtures("to_the_byte")
def test_branches_that_are_summed_run_concurrently_in_little_memory() -> None:
    """Policies compute all twelve branches before the first sum; one stream adds each before the next.

    l0 ── r0 ──── l1 ── r1 ──── l2 ── r2 ── …
             s0 ────────── s1 ─────────── s2 ── …
    """
    names = [f"{kind}{at}" for at in range(12) for kind in "lrs"]
    edges = [edge for at in range(12) for edge in ((f"l{at}", f"r{at}"), (f"r{at}", f"s{at}"))]
    graph = graph_of([*edges, *((f"s{at}", f"s{at + 1}") for at in range(11))], names, outputs=["s11"])
    given = priced(graph, duration_us={name: 20.0 if name[0] == "l" else 3.0 for name in names})
    first, *others = candidates(given=given, policy="critical_path", memory_budget=8 * 1024)
    best = best_of([first, *others])
    assert first.memory_bytes == 3 * 1024
    assert best.memory_bytes <= 8 * 1024
    assert best.predicted_us < 0.8 * first.predicted_us


@pytest.mark.usefixtures("to_the_byte")
def test_candidates_and_variants_that_exceed_the_memory_budget_are_refused() -> None:
    """One stream takes 4 KiB, list scheduling 7, the others 6, and inputs 1. One stream may take any amount."""
    for limit in (1.5, 6 * 1024):
        found = candidates(memory_budget=limit)
        assert [(each.schedule.policy, each.memory_bytes, bool(each.refusal)) for each in found] == [
            ("sequential", 4096, False),
            ("critical_path", 7168, True),
            ("critical_path", 7168, True),
            ("search", 6144, False),
            ("path_cover", 6144, False),
        ]
        assert found[1].refusal.startswith("needs ")
    assert max(variant.memory_bytes for variant in _variants(priced())) > 6 * 1024
    fitting = _variants(priced(), memory_budget=1.5)
    assert fitting
    assert max(variant.memory_bytes for variant in fitting) <= 6 * 1024
    assert list(variants_of(priced(), Options(memory_budget=101), found[0], found[3])) == [], "the search for one ends"
    for limit in (1.0, 101):
        first, *others = candidates(memory_budget=limit)
        assert (first.schedule.policy, first.refusal) == ("sequential", "")
        assert others
        assert all(other.refusal for other in others)


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_costs_that_are_not_times_are_refused_with_the_op(value: float) -> None:
    given = priced()
    wrong = replace(given, costs={**given.costs, "d": replace(given.costs["d"], duration_us=value)})
    with pytest.raises(CostError, match=f"'d' has duration_us={value!r}"):
        candidates(given=wrong, policy="sequential")


def test_outputs_may_be_on_any_stream_only_in_captured_schedules() -> None:
    """They are copied out of a captured graph."""
    outputs = graph_of("a-b a-c a-d", outputs="bcd")
    assert {c.captured for c in candidates(capture=True, given=priced(outputs))} == {True}
    captured = candidates(capture=True, given=priced(outputs), streams=3, policy="critical_path")[-1]
    assert {captured.schedule.stream_of[name] for name in "bcd"} == {0, 1, 2}
    for candidate in candidates(capture=False, given=priced(outputs)):
        assert not candidate.captured
        assert {candidate.schedule.stream_of[name] for name in "bcd"} == {0}


def carelessly_synchronized(graph: OpGraph, assignment: Assignment) -> Schedule:
    """A bug in the synchronizer: the join waits for the branches, but h, which reads their results, does not."""
    schedule = synchronize(graph, assignment)
    last = replace(schedule.launches[-1], waits=())
    return replace(schedule, launches=(*schedule.launches[:-1], last), join_waits=schedule.launches[-1].waits)


def test_a_schedule_or_variant_that_is_wrong_is_never_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    alone, best, *_ = candidates(capture=False)
    monkeypatch.setattr(module, "synchronize", carelessly_synchronized)
    with pytest.raises(ScheduleError, match="'h' must come after"):
        candidates(streams=3)
    with pytest.raises(ScheduleError, match="'h' must come after"):
        next(variants_of(priced(), options_of({}), alone, best))

    def careless(graph: OpGraph, costs: Any, profile: Any, streams: int, pinned: frozenset[str]) -> Assignment:
        return POLICIES["critical_path"](graph, costs, profile, streams, frozenset())

    monkeypatch.setattr(module, "synchronize", synchronize)
    monkeypatch.setattr(module, "ON_CHAINS", {"careless": careless})
    with pytest.raises(ScheduleError, match="pinned to stream 0"):
        candidates(capture=False, given=priced(graph_of("a-b a-c", outputs="bc")))
