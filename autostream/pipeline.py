"""The stages in order; read this first.

    trace ─▶ analyze ─▶ price ─▶ assign ─▶ synchronize ─▶ simulate ─▶ release ─▶ verify
                                                         then, in select.py: lower ─▶ capture ─▶ measure

Everything here is computed from values and runs nothing on a device, but for measured costs.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from operator import itemgetter

import torch
from torch import Tensor, nn

from autostream import collector
from autostream.analysis.dependencies import analyze
from autostream.budget import excess, exemption
from autostream.costs.device import profile_of
from autostream.costs.here import Remarks, costs_here, profile_here
from autostream.costs.roofline import price
from autostream.errors import FusionError, OptionError
from autostream.ir import Assignment, Candidate, Costs, Decision, DeviceProfile, OpGraph, Program
from autostream.options import Options
from autostream.reporting.report import Report
from autostream.scheduling import POLICIES
from autostream.scheduling.arena import place_storages
from autostream.scheduling.check import check_costs
from autostream.scheduling.peak import given_bytes, peak_bytes
from autostream.scheduling.recycling import wait_for_memory
from autostream.scheduling.releases import place_releases
from autostream.scheduling.search import search_by_streams, variants
from autostream.scheduling.simulate import run_us, simulate
from autostream.scheduling.synchronize import synchronize
from autostream.scheduling.verify import verify
from autostream.tracing.export import Traced, trace
from autostream.tracing.inductor import fuse, obstacle
from autostream.tracing.signature import signature_of
from autostream.tracing.state import LiveState, ModelWatch, name_of
from autostream.tracing.tree import flatten
from autostream.version import VERSION

SHORTLIST = 6
"""Schedules that are worth measuring, besides the sequential one: the simulator ranks them, but it is only a model."""

_GPU_STREAMS = (2, 3, 4, 6, 8)
_CPU_STREAMS = (2, 4)

_LARGE = 4000
"""Graphs of more ops than this are planned for every other number of streams: it takes long, and gains little. Nor are
they searched, unless that is asked for: there would be time for a few changes only."""

_LOOKS = 10
"""Variants in a row that may exceed the memory budget, before no more are looked at: all of them may."""

MEASURE_SHARE = 0.5
"""Of the seconds for tuning, what timing ops may take; ops for which none are left keep their estimates."""

SEARCH_SHARE = 0.2
"""Of the seconds for tuning, what a search may take. Nothing is left to the clock there, so that it can be repeated."""

WORTH_A_WAIT = (1 / 2, 1 / 16)
"""The share of one stream's memory that must have become free elsewhere for a wait that makes it available: tried in
turn where a schedule exceeds the budget, few waits first."""

TUNING = ("price", "search", "select")
"""The stages that ``tuning_seconds`` are for."""


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


@dataclass(slots=True)
class Stopwatch:
    """Wall-clock seconds by stage."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Add the time spent inside to a stage."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start

    def left(self, options: Options) -> float:
        """What remains of the seconds for tuning, 0 or more."""
        return max(0.0, options.tuning_seconds - sum(self.seconds.get(stage, 0.0) for stage in TUNING))


def price_program(
    program: Program,
    options: Options,
    stopwatch: Stopwatch,
    profile: DeviceProfile | None = None,
    tensors: Sequence[Tensor] | None = None,
) -> Priced:
    """From a program to priced ops.

    Args:
        program: the traced model.
        options: which costs to use.
        stopwatch: is told how long each stage takes.
        profile: of the device to plan for; by default the program's own.
        tensors: the program's arguments, for measured costs; without them, costs are estimated.
    """
    with stopwatch("analyze"), collector.paused():
        graph = analyze(program)
    remarks: Remarks = ()
    with stopwatch("price"):
        if profile is None:
            profile, remarks = profile_here(program.device)
        if tensors is None or not _measures(options, graph):
            costs = price(graph, profile)
        else:
            budget_s = min(MEASURE_SHARE * options.tuning_seconds, stopwatch.left(options))
            costs, faults = costs_here(program, graph, profile, tensors, budget_s)
            remarks = (*remarks, *faults)
    return Priced(graph, profile, costs, _capture_refusals(graph), tuple(dict.fromkeys(remarks)))


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
    graph, profile, costs = priced.graph, priced.profile, priced.costs
    pinned = _pinned(priced, capture)
    check_costs(graph, costs)
    with stopwatch("schedule"), collector.paused():
        assigned = tuple(_assigned(priced, options, pinned))
    if _searches(priced, options):
        with stopwatch("search"), collector.paused():
            assigned += _searched(priced, options, pinned, capture)
    with stopwatch("schedule"), collector.paused():
        alone = _complete(priced, POLICIES["sequential"](graph, costs, profile, 1, pinned), capture)
        rivals = [_candidate(priced, assignment, capture) for assignment in _distinct(assigned)]
        candidates = (alone, *_shortlist(rivals, lambda rival: _within(priced, rival, alone, options)))
    with stopwatch("verify"), collector.paused():
        for candidate in _allowed(candidates):
            verify(graph, candidate.schedule, pinned=pinned)
    return candidates


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
    graph, pinned = priced.graph, _pinned(priced, candidate.captured)
    most = max(_stream_counts(priced, options), default=1)
    streams = min(candidate.schedule.streams + 1, most)
    found = variants(
        graph, priced.costs, priced.profile, candidate.schedule, streams, pinned, options.seed, candidate.captured
    )
    misses = 0
    while misses < _LOOKS:
        with collector.paused():
            assignment = next(found, None)
            if assignment is None:
                return
            variant = _with_memory(graph, _candidate(priced, assignment, candidate.captured))
            if excess(variant, sequential, options.memory_budget, given_bytes(graph)):
                misses += 1
                continue
            misses = 0
            verify(graph, variant.schedule, pinned=pinned)
        yield variant


def _pinned(priced: Priced, capture: bool) -> frozenset[str]:
    """Ops that must be on the caller's stream; in a CUDA graph none, for it is joined as a whole."""
    return frozenset() if capture else priced.graph.pinned


def _candidate(priced: Priced, assignment: Assignment, capture: bool) -> Candidate:
    schedule = synchronize(priced.graph, assignment)
    return Candidate(schedule, capture, run_us(schedule, priced.costs, priced.profile, captured=capture))


def _complete(priced: Priced, assignment: Assignment, capture: bool) -> Candidate:
    return _with_memory(priced.graph, _candidate(priced, assignment, capture))


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


def _within(priced: Priced, candidate: Candidate, sequential: Candidate, options: Options) -> Candidate:
    """The candidate with memory, and with waits that save some if it exceeds the budget; refused if it does even so."""
    graph, budget = priced.graph, options.memory_budget

    def judged(candidate: Candidate) -> Candidate:
        complete = _with_memory(graph, candidate)
        return replace(complete, refusal=excess(complete, sequential, budget, given_bytes(graph)))

    plain = judged(candidate)
    if not plain.refusal:
        return plain
    timeline = simulate(candidate.schedule, priced.costs, priced.profile, captured=candidate.captured)
    edge_us = priced.profile.over(candidate.schedule.streams).cross_stream_edge_us
    for share in WORTH_A_WAIT:
        least_bytes = max(1, round(share * sequential.memory_bytes))
        schedule = wait_for_memory(graph, candidate.schedule, timeline, edge_us, least_bytes)
        predicted_us = run_us(schedule, priced.costs, priced.profile, captured=candidate.captured)
        thrifty = judged(replace(candidate, schedule=schedule, predicted_us=predicted_us))
        if not thrifty.refusal:
            return thrifty
    return plain


def _measures(options: Options, graph: OpGraph) -> bool:
    return options.costs == "measured" or (options.costs == "auto" and graph.device != "cpu")


def _assigned(priced: Priced, options: Options, pinned: frozenset[str]) -> Iterator[Assignment]:
    """What each policy but the search makes of each number of streams."""
    for policy in POLICIES if options.policy == "auto" else (options.policy,):
        if policy == "search":
            continue
        for streams in _stream_counts(priced, options):
            assignment = POLICIES[policy](priced.graph, priced.costs, priced.profile, streams, pinned)
            yield assignment
            if assignment.streams < streams:
                break  # with more streams, the policy would leave more of them unused


def _searches(priced: Priced, options: Options) -> bool:
    """Whether to search: where that is asked for, or pays. Waking threads of a CPU costs more than it gains."""
    pays = priced.graph.device != "cpu" and len(priced.graph.ops) <= _LARGE
    return options.policy == "search" or (options.policy == "auto" and pays)


def _searched(priced: Priced, options: Options, pinned: frozenset[str], capture: bool) -> tuple[Assignment, ...]:
    """What the search finds for each number of streams, up to the largest that is allowed."""
    most = max(_stream_counts(priced, options), default=1)
    seconds = SEARCH_SHARE * options.tuning_seconds
    graph, costs, profile = priced.graph, priced.costs, priced.profile
    return search_by_streams(graph, costs, profile, most, pinned, seconds, options.seed, capture)


def _distinct(assignments: Iterable[Assignment]) -> Iterator[Assignment]:
    """Those that use side streams, each once."""
    seen = set()
    for assignment in assignments:
        plan = tuple((op, assignment.stream[op]) for op in assignment.order)
        if assignment.streams > 1 and plan not in seen:
            yield assignment
        seen.add(plan)


def _shortlist(rivals: Iterable[Candidate], complete: Callable[[Candidate], Candidate]) -> list[Candidate]:
    """The best of each policy and the best of all others, and whatever is better but refused; best prediction first.

    Args:
        rivals: candidates.
        complete: finds out what one comes to, and whether it is refused; not asked more often than needed.
    """
    waiting, completed, policies = sorted(rivals, key=_promise), list[Candidate](), set[str]()
    while waiting and len(_allowed(completed)) < SHORTLIST:
        first = next((at for at, rival in enumerate(waiting) if rival.schedule.policy not in policies), 0)
        completed.append(complete(waiting.pop(first)))
        policies = {candidate.schedule.policy for candidate in _allowed(completed)}
    return sorted(completed, key=_promise)


def _allowed(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Those that may run."""
    return [candidate for candidate in candidates if not candidate.refusal]


def _promise(candidate: Candidate) -> tuple[float, int]:
    return candidate.predicted_us, candidate.schedule.streams


def _stream_counts(priced: Priced, options: Options) -> Sequence[int]:
    if options.streams != "auto":
        return (options.streams,)
    if priced.graph.device == "cpu":
        return [count for count in _CPU_STREAMS if count <= priced.profile.multiprocessors]
    return _GPU_STREAMS if len(priced.graph.ops) <= _LARGE else _GPU_STREAMS[::2]


def _capture_refusals(graph: OpGraph) -> tuple[Decision, ...]:
    """Why a CUDA graph cannot hold these ops."""
    if graph.device == "cpu":
        return ()
    return tuple(
        Decision(op.name, "not captured", f"{op.target}: {op.uncapturable}" + (f" ({op.source})" if op.source else ""))
        for op in graph.ops.values()
        if op.uncapturable
    )


def plan(
    model: nn.Module,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    options: Options,
    profile: DeviceProfile | None = None,
) -> Report:
    """A dry run: what autostream would consider for this model, without running it.

    Args:
        model: the module.
        args: positional example inputs.
        kwargs: keyword example inputs.
        options: as for :func:`autostream.optimize`; costs are estimated unless ``costs="measured"``.
        profile: a device to plan for, which need not be there: what runs on the CPU is planned as if it ran on that.

    Raises:
        OptionError: costs are to be measured, or kernels to be fused, for a profile, that is, for a device which need
            not be there; or fused kernels cannot be had here.
        TraceError: the model cannot be traced.
    """
    if options.costs == "measured" and profile is not None:
        raise OptionError('costs="measured" needs the device itself: leave out the profile, or use costs="roofline"')
    if options.kernels == "inductor" and profile is not None:
        raise OptionError('kernels="inductor" needs the device itself: leave out the profile, or use kernels="eager"')
    device = None if profile is None else _device_of(profile)
    stopwatch = Stopwatch()
    tensors, structure = flatten((tuple(args), dict(kwargs)))
    with torch.no_grad(), stopwatch("trace"):  # calls without gradients are planned for
        signature = signature_of(structure, tensors, ModelWatch(model).training(), records_gradients=False)
        traced = trace(model, tensors, structure, device=device)
    arguments = arguments_of(traced, model, tensors)
    program, unfused = _fused(traced.program, options, arguments, stopwatch)
    priced = price_program(program, options, stopwatch, profile, arguments if options.costs == "measured" else None)
    capture = options.cuda_graph is not False and priced.graph.device != "cpu" and not priced.refusals
    candidates = candidates_for(priced, options, capture, stopwatch)
    exempted = exemption(candidates[0], options.memory_budget, given_bytes(priced.graph))
    best = min(_allowed(candidates), key=_promise)
    return Report(
        model=name_of(model),
        signature=str(signature.on(device)),
        mode="dry run",
        level=program.level,
        profile=priced.profile,
        graph=priced.graph,
        costs=priced.costs,
        chosen=best,
        timeline=simulate(best.schedule, priced.costs, priced.profile, captured=best.captured),
        candidates=candidates,
        refusals=(*unfused, *priced.refusals, *priced.remarks, *exempted),
        seconds=dict(stopwatch.seconds),
        versions=versions(),
    )


def _fused(
    program: Program, options: Options, arguments: Sequence[Tensor], stopwatch: Stopwatch
) -> tuple[Program, tuple[Decision, ...]]:
    """The program in the kernels that are asked for, without running them, and why it is not in fused ones."""
    if options.kernels == "eager" or (options.kernels == "auto" and program.device == "cpu"):
        return program, ()
    if options.kernels == "auto":
        reason = 'a dry run plans ATen ops; where the GPU is, kernels="inductor" plans fused ones'
        return program, (Decision("", "not fused", reason),)
    if reason := obstacle(program.device):
        raise OptionError(f'kernels="inductor" is not to be had: {reason}')
    try:
        with stopwatch("fuse"):
            return fuse(program, options.inductor_options, arguments), ()
    except FusionError as error:
        return program, (Decision("", "not fused", str(error)),)


def _device_of(profile: DeviceProfile) -> str:
    """What to call a device that need not be there."""
    return "cpu" if profile == profile_of("cpu") else "cuda:0"


def arguments_of(traced: Traced, model: nn.Module, tensors: Sequence[Tensor]) -> list[Tensor]:
    """What a traced program takes now: the model's state, then these inputs."""
    state = LiveState(model, traced.program.placeholders, traced.constants).tensors()
    return [*(tensor for tensor in state if tensor is not None), *tensors]


def versions() -> dict[str, str]:
    """What a result depends on besides the code."""
    return {
        "autostream": VERSION,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda or "none",
    }
