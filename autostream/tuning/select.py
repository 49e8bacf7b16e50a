"""Measure candidates and select the fastest.

Predicted times are not exact, so candidates are measured: each against the best so far, in interleaved rounds, so that
changes of clock rates and temperature affect both. The sequential schedule comes first, and is only replaced by a
schedule that was measured faster. Ties go to fewer streams, then to less memory. At last, variants of the best one are
measured against it: schedules with equal predictions differ by a few percent on the device.

What communicates is measured by all of its processes together, as often and in the same order: each time counts as the
longest of theirs.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from statistics import median

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from autostream.analysis.effects import only_checks
from autostream.analysis.values import storages_in, value_of
from autostream.errors import CaptureError, first_line
from autostream.ir import Candidate, Limit, OpGraph, Program, Role
from autostream.runtime.cuda_graph import CapturedGraph, FlatFunction
from autostream.runtime.lower import lower
from autostream.runtime.restore import Restore
from autostream.runtime.runs import uncaptured, uncast
from autostream.tuning.agreement import ALONE, Peers, naming_who_has_ended

MARGIN = 0.01
"""Times that differ by at most this share are a tie, since measurements are not exact, and streams and memory cost."""

_ROUNDS = 9
_ROUND_US = {"cpu": 10_000.0, "cuda": 2000.0}
"""µs of a round. A CPU has other work to do: short rounds would measure that."""
_MAX_RUNS = 50
_MAX_COMPARISON_S = 1.0
_HOPELESS = 1.15
_SLOWER = 1.0

VARIANTS = 24
"""How many variants of the best one are measured. In a random search around GoogLeNet's schedule on an H200, the 14th
was 1.8 % faster, the 260th 2.5 %, and the 1,579th 4 %."""

_GAIN = 0.005
"""The share by which a variant must be faster: more than the error of a measurement."""

Execution = FlatFunction | CapturedGraph
Variants = Callable[[Candidate], Iterator[Candidate]]
"""Yields verified schedules that are similar to a candidate."""


@dataclass(frozen=True)
class Selection:
    """The fastest candidate.

    Attributes:
        execution: runs it: takes the program's flat tensors and returns its outputs.
        chosen: the candidate.
        candidates: all candidates, with their measured times; of variants, only those that were the best for a time.
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
    peers: Peers = ALONE,
) -> Selection:
    """Build the candidates one by one, measure each against the best so far, and keep the faster.

    Then variants of the best one are measured, unless it is the sequential one. At most two candidates are alive at a
    time, so that selecting takes no more memory than two of them.

    Args:
        program: the traced model.
        graph: its ops.
        candidates: the sequential one first, then by predicted time. They are verified, except refused ones, which are
            not built.
        tensors: the program's arguments; runs mutate them.
        bound: which of the arguments a captured graph may read in place.
        restore: restores mutated arguments before each run.
        seconds: candidates that are not measured so long after the sequential one was built are refused, of several
            processes by the first one's clock. That one is always measured, and so is the next one that may run, which
            is predicted to be the fastest: else slow captures would leave one stream.
        variants: yields variants of a candidate.
        peers: the processes that measure the same candidates together. What one of them cannot build, none uses.

    Raises:
        CaptureError: the first candidate cannot be captured, so none can.
        GroupError: a process is gone.
    """

    def make(candidate: Candidate) -> Execution:
        what = f"the schedule {candidate.schedule.policy!r} of {candidate.schedule.streams} streams"
        return peers.together(
            what, lambda: build(program, graph, candidate, tensors, bound, restore), failing=CaptureError
        )

    def timer(execution: Execution) -> Callable[[], float]:
        return _timer(execution, tensors, program.device, restore, peers)

    def late() -> bool:  # the others have less time left, as they have waited for the first while it timed ops
        over: bool = peers.first("the time left for tuning", lambda: time.perf_counter() > end, bool)
        return over

    contest = _Contest(make, timer, list(candidates), make(candidates[0]), peers)
    end = time.perf_counter() + seconds
    allowed = [place for place in range(1, len(candidates)) if not candidates[place].refusal]
    for place in allowed:
        if place != allowed[0] and late():
            contest.refuse(place, _NO_TIME_LEFT, Limit.TIME)
        else:
            contest.measure(place)
    near = variants(contest.considered[contest.best])
    for _ in range(VARIANTS if contest.best else 0):
        variant = None if late() else next(near, None)
        if variant is None:
            break
        if contest.try_variant(variant):
            near = variants(variant)
    contest.finish()
    return Selection(contest.execution, contest.considered[contest.best], tuple(contest.considered))


@dataclass(slots=True)
class _Contest:
    """Measures candidates against the best one so far.

    Attributes:
        make: builds a candidate.
        timer: returns a function that measures the time of a run, µs.
        considered: the candidates, with their measured times.
        execution: of the best one.
        peers: the processes that measure together.
        best: its index.
        behind: its time as a ratio to the fastest time so far, so that ties do not add up.
    """

    make: Callable[[Candidate], Execution]
    timer: Callable[[Execution], Callable[[], float]]
    considered: list[Candidate]
    execution: Execution
    peers: Peers
    best: int = 0
    behind: float = 1.0

    def __post_init__(self) -> None:
        self._measured(0, self._interleaved([self.execution])[0])

    def refuse(self, place: int, reason: str, limit: Limit | None) -> None:
        """Record why a candidate is not selected."""
        self.considered[place] = replace(self.considered[place], refusal=reason, limit=limit)

    def measure(self, place: int) -> None:
        """Measure a candidate against the best one; it wins if it is faster, or as fast and cheaper."""
        candidate, best = self.considered[place], self.considered[self.best]
        try:
            execution, times = self._compared(candidate)
        except (CaptureError, torch.OutOfMemoryError) as error:
            no_room = any(isinstance(cause, torch.OutOfMemoryError) for cause in (error, error.__cause__))
            self.refuse(place, first_line(error), Limit.DEVICE if no_room else None)
            return
        self._rescale(times[0])
        self._measured(place, times[1])
        ratio = times[1] / times[0]
        cheaper = _price(candidate) < _price(best)
        if ratio < 1 - MARGIN or (cheaper and self.behind * ratio <= 1 + MARGIN):
            self.best, self.execution, self.behind = place, execution, max(1.0, self.behind * ratio)

    def try_variant(self, variant: Candidate) -> bool:
        """Measure a variant against the best one; it becomes a candidate only if it is faster."""
        try:
            execution, times = self._compared(variant, _SLOWER)
        except (CaptureError, torch.OutOfMemoryError):
            return False  # the next one may fit
        ratio = times[1] / times[0]
        if ratio >= 1 - _GAIN:
            return False
        self._rescale(times[0])
        self.best, self.execution, self.behind = len(self.considered), execution, max(1.0, self.behind * ratio)
        self.considered.append(replace(variant, measured_us=times[1]))
        return True

    def finish(self) -> None:
        """Measure the best one against the sequential one directly: so far it may have been measured against others."""
        if not self.best:
            return
        try:
            sequential = self.make(self.considered[0])
            times = self._interleaved([sequential, self.execution])
        except (CaptureError, torch.OutOfMemoryError):
            return  # keep the earlier measurements
        self._rescale(times[1])
        self._measured(0, times[0])
        if times[1] >= times[0] * (1 - MARGIN):
            self.best, self.execution = 0, sequential

    def _compared(self, candidate: Candidate, hopeless: float = _HOPELESS) -> tuple[Execution, list[float]]:
        """The candidate's execution, and the times of the best one and of it in interleaved rounds, µs."""
        execution = self.make(candidate)
        return execution, self._interleaved([self.execution, execution], hopeless)

    def _interleaved(self, executions: Sequence[Execution], hopeless: float = _HOPELESS) -> list[float]:
        return interleaved([*map(self.timer, executions)], hopeless, self.peers)

    def _rescale(self, best_us: float) -> None:
        """Scale earlier times to the clock rate at which the best one takes ``best_us``."""
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
    """Lower a candidate to a function, and capture it if ``candidate.captured``.

    Args:
        program: the traced model.
        graph: its ops.
        candidate: a verified schedule of these ops.
        tensors: the program's arguments.
        bound: which of them a captured graph may read in place.
        restore: restores mutated arguments after the warm-up of a capture.

    Raises:
        CaptureError: the capture failed.
    """
    run = uncaptured(lower(program, graph, candidate.schedule), program.device, candidate.schedule.streams)
    if program.level == "inductor":
        run = uncast(run)
    if graph.collectives:
        run = naming_who_has_ended(run, graph.process_groups)
    if not candidate.captured:
        return run
    random = any(op.orders for op in graph.ops.values())  # ops with unknown effects may be random too
    device, writes = torch.device(program.device), written(program, graph)
    return CapturedGraph(run, tensors, bound, writes, device, random=random, restore=restore)


def written(program: Program, graph: OpGraph) -> tuple[bool, ...]:
    """Which placeholders a program writes."""
    storages = {storage for op in graph.ops.values() for storage in op.writes}
    return tuple(placeholder.storage in storages for placeholder in program.placeholders)


def repeatable(program: Program, graph: OpGraph) -> bool:
    """Whether an additional run of a program has no visible side effects."""
    checks = {node.name for node in program.module.graph.nodes if only_checks(node)}
    return not any(written(program, graph)) and not any(
        op.orders for name, op in graph.ops.items() if name not in checks
    )


def may_fail(program: Program) -> bool:
    """Whether the device may fail in a run that reads replaced weights: an index may be out of their bounds, or a check
    may not hold.

    An op that takes integers may use them as indices, unless it computes element by element, converts or views them.
    Integers of parameters and buffers do not count.

    Args:
        program: of ATen ops.
    """
    state = {p.name for p in program.placeholders if p.role is not Role.INPUT}

    def may_index(node: fx.Node) -> bool:
        computed = (argument for argument in node.all_input_nodes if argument.name not in state)
        return not _is_elementwise(node) and any(map(_has_integers, computed))

    nodes = program.module.graph.nodes
    return any(only_checks(node) or may_index(node) for node in nodes if node.op == "call_function")


def _has_integers(node: fx.Node) -> bool:
    dtypes = {value.dtype for value in tree_leaves(node.meta.get("val")) if isinstance(value, Tensor)}
    return any(not dtype.is_floating_point and not dtype.is_complex and dtype != torch.bool for dtype in dtypes)


def _is_elementwise(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, OpOverload):
        return target is operator.getitem
    return torch.Tag.pointwise in target.tags or target.is_view or target is torch.ops.aten._to_copy.default


def detached(program: Program) -> tuple[int, ...]:
    """Positions of the inputs of which an output may be a detached view."""
    graph = program.module.graph
    views = graph.find_nodes(op="call_function", target=torch.ops.aten.detach.default)
    returned = [node for node in graph.output_node().all_input_nodes if node.op != "placeholder"]
    storages = _storages(views) & _storages(returned)
    arguments = zip(program.placeholders, graph.find_nodes(op="placeholder"), strict=True)
    return tuple(
        at
        for at, (item, node) in enumerate(arguments)
        if item.role is Role.INPUT and not storages.isdisjoint(_storages([node]))
    )


def _storages(nodes: Iterable[fx.Node]) -> set[int]:
    """The storages of the values of nodes; sparse tensors have none."""
    return {storage for node in nodes for storage in storages_in(value_of(node))}


def interleaved(
    timers: Sequence[Callable[[], float]], hopeless: float = _HOPELESS, peers: Peers = ALONE
) -> list[float]:
    """Call timers in turn for some rounds, and return the median of each.

    Stops early when the time is up, or when the last timer was slower than the first by a factor of ``hopeless`` in
    each of three rounds.

    Example:
        >>> interleaved([lambda: 2.0, lambda: 5.0])
        [2.0, 5.0]
    """
    rounds: list[list[float]] = []
    start, spent_s = time.perf_counter(), 0.0

    def timed() -> list[float]:
        return [*(timer() for timer in timers), time.perf_counter() - start]

    while len(rounds) < _ROUNDS and (len(rounds) < 3 or spent_s < _MAX_COMPARISON_S):
        *times, spent_s = peers.slowest("the times of a round", timed)
        rounds.append(times)
        if len(rounds) == 3 and min(r[-1] for r in rounds) > hopeless * max(r[0] for r in rounds):
            break
    return [median(times) for times in zip(*rounds, strict=True)]


def call_timer(call: Callable[[], object], restore: Restore) -> Callable[[], float]:
    """A function that makes a call on the CPU several times, and returns the µs of one.

    Args:
        call: the call.
        restore: restores what it writes.
    """
    return _timer(call, (), "cpu", restore)


def _timer(
    execution: Execution | Callable[[], object],
    tensors: Sequence[Tensor],
    device: str,
    restore: Restore,
    peers: Peers = ALONE,
) -> Callable[[], float]:
    """A function that runs an execution several times, as often as the peers do, and returns the µs of one run.

    Mutated arguments are restored before each run, outside of the measured time.
    """
    run = execution.replay if isinstance(execution, CapturedGraph) else partial(execution, *tensors)
    clock = _host_us if device == "cpu" else partial(_device_us, device)

    def restored() -> None:
        restore()
        run()

    def once() -> list[float]:
        clock(restored, 1)
        return [max(clock(restored, 1), 1.0)]

    (once_us,) = peers.slowest("the time of a run", once)
    runs = max(1, min(_MAX_RUNS, round(_ROUND_US[torch.device(device).type] / once_us)))
    timed = partial(clock, run, runs)
    if restore.spans:
        timed = partial(_host_us_alone if device == "cpu" else partial(_device_us_alone, device), run, runs, restore)
    if not peers.group:
        return timed

    def in_step() -> float:
        restored()  # its collectives wait for the process that comes last
        return timed()

    return in_step


def _host_us(run: Callable[[], object], runs: int) -> float:
    start = time.perf_counter()
    for _ in range(runs):
        run()
    return (time.perf_counter() - start) / runs * 1e6


def _host_us_alone(run: Callable[[], object], runs: int, restore: Restore) -> float:
    """The µs of one run, without restoring."""
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
    """The µs of one run, without restoring; the host synchronizes after the last run only."""
    events = []
    for _ in range(runs):
        restore()
        events.append(_between_events(device, run))
    return _elapsed_us(events) / runs


Events = tuple[torch.cuda.Event, torch.cuda.Event]
"""Start and end."""


def _between_events(device: str, run: Callable[[], object]) -> Events:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    stream = torch.cuda.current_stream(device)
    start.record(stream)
    run()
    end.record(stream)
    return start, end


def _elapsed_us(events: Sequence[Events]) -> float:
    """The sum of the times between starts and ends, once the last one is reached."""
    events[-1][1].synchronize()
    return sum(float(start.elapsed_time(end)) for start, end in events) * 1e3
