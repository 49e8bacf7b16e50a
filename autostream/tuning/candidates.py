"""The schedules that are worth measuring: each is assigned, synchronized, given memory, and verified.

If a schedule exceeds the memory budget, the same streams are tried with another launch order and with more waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from operator import itemgetter

from autostream.errors import ScheduleError
from autostream.ir import Assignment, Candidate, Limit, OpGraph, Schedule, Timeline
from autostream.options import Options
from autostream.scheduling.arena import place_storages
from autostream.scheduling.coarsen import coarsen, expand
from autostream.scheduling.cost_check import check_costs
from autostream.scheduling.peak import Footprint, peak_bytes
from autostream.scheduling.policies import ON_CHAINS, POLICIES
from autostream.scheduling.policies.search import search, variants
from autostream.scheduling.postpone import MAX_SLACK_SHARE, in_program_order, postponed
from autostream.scheduling.releases import place_releases, wait_for_memory
from autostream.scheduling.simulate import replay_us, simulate
from autostream.scheduling.synchronize import synchronize
from autostream.scheduling.verify import verify
from autostream.tuning.budget import Budget, budget_of
from autostream.tuning.pricing import Priced
from autostream.utils import collector
from autostream.utils.stopwatch import Stopwatch

SHORTLIST = 6
"""How many schedules are measured besides the sequential one, by predicted time; predictions are not exact."""

_GPU_STREAMS = (2, 3, 4, 6, 8)
_CPU_STREAMS = (2, 4)

_LARGE = 4000
"""Graphs with more ops than this are scheduled for every other number of streams only, since scheduling takes long. A
search has time for few changes of them, so they are only searched with ``policy="search"``."""

_MANY = 150
"""Of graphs with more ops than this, schedules that hardly fit into the memory budget are not looked for."""

_MAX_MISSES = 10
"""After so many variants in a row exceed the memory budget, no more are made: all of them may."""

SEARCH_SHARE = 0.2
"""The share of ``tuning_seconds`` for a search. It determines the number of steps, so that a search is repeatable."""

WORTH_A_WAIT = 1 / 16
"""The share of one stream's memory that must have become free elsewhere for a wait that makes it available."""

SLACKS = (0.0, 0.5, MAX_SLACK_SHARE)
"""The shares of the launches' slack that waits for memory may use up, tried in turn."""


def candidates_for(priced: Priced, options: Options, capture: bool, stopwatch: Stopwatch) -> tuple[Candidate, ...]:
    """Schedules of a program: the sequential one first, then by predicted time, the fastest first.

    They are verified, except those that exceed the memory budget, which have a refusal and must not run.

    Args:
        priced: the program's ops.
        options: policy, streams and memory budget.
        capture: whether they are to be captured. Outputs of uncaptured schedules stay on the caller's stream.
        stopwatch: records the seconds of each stage.

    Raises:
        CostError: an op has no cost, or one that is not a number.
        ScheduleError: a schedule failed verification, which is a bug of autostream.
    """
    graph, pinned = priced.graph, _pinned(priced, capture)
    check_costs(graph, priced.costs)
    with stopwatch("schedule"), collector.paused():
        fitting = _fitting(priced, _sequential(priced, capture), options)
        assigned = tuple(_assigned(priced, options, pinned))
    if _searches(priced, options):
        with stopwatch("search"), collector.paused():
            assigned += _searched(priced, options, pinned, capture, fitting.budget.room_bytes)
    with stopwatch("schedule"), collector.paused():
        simulated = [_simulated(priced, assignment, capture) for assignment in _distinct(assigned)]
        candidates = (fitting.sequential, *_shortlist(simulated, fitting.within))
    with stopwatch("verify"):
        check(priced, candidates, capture)
    return candidates


def check(priced: Priced, candidates: Sequence[Candidate], capture: bool) -> None:
    """Verify the schedules of candidates that are not refused.

    Args:
        priced: the program's ops.
        candidates: schedules of these.
        capture: whether they are to be captured.

    Raises:
        ScheduleError: one is wrong.
    """
    with collector.paused():
        verify(
            priced.graph,
            *(candidate.schedule for candidate in _allowed(candidates)),
            pinned=_pinned(priced, capture),
        )


def candidates_again(
    priced: Priced, options: Options, schedule: Schedule, stopwatch: Stopwatch
) -> tuple[Candidate, ...]:
    """The sequential schedule, and the one that an earlier process has chosen if it is another, both to be captured.

    Args:
        priced: the program's ops.
        options: of the earlier process.
        schedule: the chosen one, from a file. It is verified.
        stopwatch: records the seconds of each stage.

    Raises:
        CostError: as :func:`candidates_for` raises it.
        ScheduleError: it is not a schedule of these ops, is not correct, or exceeds the memory budget.
    """
    check_costs(priced.graph, priced.costs)
    with stopwatch("verify"), collector.paused():
        verify(priced.graph, schedule)
    with stopwatch("schedule"), collector.paused():
        sequential = _sequential(priced, capture=True)
        if schedule.streams == 1:
            return (sequential,)
        chosen = replace(_run(priced, schedule, True).candidate, memory_bytes=peak_bytes(priced.graph, schedule))
        budget = budget_of(priced.graph, priced.profile, sequential, options.memory_budget)
        if reason := budget.excess(chosen.memory_bytes):
            raise ScheduleError(f"the schedule chosen before {reason}")
        return (sequential, chosen)


def variants_of(priced: Priced, options: Options, sequential: Candidate, candidate: Candidate) -> Iterator[Candidate]:
    """Yield verified schedules that differ little from one that was measured.

    Their predicted times are equal, but their measured times may differ. There are none if a search does not pay, and
    none exceeds the memory budget.

    Args:
        priced: the program's ops.
        options: policy, streams and memory budget.
        sequential: the schedule on one stream.
        candidate: the schedule to change.
    """
    if not _searches(priced, options):
        return
    fitting = _fitting(priced, sequential, options)
    graph, pinned, captured = priced.graph, _pinned(priced, candidate.captured), candidate.captured
    most = max(_stream_counts(priced, options), default=1)
    streams = min(candidate.schedule.streams + 1, most)
    problem = (graph, priced.costs, priced.profile, candidate.schedule, streams, pinned)
    assignments = variants(*problem, options.seed, captured, fitting.budget.room_bytes)
    misses = 0
    while misses < _MAX_MISSES:
        with collector.paused():
            assignment = next(assignments, None)
            if assignment is None:
                return
            variant, *_ = fitting.within(_simulated(priced, assignment, captured))
            if variant.refusal:
                misses += 1
                continue
            misses = 0
            verify(graph, variant.schedule, pinned=pinned)
        yield variant


def best_of(candidates: Iterable[Candidate]) -> Candidate:
    """The candidate with the lowest predicted time among those that may run."""
    return min(_allowed(candidates), key=_by_prediction)


def _sequential(priced: Priced, capture: bool) -> Candidate:
    assign = POLICIES["sequential"]
    assignment = assign(priced.graph, priced.costs, priced.profile, 1, _pinned(priced, capture))
    return _with_memory(priced.graph, _simulated(priced, assignment, capture).candidate)


def _pinned(priced: Priced, capture: bool) -> frozenset[str]:
    """Ops that must be on the caller's stream: none in a CUDA graph, which is joined as a whole."""
    return frozenset() if capture else priced.graph.pinned


@dataclass(frozen=True, slots=True)
class _Simulated:
    """A candidate without memory placement, and its simulated timeline."""

    candidate: Candidate
    timeline: Timeline


def _simulated(priced: Priced, assignment: Assignment, capture: bool) -> _Simulated:
    return _run(priced, synchronize(priced.graph, assignment), capture)


def _run(priced: Priced, schedule: Schedule, capture: bool) -> _Simulated:
    timeline = simulate(schedule, priced.costs, priced.profile, captured=capture)
    predicted_us = timeline.makespan_us + replay_us(priced.profile, capture)
    return _Simulated(Candidate(schedule, capture, predicted_us), timeline)


def _with_memory(graph: OpGraph, candidate: Candidate) -> Candidate:
    """A candidate with arena offsets, releases, and its peak memory.

    An arena is allocated for the whole run, besides what ops allocate by themselves. If ops allocate much, a schedule
    without an arena may need less.
    """
    schedules = [place_releases(graph, place_storages(graph, candidate.schedule))]
    if schedules[0].arena.bytes:
        schedules.append(place_releases(graph, candidate.schedule))
    peak, schedule = min(((peak_bytes(graph, each), each) for each in schedules), key=itemgetter(0))
    return replace(candidate, schedule=schedule, memory_bytes=peak)


@dataclass(frozen=True)
class _Fitting:
    """Fits candidates into the memory budget of a program.

    Attributes:
        priced: the program's ops.
        sequential: the schedule on one stream, complete.
        budget: what a schedule may allocate.
    """

    priced: Priced
    sequential: Candidate
    budget: Budget

    @cached_property
    def footprint(self) -> Footprint:
        """Of the ops."""
        return Footprint(self.priced.graph)

    def within(self, simulated: _Simulated) -> tuple[Candidate, ...]:
        """The candidate with memory placement, if it fits the budget.

        Otherwise, the most similar schedule that fits, if there is one, and the refused candidate if it is faster.
        """
        original = self._with_memory(simulated)
        if not original.refusal:
            return (original,)
        fitting = list(islice(self._smaller(simulated), 1))
        faster = all(original.predicted_us < candidate.predicted_us for candidate in fitting)
        return (*fitting, *([original] if faster else []))

    def _with_memory(self, simulated: _Simulated) -> Candidate:
        """The candidate with memory placement, and with a refusal if it exceeds the budget.

        If its live bytes alone exceed the budget, placement is skipped.
        """
        graph, candidate = self.priced.graph, simulated.candidate
        live_bytes = self.footprint.live_bytes(simulated.timeline)
        hopeless = live_bytes > self.budget.room_bytes
        candidate = replace(candidate, memory_bytes=live_bytes) if hopeless else _with_memory(graph, candidate)
        refusal = self.budget.excess(candidate.memory_bytes, at_least=hopeless)
        limit = Limit.BUDGET if refusal else None
        return replace(candidate, refusal=refusal, limit=limit, incomplete=hopeless)

    def _smaller(self, simulated: _Simulated) -> Iterator[Candidate]:
        """Schedules with the same streams that fit, the most similar first."""
        graph, profile, original = self.priced.graph, self.priced.profile, simulated.candidate.schedule
        edge_us = profile.over(original.streams).cross_stream_edge_us
        yield from self._waiting(simulated, edge_us)
        for order in (postponed(graph, original, simulated.timeline, edge_us), in_program_order(graph, original)):
            yield from self._waiting(self._run(synchronize(graph, order)), edge_us)

    def _waiting(self, simulated: _Simulated, edge_us: float) -> Iterator[Candidate]:
        """The schedule with waits for memory that use up little of the launches' slack, then more and more, if it fits.

        Of many ops, the one that uses up the most is made first: where even that does not fit, which is usual for a
        schedule that needs much more than the budget, the others rarely do, and making them takes seconds.
        """
        schedule, timeline = simulated.candidate.schedule, simulated.timeline
        least_bytes = max(1, round(WORTH_A_WAIT * self.sequential.memory_bytes))

        def waiting(slack: float) -> Candidate:
            waits = wait_for_memory(self.priced.graph, schedule, timeline, edge_us, least_bytes, slack)
            return self._with_memory(self._run(waits))

        *less, most = SLACKS
        if len(self.priced.graph.ops) <= _MANY or _may_run(waiting(most)):
            yield from filter(_may_run, map(waiting, (*less, most)))

    def _run(self, schedule: Schedule) -> _Simulated:
        return _run(self.priced, schedule, self.sequential.captured)


def _fitting(priced: Priced, sequential: Candidate, options: Options) -> _Fitting:
    return _Fitting(priced, sequential, budget_of(priced.graph, priced.profile, sequential, options.memory_budget))


def _assigned(priced: Priced, options: Options, pinned: frozenset[str]) -> Iterator[Assignment]:
    """The assignments of each policy on chains for each number of streams."""
    coarse = coarsen(priced.graph, priced.costs, priced.profile, pinned)
    for name, policy in ON_CHAINS.items():
        for streams in _stream_counts(priced, options) if options.policy in ("auto", name) else ():
            assignment = policy(coarse.graph, coarse.costs, priced.profile, streams, coarse.pinned)
            yield expand(coarse, assignment)
            if assignment.streams < streams:
                break  # the policy uses no more streams


def _searches(priced: Priced, options: Options) -> bool:
    """Whether to search: with ``policy="search"``, or on a GPU. On a CPU, waking threads costs more than it gains."""
    pays = priced.graph.device != "cpu" and len(priced.graph.ops) <= _LARGE
    return options.policy == "search" or (options.policy == "auto" and pays)


def _searched(
    priced: Priced, options: Options, pinned: frozenset[str], capture: bool, room_bytes: float
) -> tuple[Assignment, ...]:
    """The assignments that the search finds for each number of streams up to the largest allowed."""
    most = max(_stream_counts(priced, options), default=1)
    seconds = SEARCH_SHARE * options.tuning_seconds
    graph, costs, profile = priced.graph, priced.costs, priced.profile
    return search(graph, costs, profile, most, pinned, seconds, options.seed, capture, room_bytes)


def _distinct(assignments: Iterable[Assignment]) -> Iterator[Assignment]:
    """The distinct assignments that use more than one stream."""
    seen = set()
    for assignment in assignments:
        plan = tuple((op, assignment.stream[op]) for op in assignment.order)
        if assignment.streams > 1 and plan not in seen:
            yield assignment
        seen.add(plan)


def _shortlist(
    simulated: Iterable[_Simulated], complete: Callable[[_Simulated], Sequence[Candidate]]
) -> list[Candidate]:
    """The fastest of each policy, then of each policy and number of streams, then of all; also faster ones, refused.

    Candidates of one policy with similar predictions run in similar times, and variants of the fastest are measured
    anyway.

    Args:
        simulated: candidates without memory placement.
        complete: returns what :meth:`_Budget.within` returns. It is slow, and called no more often than needed.
    """
    pending, completed = sorted(simulated, key=lambda each: _by_prediction(each.candidate)), list[Candidate]()
    while pending and len(_allowed(completed)) < SHORTLIST:
        known = {kind for candidate in _allowed(completed) for kind in _kinds(candidate)}
        overlap = [len(known & _kinds(each.candidate)) for each in pending]
        completed.extend(complete(pending.pop(overlap.index(min(overlap)))))
    return sorted(completed, key=_by_prediction)


def _kinds(candidate: Candidate) -> set[tuple[object, ...]]:
    """The policy, and the policy with the number of streams."""
    return {(candidate.schedule.policy,), (candidate.schedule.policy, candidate.schedule.streams)}


def _may_run(candidate: Candidate) -> bool:
    return not candidate.refusal


def _allowed(candidates: Iterable[Candidate]) -> list[Candidate]:
    return list(filter(_may_run, candidates))


def _by_prediction(candidate: Candidate) -> tuple[float, int]:
    return candidate.predicted_us, candidate.schedule.streams


def _stream_counts(priced: Priced, options: Options) -> Sequence[int]:
    if options.streams != "auto":
        return (options.streams,)
    if priced.graph.device == "cpu":
        return [count for count in _CPU_STREAMS if count <= priced.profile.multiprocessors]
    return _GPU_STREAMS if len(priced.graph.ops) <= _LARGE else _GPU_STREAMS[::2]
