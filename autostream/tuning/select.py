"""Measure the candidates, keep the fastest.

The simulator is only a model, so the device decides what runs: each candidate meets the best one so far in interleaved
rounds, where drift of clocks and temperature hits both alike. The sequential schedule is the first best; nothing
replaces it that was not measured faster. Ties go to fewer streams, then to less memory. The winner then meets variants
of itself: schedules between which the simulator cannot decide differ by some percent on the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from statistics import median

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from autostream.analysis.effects import only_checks
from autostream.analysis.values import storages_in, value_of
from autostream.errors import CaptureError, first_line
from autostream.ir import Candidate, Limit, OpGraph, Program, Role
from autostream.runtime.cuda_graph import CapturedGraph, FlatFunction
from autostream.runtime.lower import lower
from autostream.runtime.restore import Restore
from autostream.runtime.runs import UncastRun, uncaptured

MARGIN = 0.01
"""Times that differ by no more than this share are a tie: clocks are not exact, and streams and memory have a price."""

_ROUNDS = 9
_ROUND_US = {"cpu": 10_000.0, "cuda": 2000.0}
"""A CPU has other work to do as well: short rounds would measure that."""
_MAX_RUNS = 50
_DUEL_S = 1.0
_HOPELESS = 1.15
_SLOWER = 1.0

VARIANTS = 24
"""How many variants of the best one are measured. Of a random search around GoogLeNet's schedule on an H200, the 14th
was 1.8 % faster, the 260th 2.5 %, and the 1,579th 4 %."""

_GAIN = 0.005
"""What a variant must be faster by: more than the error of such a measurement."""

Execution = FlatFunction | CapturedGraph
Variants = Callable[[Candidate], Iterator[Candidate]]
"""Verified schedules much like one that was measured, made as they are asked for."""


@dataclass(frozen=True)
class Selection:
    """What was chosen.

    Attributes:
        execution: takes the program's flat tensors and returns its outputs.
        chosen: the candidate that it runs.
        candidates: all of them, with what was measured; variants only where they were the best for a time.
    """

    execution: Execution
    chosen: Candidate
    candidates: tuple[Candidate, ...]


def select(
    program: Program,
    graph: OpGraph,
    candidates: Sequence[Candidate],
    tensors: Sequence[Tensor],
    bound: Sequence[bool],
    restore: Restore,
    seconds: float = inf,
    variants: Variants = lambda candidate: iter(()),
) -> Selection:
    """Build the candidates one by one, measure each against the best so far, and keep the best.

    They meet in the order given; then the best one meets variants of itself, unless it is the sequential one. At most
    two are alive at a time, so that choosing takes no more memory than two of them.

    Args:
        program: the traced model.
        graph: its ops.
        candidates: the sequential one first, then the most promising ones first; all verified, but for those that are
            refused already and so not built.
        tensors: the program's arguments; those that it writes are written.
        bound: which of the arguments a captured graph may use where they are.
        restore: puts back what the program writes; done before each run.
        seconds: once these are over, what has not been measured is refused. The sequential one is measured in any case.
        variants: of a candidate.

    Raises:
        CaptureError: the first candidate cannot be captured, so none can.
    """
    end = time.perf_counter() + seconds

    def make(candidate: Candidate) -> Execution:
        return build(program, graph, candidate, tensors, bound, restore)

    def timer(execution: Execution) -> Callable[[], float]:
        return _timer(execution, tensors, program.device, restore)

    contest = _Contest(make, timer, list(candidates), make(candidates[0]))
    for place in range(1, len(candidates)):
        if candidates[place].refusal:
            continue
        if time.perf_counter() > end:
            contest.refuse(place, _NO_TIME_LEFT, Limit.TIME)
        else:
            contest.meet(place)
    near = variants(contest.considered[contest.best])
    for _ in range(VARIANTS if contest.best else 0):
        variant = next(near, None) if time.perf_counter() <= end else None
        if variant is None:
            break
        if contest.try_variant(variant):
            near = variants(variant)
    contest.finish()
    return Selection(contest.execution, contest.considered[contest.best], tuple(contest.considered))


@dataclass(slots=True)
class _Contest:
    """Candidates that meet the best one so far, one after the other.

    Attributes:
        make: builds one.
        timer: a function that says what a run of it takes now, µs.
        considered: the candidates, with what is known of them.
        execution: the best one.
        best: its place.
        behind: how many times longer it takes than the fastest: ties must not add up.
    """

    make: Callable[[Candidate], Execution]
    timer: Callable[[Execution], Callable[[], float]]
    considered: list[Candidate]
    execution: Execution
    best: int = 0
    behind: float = 1.0

    def __post_init__(self) -> None:
        self._measured(0, interleaved([self.timer(self.execution)])[0])

    def refuse(self, place: int, reason: str, limit: Limit | None) -> None:
        """Say why a candidate is out."""
        self.considered[place] = replace(self.considered[place], refusal=reason, limit=limit)

    def meet(self, place: int) -> None:
        """Measure a candidate beside the best one; it wins if it is faster, or as fast and cheaper."""
        candidate, best = self.considered[place], self.considered[self.best]
        try:
            rival, times = self._met(candidate)
        except (CaptureError, torch.OutOfMemoryError) as error:
            no_room = any(isinstance(cause, torch.OutOfMemoryError) for cause in (error, error.__cause__))
            self.refuse(place, first_line(error), Limit.DEVICE if no_room else None)
            return
        self._set_pace(times[0])
        self._measured(place, times[1])
        ratio = times[1] / times[0]
        cheaper = _price(candidate) < _price(best)
        if ratio < 1 - MARGIN or (cheaper and self.behind * ratio <= 1 + MARGIN):
            self.best, self.execution, self.behind = place, rival, max(1.0, self.behind * ratio)

    def try_variant(self, variant: Candidate) -> bool:
        """Measure a variant of the best one beside it; it takes part only if it is faster."""
        try:
            rival, times = self._met(variant, _SLOWER)
        except (CaptureError, torch.OutOfMemoryError):
            return False  # the next one may fit
        ratio = times[1] / times[0]
        if ratio >= 1 - _GAIN:
            return False
        self._set_pace(times[0])
        self.best, self.execution, self.behind = len(self.considered), rival, max(1.0, self.behind * ratio)
        self.considered.append(replace(variant, measured_us=times[1]))
        return True

    def finish(self) -> None:
        """Let the winner meet the sequential one once more: it has only by way of others, at other times."""
        if not self.best:
            return
        try:
            sequential = self.make(self.considered[0])
            times = interleaved([self.timer(sequential), self.timer(self.execution)])
        except (CaptureError, torch.OutOfMemoryError):
            return  # what was measured so far has to do
        self._set_pace(times[1])
        self._measured(0, times[0])
        if times[1] >= times[0] * (1 - MARGIN):
            self.best, self.execution = 0, sequential

    def _met(self, candidate: Candidate, hopeless: float = _HOPELESS) -> tuple[Execution, list[float]]:
        """A new execution, and what the best one and it took side by side, µs."""
        rival = self.make(candidate)
        return rival, interleaved([self.timer(self.execution), self.timer(rival)], hopeless)

    def _set_pace(self, best_us: float) -> None:
        """The best one takes so long now: what met it before, at another pace of the device, is told at this one."""
        before = self.considered[self.best].measured_us
        for place, candidate in enumerate(self.considered):
            if before and candidate.measured_us is not None:
                self._measured(place, candidate.measured_us / before * best_us)
        self._measured(self.best, best_us)

    def _measured(self, place: int, time_us: float) -> None:
        self.considered[place] = replace(self.considered[place], measured_us=time_us)


_NO_TIME_LEFT = "not measured: the time for tuning was over (tuning_seconds)"


def _price(candidate: Candidate) -> tuple[int, int]:
    return candidate.schedule.streams, candidate.memory_bytes


def build(
    program: Program,
    graph: OpGraph,
    candidate: Candidate,
    tensors: Sequence[Tensor],
    bound: Sequence[bool],
    restore: Restore,
) -> Execution:
    """Lower a candidate to something that runs, and capture it if it is to be captured.

    Args:
        program: the traced model.
        graph: its ops.
        candidate: a verified schedule of these.
        tensors: the program's arguments.
        bound: which of them a captured graph may use where they are.
        restore: puts back those that it writes: a capture is warmed up.

    Raises:
        CaptureError: the capture failed.
    """
    run = uncaptured(lower(program, graph, candidate.schedule), program.device, candidate.schedule.streams)
    if program.level == "inductor":
        run = UncastRun(run)
    if not candidate.captured:
        return run
    draws = any(op.orders for op in graph.ops.values())  # what has unknown effects may draw as well
    device, writes = torch.device(program.device), written(program, graph)
    return CapturedGraph(run, tensors, bound, writes, device, draws=draws, restore=restore)


def written(program: Program, graph: OpGraph) -> tuple[bool, ...]:
    """Which placeholders a program writes."""
    storages = {storage for op in graph.ops.values() for storage in op.writes}
    return tuple(placeholder.storage in storages for placeholder in program.placeholders)


def repeatable(program: Program, graph: OpGraph) -> bool:
    """Whether running a program once more than asked changes nothing that anybody can see."""
    checks = {node.name for node in program.module.graph.nodes if only_checks(node)}
    return not any(written(program, graph)) and not any(
        op.orders for name, op in graph.ops.items() if name not in checks
    )


def has_integers(program: Program) -> bool:
    """Whether a program is given integers, or makes some: they may be indices. Its own state does not count."""
    state = {p.name for p in program.placeholders if p.role is not Role.INPUT}
    values = (node.meta.get("val") for node in program.module.graph.nodes if node.name not in state)
    dtypes = {value.dtype for each in values for value in tree_leaves(each) if isinstance(value, Tensor)}
    return any(not dtype.is_floating_point and not dtype.is_complex and dtype != torch.bool for dtype in dtypes)


def detached(program: Program) -> tuple[int, ...]:
    """Positions of the inputs that an output may be a detached view of."""
    graph = program.module.graph
    looks = graph.find_nodes(op="call_function", target=torch.ops.aten.detach.default)
    returned = [node for node in graph.output_node().all_input_nodes if node.op != "placeholder"]
    places = _storages(looks) & _storages(returned)
    arguments = zip(program.placeholders, graph.find_nodes(op="placeholder"), strict=True)
    found = (item.role is Role.INPUT and not places.isdisjoint(_storages([node])) for item, node in arguments)
    return tuple(at for at, is_found in enumerate(found) if is_found)


def _storages(nodes: Iterable[fx.Node]) -> set[int]:
    """Those that the values of nodes are in; sparse tensors are in none."""
    return {storage for node in nodes for storage in storages_in(value_of(node))}


def interleaved(timers: Sequence[Callable[[], float]], hopeless: float = _HOPELESS) -> list[float]:
    """Call timers in turn for some rounds, and return the median of each.

    Stops early when the time is up, or when the last one is far behind the first: in each of three rounds, by a factor
    of ``hopeless``.

    Example:
        >>> interleaved([lambda: 2.0, lambda: 5.0])
        [2.0, 5.0]
    """
    rounds: list[list[float]] = []
    end = time.perf_counter() + _DUEL_S
    while len(rounds) < _ROUNDS and (len(rounds) < 3 or time.perf_counter() < end):
        rounds.append([timer() for timer in timers])
        if len(rounds) == 3 and min(r[-1] for r in rounds) > hopeless * max(r[0] for r in rounds):
            break
    return [median(times) for times in zip(*rounds, strict=True)]


def _timer(execution: Execution, tensors: Sequence[Tensor], device: str, restore: Restore) -> Callable[[], float]:
    """A function that runs something a few times and returns the µs of one run.

    What it writes is put back before each run, by no part of its time. A round takes no longer for that: there are
    fewer runs.
    """
    run = execution.replay if isinstance(execution, CapturedGraph) else partial(execution, *tensors)
    clock = _host_us if device == "cpu" else partial(_device_us, device)

    def restored() -> None:
        restore()
        run()

    clock(restored, 1)
    runs = max(1, min(_MAX_RUNS, round(_ROUND_US[torch.device(device).type] / max(clock(restored, 1), 1.0))))
    if not restore.spans:
        return lambda: clock(run, runs)
    alone = _host_us_alone if device == "cpu" else partial(_device_us_alone, device)
    return lambda: alone(run, runs, restore)


def _host_us(run: Callable[[], object], runs: int) -> float:
    start = time.perf_counter()
    for _ in range(runs):
        run()
    return (time.perf_counter() - start) / runs * 1e6


def _host_us_alone(run: Callable[[], object], runs: int, restore: Restore) -> float:
    """What a run takes, µs, without what comes before each."""
    times_us = []
    for _ in range(runs):
        restore()
        times_us.append(_host_us(run, 1))
    return sum(times_us) / runs


def _device_us(device: str, run: Callable[[], object], runs: int) -> float:
    def several() -> None:
        for _ in range(runs):
            run()

    return _elapsed_us([_between_events(device, several)]) / runs


def _device_us_alone(device: str, run: Callable[[], object], runs: int, restore: Restore) -> float:
    """What a run takes, µs, without what comes before each; the host waits after the last only."""
    events = []
    for _ in range(runs):
        restore()
        events.append(_between_events(device, run))
    return _elapsed_us(events) / runs


Events = tuple[torch.cuda.Event, torch.cuda.Event]
"""Of a start and an end."""


def _between_events(device: str, run: Callable[[], object]) -> Events:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    stream = torch.cuda.current_stream(device)
    start.record(stream)
    run()
    end.record(stream)
    return start, end


def _elapsed_us(events: Sequence[Events]) -> float:
    """The sum of what lies between them, once the last one has come."""
    events[-1][1].synchronize()
    return sum(float(start.elapsed_time(end)) for start, end in events) * 1e3
