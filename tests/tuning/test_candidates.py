"""Which schedules are considered: the best of each policy, within the memory budget, and variants of the winner."""

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
from autostream.options import Options, PolicyName
from autostream.scheduling.peak import peak_bytes
from autostream.scheduling.policies import POLICIES
from autostream.scheduling.policies.sequential import sequential
from autostream.scheduling.releases import place_releases
from autostream.scheduling.simulate import run_us, simulate
from autostream.scheduling.synchronize import synchronize
from autostream.scheduling.verify import verify
from autostream.tuning import budget
from autostream.tuning import candidates as module
from autostream.tuning.candidates import SHORTLIST, Priced, best_of, candidates_again, candidates_for, variants_of
from autostream.tuning.select import VARIANTS
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
    """These options, and all the memory that anyone asks for."""
    return Options(**{"memory_budget": math.inf, **options})


def tried(**options: Any) -> list[tuple[str, int]]:
    return [(candidate.schedule.policy, candidate.schedule.streams) for candidate in candidates(**options)]


# Candidates, and one that was chosen before


def again(schedule: Schedule, **options: Any) -> tuple[Candidate, ...]:
    return candidates_again(priced(), options_of(options), schedule, Stopwatch())


def test_what_was_chosen_before_is_what_it_was_beside_the_sequential_one() -> None:
    first, best, *_ = candidates()
    assert again(best.schedule) == (first, best)
    assert again(first.schedule) == (first,)


def test_what_was_chosen_before_is_proven_again() -> None:
    first, best, *_ = candidates()
    hasty = replace(best.schedule, launches=tuple(replace(launch, waits=()) for launch in best.schedule.launches))
    fewer = replace(first.schedule, launches=first.schedule.launches[:-1])
    for wrong in (hasty, fewer):
        with pytest.raises(ScheduleError):
            again(wrong)
    with pytest.raises(ScheduleError, match=r"chosen before needs .* the budget is"):
        again(best.schedule, memory_budget=first.memory_bytes + 101)


def test_the_sequential_schedule_comes_first_then_the_best_by_prediction() -> None:
    first, *others = candidates()
    assert (first.schedule.policy, first.schedule.streams) == ("sequential", 1)
    predicted = [candidate.predicted_us for candidate in others]
    assert predicted == sorted(predicted)
    assert first.predicted_us > predicted[0]


def test_predictions_are_those_of_the_simulator() -> None:
    """Eight ops of 9 µs with seven gaps of 1 µs in a row; four with three where the branches run side by side."""
    given = priced()
    found = candidates(given=given)
    assert found[0].predicted_us == 8 * 9 + 7
    assert found[1].predicted_us == 4 * 9 + 3
    for candidate in found:
        assert candidate.predicted_us == simulate(candidate.schedule, given.costs, given.profile).makespan_us


def test_no_two_are_the_same() -> None:
    """Three branches give no work to a fourth stream, so more than three are not tried."""
    plans = [tuple(sorted((at, op) for op, at in c.schedule.stream_of.items())) for c in candidates()]
    assert len(set(plans)) == len(plans) > 3
    assert max(streams for _, streams in tried()) == 3


def test_storage_is_released_in_all_of_them() -> None:
    for candidate in candidates():
        assert candidate.schedule == place_releases(BRANCHES, candidate.schedule)
        assert any(launch.releases for launch in candidate.schedule.launches)


def test_no_more_are_measured_than_the_shortlist() -> None:
    """Nine branches keep any number of streams busy, so there would be more."""
    wide = graph_of([("a", f"b{n}") for n in range(9)] + [(f"b{n}", f"c{n}") for n in range(9)])
    found = candidates(given=priced(wide))
    assert len(found) == 1 + SHORTLIST


@pytest.mark.parametrize("policy", ["critical_path", "path_cover", "search"])
def test_a_policy_that_is_asked_for_is_the_only_one_besides_the_sequential(policy: str) -> None:
    assert {name for name, _ in tried(policy=policy)} == {"sequential", policy}


def test_the_search_mends_what_the_others_find() -> None:
    """List scheduling puts 30 + 20 + 20 µs on one of two streams; 30 + 30 beside 20 + 20 + 20 are found by search."""
    graph = graph_of((), names="abcde")
    costs = costs_of(graph, {"a": 30.0, "b": 30.0, "c": 20.0, "d": 20.0, "e": 20.0})
    found = candidates(given=Priced(graph, profile_with(), costs, ()), streams=2)
    assert [(c.schedule.policy, c.predicted_us) for c in found[:2]] == [("sequential", 120.0), ("search", 60.0)]


@pytest.mark.parametrize(("capture", "more_us"), [(True, 1.5), (False, 0.0)])
def test_a_replay_is_part_of_what_is_predicted(capture: bool, more_us: float) -> None:
    """It comes once, whatever is replayed; what is launched op by op is not replayed."""
    profile = profile_with(same_stream_edge_us=1.0, cross_stream_edge_us=1.0)
    free, dear = (candidates(capture, priced(profile=replace(profile, replay_us=us))) for us in (0.0, 1.5))
    assert [c.predicted_us for c in dear] == [c.predicted_us + more_us for c in free]


def test_the_best_of_each_policy_is_on_the_shortlist_however_promising_others_are() -> None:
    """Six of the search's come first by prediction."""
    searched = [rival("search", float(us)) for us in range(6)]
    others = [rival("path_cover", 9.0), rival("critical_path", 7.0), rival("critical_path", 8.0)]
    assert shortlisted([*others, *searched]) == [*searched[:4], others[1], others[0]]


def rival(policy: str, predicted_us: float, streams: int = 2) -> Candidate:
    return Candidate(Schedule(policy, streams, ()), captured=True, predicted_us=predicted_us)


def test_other_numbers_of_streams_come_before_more_of_the_same() -> None:
    """Of seven, one has to go: not the worst, but the third search over as many streams."""
    alike = [rival("search", 1.0 + at / 10, streams=4) for at in range(3)]
    others = [rival("search", 5.0, 3), rival("search", 6.0, 2), rival("path_cover", 7.0, 8), rival("path_cover", 8.0)]
    assert shortlisted([*others, *alike]) == [*alike[:2], *others]


def shortlisted(rivals: list[Candidate], refused: Callable[[Candidate], bool] = lambda rival: False) -> list[Candidate]:
    """The shortlist where some turn out to be refused."""

    def complete(rival: module._Simulated) -> list[Candidate]:
        candidate = rival.candidate
        return [replace(candidate, refusal="too large") if refused(candidate) else candidate]

    return module._shortlist([module._Simulated(rival, Timeline(())) for rival in rivals], complete)


def test_the_next_best_takes_the_place_of_what_is_refused() -> None:
    """Six of eight may run: the second best of the first policy leads it, and all of the other is needed."""
    ours, others = [rival("search", float(us)) for us in range(5)], [rival("path_cover", 9.0 + us) for us in range(3)]
    found = shortlisted([*others, *ours], lambda rival: rival in (ours[0], ours[3]))
    assert [(c.predicted_us, c.refusal) for c in found] == [
        (0.0, "too large"), (1.0, ""), (2.0, ""), (3.0, "too large"), (4.0, ""), (9.0, ""), (10.0, ""), (11.0, ""),
    ]  # fmt: skip
    assert shortlisted([*others, *ours], others[1:].__contains__) == [*ours, others[0]], "the others are not asked"


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 99), st.booleans()), max_size=20))
def test_all_that_may_run_are_shortlisted_up_to_six_and_the_best_of_each_policy_among_them(
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


@pytest.mark.usefixtures("to_the_byte")
@pytest.mark.parametrize(("limit", "waits", "kib"), [(100.0, 2, 19), (12 * 1024, 2, 12), (11 * 1024, 2, 19)])
def test_where_memory_is_short_streams_wait_for_it_if_that_takes_no_time(limit: float, waits: int, kib: int) -> None:
    """What t needed can be given to q once it waits for u, which ended long before; the output has 1 KiB of its own."""
    costs = costs_of(WIDE, {**dict.fromkeys("astuqr", 1.0), "p": 30.0})
    given = Priced(WIDE, profile_with(same_stream_edge_us=0.5, cross_stream_edge_us=2.0), costs, ())
    stream = {name: int(name in "stu") for name in WIDE.ops}
    plain = module._simulated(given, Assignment("by hand", 2, tuple("asptuqr"), stream), capture=True)
    one = module._simulated(given, sequential(WIDE, costs, given.profile, 1, frozenset()), capture=True)
    alone = module._with_memory(WIDE, one.candidate)
    found, *slower = module._Budget(given, alone, limit).within(plain)
    assert slower == []
    assert (found.schedule.wait_count, found.memory_bytes) == (waits, kib * 1024)
    assert bool(found.refusal) == (limit == 11 * 1024)
    assert bool(found.schedule.arena.bytes) == (kib == 12), "without the wait, blocks of each stream are no worse"
    assert bool(found.schedule.join_waits) == (kib == 19), "a wait for memory takes the place of that at the join"
    assert found.predicted_us == plain.candidate.predicted_us == run_us(found.schedule, costs, given.profile)
    verify(WIDE, found.schedule)


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
def test_copies_of_weights_are_no_reason_to_stay_on_one_stream() -> None:
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
def test_what_is_faster_but_too_large_is_kept_beside_what_took_its_place() -> None:
    """So that the report can say what the budget costs: with room for two copies, not all hide behind convolutions."""
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


def test_there_are_variants_where_a_search_pays_and_over_no_more_streams_than_are_allowed() -> None:
    assert all(variant.schedule.streams <= 2 for variant in _variants(priced(), streams=2))
    assert _variants(priced(), policy="critical_path") == []
    assert _variants(priced(replace(BRANCHES, device="cpu"))) == []


def test_a_cpu_and_large_graphs_are_searched_only_when_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[tuple[Any, ...]] = []

    def search(graph: object, costs: object, profile: object, streams: int, pinned: object, *effort: Any) -> Any:
        searched.append((streams, *effort))
        return ()

    monkeypatch.setattr(module, "search_by_streams", search)
    on_cpu = priced(replace(BRANCHES, device="cpu"))
    candidates(given=on_cpu)
    monkeypatch.setattr(module, "_LARGE", len(BRANCHES.ops) - 1)
    candidates()
    candidates(policy="critical_path")
    assert searched == []
    candidates(given=on_cpu, policy="search", streams=3)
    monkeypatch.setattr(module, "_LARGE", len(BRANCHES.ops))
    candidates(tuning_seconds=20.0, seed=7)
    assert searched == [(3, 2.0, 0, True, math.inf), (8, 4.0, 7, True, math.inf)]


def test_candidates_say_what_memory_they_take() -> None:
    """One stream holds the three branches' ends and what was just made, of 1 KiB each; side by side, it is more."""
    for candidate in candidates():
        assert candidate.memory_bytes == peak_bytes(BRANCHES, candidate.schedule)
    assert candidates()[0].memory_bytes == 4 * 1024


@pytest.fixture
def to_the_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """Budgets that forgive nothing, small as these graphs are."""
    monkeypatch.setattr(budget, "SLACK_BYTES", 0)


@pytest.mark.usefixtures("to_the_byte")
@pytest.mark.parametrize("limit", [1.5, 6 * 1024])
def test_what_exceeds_the_memory_budget_is_refused_and_not_verified(
    monkeypatch: pytest.MonkeyPatch, limit: int | float
) -> None:
    """One stream takes 4 KiB, list scheduling 7, the others 6; and 1 KiB is given."""
    verified: list[Schedule] = []
    monkeypatch.setattr(module, "verify", lambda graph, *schedules, pinned: verified.extend(schedules))
    found = candidates(memory_budget=limit)
    assert [(c.schedule.policy, c.memory_bytes, bool(c.refusal)) for c in found] == [
        ("sequential", 4096, False),
        ("critical_path", 7168, True),
        ("critical_path", 7168, True),
        ("search", 6144, False),
        ("path_cover", 6144, False),
    ]
    assert found[1].refusal.startswith("needs ")
    assert verified == [c.schedule for c in found if not c.refusal]


@pytest.mark.usefixtures("to_the_byte")
def test_without_memory_to_spare_one_stream_is_left_whatever_it_takes() -> None:
    for limit in (1.0, 4096, 0.5, 101):
        first, *others = candidates(memory_budget=limit)
        assert (first.schedule.policy, first.refusal) == ("sequential", "")
        assert others
        assert all(other.refusal for other in others)


@pytest.mark.usefixtures("to_the_byte")
@pytest.mark.parametrize("policy", ["critical_path", "path_cover", "search"])
def test_branches_that_are_added_up_run_side_by_side_in_little_memory(policy: PolicyName) -> None:
    """Twelve branches: policies compute all of them before the first sum, and one stream each before the next.

    l0 ── r0 ──── l1 ── r1 ──── l2 ── r2 ── …
             s0 ────────── s1 ─────────── s2 ── …
    """
    names = [f"{kind}{at}" for at in range(12) for kind in "lrs"]
    edges = [edge for at in range(12) for edge in ((f"l{at}", f"r{at}"), (f"r{at}", f"s{at}"))]
    graph = graph_of([*edges, *((f"s{at}", f"s{at + 1}") for at in range(11))], names, outputs=["s11"])
    given = priced(graph, duration_us={name: 20.0 if name[0] == "l" else 3.0 for name in names})
    first, *others = candidates(given=given, policy=policy, memory_budget=8 * 1024)
    best = best_of([first, *others])
    assert first.memory_bytes == 3 * 1024
    assert best.memory_bytes <= 8 * 1024
    assert best.predicted_us < 0.8 * first.predicted_us


def test_there_are_as_many_variants_as_are_measured() -> None:
    """However many fit, one after the other: only those that do not are counted."""
    best = candidates()[1]
    found = islice(variants_of(priced(), Options(memory_budget=math.inf), candidates()[0], best), VARIANTS)
    assert len(list(found)) == VARIANTS


@pytest.mark.usefixtures("to_the_byte")
def test_no_variant_exceeds_the_memory_budget() -> None:
    """Some of the first ten take more than 6 KiB. Where none fits, looking for one comes to an end."""
    assert max(variant.memory_bytes for variant in _variants(priced())) > 6 * 1024
    found = _variants(priced(), memory_budget=1.5)
    assert found
    assert max(variant.memory_bytes for variant in found) <= 6 * 1024
    alone, _, _, best, _ = candidates(memory_budget=1.5)
    assert list(variants_of(priced(), Options(memory_budget=101), alone, best)) == []


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_costs_that_are_no_times_are_refused_by_op(value: float) -> None:
    given = priced()
    wrong = replace(given, costs={**given.costs, "d": replace(given.costs["d"], duration_us=value)})
    with pytest.raises(CostError, match=f"'d' has duration_us={value!r}"):
        candidates(given=wrong, policy="sequential")


def test_the_sequential_policy_stands_alone() -> None:
    assert tried(policy="sequential") == [("sequential", 1)]


def test_a_number_of_streams_that_is_asked_for_is_the_only_one() -> None:
    assert tried(streams=2) == [("sequential", 1), ("critical_path", 2), ("search", 2), ("path_cover", 2)]
    assert tried(streams=1) == [("sequential", 1)]


def test_a_gpu_is_tried_with_several_numbers_of_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = asked(monkeypatch)
    candidates()
    assert counts == [2, 3, 4, 6, 8]


def test_a_large_graph_is_tried_with_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = asked(monkeypatch)
    monkeypatch.setattr(module, "_LARGE", len(BRANCHES.ops) - 1)
    candidates()
    assert counts == [2, 4, 8]


@pytest.mark.parametrize(("cores", "expected"), [(1, []), (2, [2]), (3, [2]), (64, [2, 4])])
def test_a_cpu_is_tried_with_as_many_streams_as_it_has_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, expected: list[int]
) -> None:
    counts = asked(monkeypatch)
    candidates(given=priced(replace(BRANCHES, device="cpu"), profile_with(multiprocessors=cores)))
    assert counts == expected


def test_what_leaves_streams_unused_is_not_asked_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain needs one stream, so it would not use a third."""
    counts = asked(monkeypatch, spread=False)
    assert len(candidates(given=priced(graph_of("a-b b-c")))) == 1
    assert counts == [2]


def asked(monkeypatch: pytest.MonkeyPatch, spread: bool = True) -> list[int]:
    """The numbers of streams that the one policy besides the sequential is asked for; it says that it uses them all."""
    counts: list[int] = []

    def policy(graph: OpGraph, costs: object, profile: object, streams: int, pinned: frozenset[str]) -> Assignment:
        counts.append(streams)
        order = tuple(graph.ops)
        stream = {name: at % streams if spread else 0 for at, name in enumerate(order)}
        return Assignment("mine", streams if spread else 1, order, stream)

    monkeypatch.setattr(module, "ON_CHAINS", {"mine": policy})
    return counts


def test_captured_schedules_put_outputs_anywhere_and_uncaptured_ones_on_the_callers_stream() -> None:
    """The last op of a branch that is an output may be on any stream only where the outputs are copied out."""
    outputs = graph_of("a-b a-c a-d", outputs="bcd")
    assert {c.captured for c in candidates(capture=True, given=priced(outputs))} == {True}
    captured = candidates(capture=True, given=priced(outputs), streams=3, policy="critical_path")[-1]
    assert {captured.schedule.stream_of[name] for name in "bcd"} == {0, 1, 2}
    for candidate in candidates(capture=False, given=priced(outputs)):
        assert not candidate.captured
        assert {candidate.schedule.stream_of[name] for name in "bcd"} == {0}


def carelessly_synchronized(graph: OpGraph, assignment: Assignment) -> Schedule:
    """A defect in the synchronizer: the join waits for the branches, but h, which reads what they make, does not."""
    schedule = synchronize(graph, assignment)
    last = replace(schedule.launches[-1], waits=())
    return replace(schedule, launches=(*schedule.launches[:-1], last), join_waits=schedule.launches[-1].waits)


def test_a_schedule_that_is_wrong_is_never_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "synchronize", carelessly_synchronized)
    with pytest.raises(ScheduleError, match="'h' must come after"):
        candidates(streams=3)


def test_nor_is_a_variant_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    alone, best, *_ = candidates(capture=False)
    monkeypatch.setattr(module, "synchronize", carelessly_synchronized)
    with pytest.raises(ScheduleError, match="'h' must come after"):
        next(variants_of(priced(), options_of({}), alone, best))


def test_a_policy_that_moves_a_pinned_op_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(graph: OpGraph, costs: Any, profile: Any, streams: int, pinned: frozenset[str]) -> Assignment:
        return POLICIES["critical_path"](graph, costs, profile, streams, frozenset())

    monkeypatch.setattr(module, "ON_CHAINS", {"careless": careless})
    with pytest.raises(ScheduleError, match="pinned to stream 0"):
        candidates(capture=False, given=priced(graph_of("a-b a-c", outputs="bc")))


def test_an_empty_graph_has_one_schedule() -> None:
    (only,) = candidates(given=priced(graph_of(())))
    assert (only.schedule.launches, only.predicted_us) == ((), 0.0)
