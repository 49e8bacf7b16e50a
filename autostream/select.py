"""Measure the candidates, keep the fastest.

The simulator is only a model, so the device decides what runs: each candidate meets the best one so far in interleaved
rounds, where drift of clocks and temperature hits both alike. The sequential schedule is the first best; nothing
replaces it that was not measured faster. Ties go to fewer streams, then to less memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from statistics import median

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from autostream.errors import CaptureError, first_line
from autostream.execution.cuda_graph import CapturedGraph, FlatFunction
from autostream.execution.lower import lower
from autostream.execution.runs import UncastRun, uncaptured
from autostream.ir import Candidate, OpGraph, Program, Role

MARGIN = 0.01
"""Times that differ by no more than this share are a tie: clocks are not exact, and streams and memory have a price."""

_ROUNDS = 9
_ROUND_US = {"cpu": 10_000.0, "cuda": 2000.0}
"""A CPU has other work to do as well: short rounds would measure that."""
_MAX_RUNS = 50
_DUEL_S = 1.0
_HOPELESS = 1.15

Execution = FlatFunction | CapturedGraph


@dataclass(frozen=True)
class Selection:
    """What was chosen.

    Attributes:
        execution: takes the program's flat tensors and returns its outputs.
        chosen: the candidate that it runs.
        candidates: all of them, with what was measured.
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
    seconds: float = inf,
) -> Selection:
    """Build the candidates one by one, measure each against the best so far, and keep the best.

    They meet in the order given. At most two are alive at a time, so that choosing takes no more memory than two of
    them.

    Args:
        program: the traced model.
        graph: its ops.
        candidates: verified schedules, the sequential one first, then the most promising ones first.
        tensors: the program's arguments; those that it writes are written.
        bound: which of the arguments a captured graph may use where they are.
        seconds: once these are over, what has not been measured is refused. The sequential one is measured in any case.

    Raises:
        CaptureError: the first candidate cannot be captured, so none can.
    """
    considered = list(candidates)
    end = time.perf_counter() + seconds

    def make(index: int) -> Execution:
        return build(program, graph, candidates[index], tensors, bound)

    def timer(execution: Execution) -> Callable[[], float]:
        return _timer(execution, tensors, program.device)

    best, execution = 0, make(0)
    considered[0] = replace(considered[0], measured_us=interleaved([timer(execution)])[0])
    behind = 1.0  # how many times longer the best one takes than the fastest: ties must not add up
    for index in range(1, len(candidates)):
        if time.perf_counter() > end:
            considered[index] = replace(considered[index], refusal=_NO_TIME_LEFT)
            continue
        try:
            rival, times = _met(execution, partial(make, index), timer)
        except (CaptureError, torch.OutOfMemoryError) as error:
            considered[index] = replace(considered[index], refusal=first_line(error))
            continue
        for place, time_us in zip((best, index), times, strict=True):
            considered[place] = replace(considered[place], measured_us=time_us)
        ratio = times[1] / times[0]
        cheaper = _price(candidates[index]) < _price(candidates[best])
        if ratio < 1 - MARGIN or (cheaper and behind * ratio <= 1 + MARGIN):
            best, execution, behind = index, rival, max(1.0, behind * ratio)
        del rival
    if best:
        # Once more, for the winner has met the sequential one only by way of others, at other times.
        sequential = make(0)
        times = interleaved([timer(sequential), timer(execution)])
        for place, time_us in zip((0, best), times, strict=True):
            considered[place] = replace(considered[place], measured_us=time_us)
        if times[1] >= times[0] * (1 - MARGIN):
            best, execution = 0, sequential
    return Selection(execution, considered[best], tuple(considered))


_NO_TIME_LEFT = "not measured: the time for tuning was over (tuning_seconds)"


def _price(candidate: Candidate) -> tuple[int, int]:
    return candidate.schedule.streams, candidate.memory_bytes


def _met(
    best: Execution, make: Callable[[], Execution], timer: Callable[[Execution], Callable[[], float]]
) -> tuple[Execution, list[float]]:
    """A new execution, and what the best one and it took side by side, µs."""
    rival = make()
    return rival, interleaved([timer(best), timer(rival)])


def build(
    program: Program, graph: OpGraph, candidate: Candidate, tensors: Sequence[Tensor], bound: Sequence[bool]
) -> Execution:
    """Lower a candidate to something that runs, and capture it if it is to be captured.

    Raises:
        CaptureError: the capture failed.
    """
    run = uncaptured(lower(program, graph, candidate.schedule), program.device, candidate.schedule.streams)
    if program.level == "inductor":
        run = UncastRun(run)
    if not candidate.captured:
        return run
    draws = any(op.orders for op in graph.ops.values())  # what has unknown effects may draw as well
    return CapturedGraph(run, tensors, bound, written(program, graph), torch.device(program.device), draws=draws)


def written(program: Program, graph: OpGraph) -> tuple[bool, ...]:
    """Which placeholders a program writes."""
    storages = {storage for op in graph.ops.values() for storage in op.writes}
    return tuple(placeholder.storage in storages for placeholder in program.placeholders)


def repeatable(program: Program, graph: OpGraph) -> bool:
    """Whether running a program once more than asked changes nothing that anybody can see."""
    return not any(written(program, graph)) and not any(op.orders for op in graph.ops.values())


def has_integers(program: Program) -> bool:
    """Whether a program is given integers, or makes some: they may be indices. Its own state does not count."""
    state = {p.name for p in program.placeholders if p.role is not Role.INPUT}
    values = (node.meta.get("val") for node in program.module.graph.nodes if node.name not in state)
    dtypes = {value.dtype for each in values for value in tree_leaves(each) if isinstance(value, Tensor)}
    return any(not dtype.is_floating_point and not dtype.is_complex and dtype != torch.bool for dtype in dtypes)


def interleaved(timers: Sequence[Callable[[], float]]) -> list[float]:
    """Call timers in turn for some rounds, and return the median of each.

    Stops early when the time is up, or when the last one is far behind the first.

    Example:
        >>> interleaved([lambda: 2.0, lambda: 5.0])
        [2.0, 5.0]
    """
    rounds: list[list[float]] = []
    end = time.perf_counter() + _DUEL_S
    while len(rounds) < _ROUNDS and (len(rounds) < 3 or time.perf_counter() < end):
        rounds.append([timer() for timer in timers])
        if len(rounds) == 3 and min(r[-1] for r in rounds) > _HOPELESS * max(r[0] for r in rounds):
            break
    return [median(times) for times in zip(*rounds, strict=True)]


def _timer(execution: Execution, tensors: Sequence[Tensor], device: str) -> Callable[[], float]:
    """A function that runs something a few times and returns the µs of one run."""
    run = execution.replay if isinstance(execution, CapturedGraph) else partial(execution, *tensors)
    clock = _host_us if device == "cpu" else partial(_device_us, device)
    clock(run, 1)
    runs = max(1, min(_MAX_RUNS, round(_ROUND_US[torch.device(device).type] / max(clock(run, 1), 1.0))))
    return lambda: clock(run, runs)


def _host_us(run: Callable[[], object], runs: int) -> float:
    start = time.perf_counter()
    for _ in range(runs):
        run()
    return (time.perf_counter() - start) / runs * 1e6


def _device_us(device: str, run: Callable[[], object], runs: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    stream = torch.cuda.current_stream(device)
    start.record(stream)
    for _ in range(runs):
        run()
    end.record(stream)
    end.synchronize()
    return float(start.elapsed_time(end)) / runs * 1e3
