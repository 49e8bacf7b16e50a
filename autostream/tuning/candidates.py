"""From priced ops to schedules that are worth measuring: assign, synchronize, place, release, verify.

Where a schedule exceeds the memory budget, the same streams are tried in another order and with more waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from operator import itemgetter

from autostream.errors import ScheduleError
from autostream.ir import Assignment, Candidate, Costs, Decision, DeviceProfile, Limit, OpGraph, Schedule, Timeline
from autostream.options import Options
from autostream.scheduling.arena import place_storages
from autostream.scheduling.check import check_costs
from autostream.scheduling.coarsen import coarsen, expand
from autostream.scheduling.peak import Footprint, given_bytes, peak_bytes
from autostream.scheduling.policies import ON_CHAINS, POLICIES
from autostream.scheduling.policies.search import search_by_streams, variants
from autostream.scheduling.postpone import MAX_SLACK_SHARE, in_program_order, postponed
from autostream.scheduling.releases import place_releases, wait_for_memory
from autostream.scheduling.simulate import replay_us, simulate
from autostream.scheduling.synchronize import synchronize
from autostream.scheduling.verify import verify
from autostream.tuning.budget import excess, room_bytes
from autostream.utils import collector
from autostream.utils.stopwatch import Stopwatch

SHORTLIST = 6
"""Schedules that are worth measuring, besides the sequential one: the simulator ranks them, but it is only a model."""

_GPU_STREAMS = (2, 3, 4, 6, 8)
_CPU_STREAMS = (2, 4)

_LARGE = 4000
"""Graphs of more ops than this are planned for every other number of streams: it takes long, and gains little. Nor are
they searched, unless that is asked for: there would be time for a few changes only."""

_LOOKS = 10
"""Variants in a row that may exceed the memory budget, before no more are looked at: all of them may."""

SEARCH_SHARE = 0.2
"""Of the seconds for tuning, what a search may take. Nothing is left to the clock there, so that it can be repeated."""

WORTH_A_WAIT = 1 / 16
"""The share of one stream's memory that must have become free elsewhere for a wait that makes it available."""

SLACKS = (0.0, 0.5, MAX_SLACK_SHARE)
"""The shares of the launches' slack that waits for memory may use up, tried in turn."""


@dataclass(frozen=True)
class Priced:
    """A program's dataflow with what each op costs.

    Attributes:
        graph: ops and hazards.
        profile: the device that is planned for.
        costs: of each op.
        refusals: why a CUDA graph cannot hold the program; empty where it can, and on the CPU, which has none.
        remarks: what was wrong with keeping measurements.
    """

    graph: OpGraph
    profile: DeviceProfile
    costs: Costs
    refusals: tuple[Decision, ...]
    remarks: tuple[Decision, ...] = ()


def candidates_for(priced: Priced, options: Options, capture: bool, stopwatch: Stopwatch) -> tuple[Candidate, ...]:
    """Schedules of a program: the sequential one first, then the most promising ones, best prediction first.

    They are verified, but for those that exceed the memory budget, which say so in their refusal and must not run.

    Args:
        priced: the program's ops.
        options: policy, streams and memory budget.
        capture: whether they are to be captured; uncaptured schedules keep outputs on the caller's stream.
        stopwatch: is told how long each stage takes.

    Raises:
        CostError: an op has no cost, or one that is no number.
        ScheduleError: a schedule failed verification, which is a defect of autostream.
    """
    graph, pinned = priced.graph, _pinned(priced, capture)
    check_costs(graph, priced.costs)
    with stopwatch("schedule"), collector.paused():
        budget = _Budget(priced, _sequential(priced, capture), options.memory_budget)
        assigned = tuple(_assigned(priced, options, pinned))
    if _searches(priced, options):
        with stopwatch("search"), collector.paused():
            assigned += _searched(priced, options, pinned, capture, budget.room_bytes)
    with stopwatch("schedule"), collector.paused():
        rivals = [_simulated(priced, assignment, capture) for assignment in _distinct(assigned)]
        candidates = (budget.sequential, *_shortlist(rivals, budget.within))
    with stopwatch("verify"), collector.paused():
        verify(graph, *(candidate.schedule for candidate in _allowed(candidates)), pinned=pinned)
    return candidates


def candidates_again(
    priced: Priced, options: Options, schedule: Schedule, stopwatch: Stopwatch
) -> tuple[Candidate, ...]:
    """The sequential schedule, and one that was chosen before if that is another, both to be captured.

    Args:
        priced: the program's ops.
        options: as they were then.
        schedule: what was chosen. Nothing is taken for granted of it.
        stopwatch: is told how long each stage takes.

    Raises:
        CostError: as of :func:`candidates_for`.
        ScheduleError: it is no schedule of these ops, or not a right one, or takes more memory than it may.
    """
    check_costs(priced.graph, priced.costs)
    with stopwatch("verify"), collector.paused():
        verify(priced.graph, schedule)
    with stopwatch("schedule"), collector.paused():
        sequential = _sequential(priced, capture=True)
        if schedule.streams == 1:
            return (sequential,)
        again = replace(_run(priced, schedule, True).candidate, memory_bytes=peak_bytes(priced.graph, schedule))
        if reason := excess(again, sequential, options.memory_budget, given_bytes(priced.graph)):
            raise ScheduleError(f"the schedule chosen before {reason}")
        return (sequential, again)


def variants_of(priced: Priced, options: Options, sequential: Candidate, candidate: Candidate) -> Iterator[Candidate]:
    """Verified schedules that differ little from one that was measured, made one by one as they are asked for.

    The simulator cannot tell them apart; the device can. There are none where a search does not pay, and none that
    exceeds the memory budget.

    Args:
        priced: the program's ops.
        options: policy, streams and memory budget.
        sequential: the schedule on one stream.
        candidate: what to change.
    """
    if not _searches(priced, options):
        return
    budget = _Budget(priced, sequential, options.memory_budget)
    graph, pinned, captured = priced.graph, _pinned(priced, candidate.captured), candidate.captured
    most = max(_stream_counts(priced, options), default=1)
    streams = min(candidate.schedule.streams + 1, most)
    given = (graph, priced.costs, priced.profile, candidate.schedule, streams, pinned)
    found = variants(*given, options.seed, captured, budget.room_bytes)
    misses = 0
    while misses < _LOOKS:
        with collector.paused():
            assignment = next(found, None)
            if assignment is None:
                return
            variant, *_ = budget.within(_simulated(priced, assignment, captured))
            if variant.refusal:
                misses += 1
                continue
            misses = 0
            verify(graph, variant.schedule, pinned=pinned)
        yield variant


def best_of(candidates: Iterable[Candidate]) -> Candidate:
    """The one of the best prediction among those that may run."""
    return min(_allowed(candidates), key=_promise)


def _sequential(priced: Priced, capture: bool) -> Candidate:
    assign = POLICIES["sequential"]
    assignment = assign(priced.graph, priced.costs, priced.profile, 1, _pinned(priced, capture))
    return _with_memory(priced.graph, _simulated(priced, assignment, capture).candidate)


def _pinned(priced: Priced, capture: bool) -> frozenset[str]:
    """Ops that must be on the caller's stream; in a CUDA graph none, for it is joined as a whole."""
    return frozenset() if capture else priced.graph.pinned


@dataclass(frozen=True, slots=True)
class _Simulated:
    """A candidate as yet without memory, and how it runs by the simulator."""

    candidate: Candidate
    timeline: Timeline


def _simulated(priced: Priced, assignment: Assignment, capture: bool) -> _Simulated:
    return _run(priced, synchronize(priced.graph, assignment), capture)


def _run(priced: Priced, schedule: Schedule, capture: bool) -> _Simulated:
    timeline = simulate(schedule, priced.costs, priced.profile, captured=capture)
    predicted_us = timeline.makespan_us + replay_us(priced.profile, capture)
    return _Simulated(Candidate(schedule, capture, predicted_us), timeline)


def _with_memory(graph: OpGraph, candidate: Candidate) -> Candidate:
    """A candidate whose schedule says where memory lies and when it is given back, with what it needs.

    An arena is there for the whole run, beside what ops allocate by themselves: where there is much of that, blocks
    that come and go may need less.
    """
    schedules = [place_releases(graph, place_storages(graph, candidate.schedule))]
    if schedules[0].arena.bytes:
        schedules.append(place_releases(graph, candidate.schedule))
    needed, schedule = min(((peak_bytes(graph, each), each) for each in schedules), key=itemgetter(0))
    return replace(candidate, schedule=schedule, memory_bytes=needed)


@dataclass(frozen=True)
class _Budget:
    """The memory that schedules may take.

    Attributes:
        priced: the program's ops.
        sequential: the schedule on one stream, complete.
        limit: bytes, or a ratio to what the model takes on one stream.
    """

    priced: Priced
    sequential: Candidate
    limit: int | float

    @cached_property
    def footprint(self) -> Footprint:
        """Of the ops."""
        return Footprint(self.priced.graph)

    @cached_property
    def room_bytes(self) -> float:
        """What a schedule may allocate."""
        return room_bytes(self.sequential, self.limit, given_bytes(self.priced.graph))

    def within(self, rival: _Simulated) -> tuple[Candidate, ...]:
        """The candidate with memory if it keeps to the budget.

        If it does not: the schedule most like it that does, if there is one, and itself, refused, if it were faster.
        """
        plain = self._judged(rival)
        if not plain.refusal:
            return (plain,)
        fitting = list(islice(filter(_may_run, map(self._judged, self._thrifty(rival))), 1))
        faster = all(plain.predicted_us < found.predicted_us for found in fitting)
        return (*fitting, *([plain] if faster else []))

    def _judged(self, rival: _Simulated) -> Candidate:
        """The candidate with memory; where it cannot but exceed the budget, that is known without a place for each."""
        graph, candidate = self.priced.graph, rival.candidate
        least = self.footprint.live_bytes(rival.timeline)
        hopeless = least > self.room_bytes
        known = replace(candidate, memory_bytes=least) if hopeless else _with_memory(graph, candidate)
        refusal = excess(known, self.sequential, self.limit, given_bytes(graph), at_least=hopeless)
        limit = Limit.BUDGET if refusal else None
        return replace(known, refusal=refusal, limit=limit, incomplete=hopeless)

    def _thrifty(self, rival: _Simulated) -> Iterator[_Simulated]:
        """The same streams in schedules that need less memory, those that change least first."""
        graph, profile, original = self.priced.graph, self.priced.profile, rival.candidate.schedule
        edge_us = profile.over(original.streams).cross_stream_edge_us
        least_bytes = max(1, round(WORTH_A_WAIT * self.sequential.memory_bytes))
        yield from self._waiting(rival, edge_us, least_bytes)
        for order in (postponed(graph, original, rival.timeline, edge_us), in_program_order(graph, original)):
            yield from self._waiting(self._run(synchronize(graph, order)), edge_us, least_bytes)

    def _waiting(self, rival: _Simulated, edge_us: float, least_bytes: int) -> Iterator[_Simulated]:
        """The same with waits for memory, which use up ever more slack."""
        schedule, when = rival.candidate.schedule, rival.timeline
        for slack in SLACKS:
            yield self._run(wait_for_memory(self.priced.graph, schedule, when, edge_us, least_bytes, slack))

    def _run(self, schedule: Schedule) -> _Simulated:
        return _run(self.priced, schedule, self.sequential.captured)


def _assigned(priced: Priced, options: Options, pinned: frozenset[str]) -> Iterator[Assignment]:
    """What each policy with side streams but the search makes of each number of streams."""
    coarse = coarsen(priced.graph, priced.costs, priced.profile, pinned)
    for name, policy in ON_CHAINS.items():
        for streams in _stream_counts(priced, options) if options.policy in ("auto", name) else ():
            assignment = policy(coarse.graph, coarse.costs, priced.profile, streams, coarse.pinned)
            yield expand(coarse, assignment)
            if assignment.streams < streams:
                break  # with more streams, the policy would leave more of them unused


def _searches(priced: Priced, options: Options) -> bool:
    """Whether to search: where that is asked for, or pays. Waking threads of a CPU costs more than it gains."""
    pays = priced.graph.device != "cpu" and len(priced.graph.ops) <= _LARGE
    return options.policy == "search" or (options.policy == "auto" and pays)


def _searched(
    priced: Priced, options: Options, pinned: frozenset[str], capture: bool, room_bytes: float
) -> tuple[Assignment, ...]:
    """What the search finds for each number of streams, up to the largest that is allowed."""
    most = max(_stream_counts(priced, options), default=1)
    seconds = SEARCH_SHARE * options.tuning_seconds
    graph, costs, profile = priced.graph, priced.costs, priced.profile
    return search_by_streams(graph, costs, profile, most, pinned, seconds, options.seed, capture, room_bytes)


def _distinct(assignments: Iterable[Assignment]) -> Iterator[Assignment]:
    """Those that use side streams, each once."""
    seen = set()
    for assignment in assignments:
        plan = tuple((op, assignment.stream[op]) for op in assignment.order)
        if assignment.streams > 1 and plan not in seen:
            yield assignment
        seen.add(plan)


def _shortlist(rivals: Iterable[_Simulated], complete: Callable[[_Simulated], Sequence[Candidate]]) -> list[Candidate]:
    """The best of each policy, of each policy and number of streams, then of all; and whatever is better but refused.

    What differs little by prediction and by how it was made differs little on the device, and variants of the winner
    are measured anyway.

    Args:
        rivals: candidates as yet without memory.
        complete: finds out what one comes to, and whether it is refused; not asked more often than needed.
    """
    waiting, completed = sorted(rivals, key=lambda rival: _promise(rival.candidate)), list[Candidate]()
    while waiting and len(_allowed(completed)) < SHORTLIST:
        known = {kind for candidate in _allowed(completed) for kind in _kinds(candidate)}
        old = [len(known & _kinds(rival.candidate)) for rival in waiting]
        completed.extend(complete(waiting.pop(old.index(min(old)))))
    return sorted(completed, key=_promise)


def _kinds(candidate: Candidate) -> set[tuple[object, ...]]:
    """How a candidate was made: of equal kinds, the device can tell candidates apart no better than the simulator."""
    return {(candidate.schedule.policy,), (candidate.schedule.policy, candidate.schedule.streams)}


def _may_run(candidate: Candidate) -> bool:
    return not candidate.refusal


def _allowed(candidates: Iterable[Candidate]) -> list[Candidate]:
    return list(filter(_may_run, candidates))


def _promise(candidate: Candidate) -> tuple[float, int]:
    return candidate.predicted_us, candidate.schedule.streams


def _stream_counts(priced: Priced, options: Options) -> Sequence[int]:
    if options.streams != "auto":
        return (options.streams,)
    if priced.graph.device == "cpu":
        return [count for count in _CPU_STREAMS if count <= priced.profile.multiprocessors]
    return _GPU_STREAMS if len(priced.graph.ops) <= _LARGE else _GPU_STREAMS[::2]
