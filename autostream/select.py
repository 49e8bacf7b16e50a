"""Measure the candidates, keep the fastest.

The simulator is only a model, so the device decides what runs: each candidate meets the best one so far in interleaved
rounds, where drift of clocks and temperature hits both alike. The sequential schedule is the first best; nothing
replaces it that was not measured faster.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import Tensor

from autostream.errors import CaptureError, first_line
from autostream.execution.cuda_graph import CapturedGraph, Run
from autostream.execution.lower import lower
from autostream.execution.runs import uncaptured
from autostream.ir import Candidate, OpGraph, Program

MARGIN = 0.01
"""A schedule over more streams must be faster by this share: more streams cost memory, and clocks are not exact."""

_ROUNDS = 9
_ROUND_US = 2000.0
_DUEL_S = 1.0
_HOPELESS = 1.15

Execution = Run | CapturedGraph


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
) -> Selection:
    """Build the candidates one by one, measure each against the best so far, and keep the best.

    At most two are alive at a time, so that choosing takes no more memory than two of them.

    Args:
        program: the traced model.
        graph: its ops.
        candidates: verified schedules, the sequential one first.
        tensors: the program's arguments; those that it writes are written.
        bound: which of the arguments a captured graph may use where they are.

    Raises:
        CaptureError: the first candidate cannot be captured, so none can.
    """
    considered: list[Candidate] = []
    best: tuple[int, Execution] | None = None
    for candidate in candidates:
        considered.append(candidate)
        try:
            execution = build(program, graph, candidate, tensors, bound)
        except (CaptureError, torch.OutOfMemoryError) as error:
            if best is None:
                raise
            considered[-1] = replace(candidate, refusal=first_line(error))
            continue
        newest = len(considered) - 1, execution
        rivals = [newest] if best is None else [best, newest]
        times = interleaved([_timer(rival, tensors, program.device) for _, rival in rivals])
        for (place, _), time_us in zip(rivals, times, strict=True):
            considered[place] = replace(considered[place], measured_us=time_us)
        if best is None or times[-1] < times[0] * (1 - MARGIN):
            best = newest
        del rivals, newest, execution
    if best is None:
        raise ValueError("there must be at least one candidate")
    return Selection(best[1], considered[best[0]], tuple(considered))


def build(
    program: Program, graph: OpGraph, candidate: Candidate, tensors: Sequence[Tensor], bound: Sequence[bool]
) -> Execution:
    """Lower a candidate to something that runs, and capture it if it is to be captured.

    Raises:
        CaptureError: the capture failed.
    """
    run = uncaptured(lower(program, graph, candidate.schedule), program.device, candidate.schedule.streams)
    if not candidate.captured:
        return run
    repeatable = not any(written(program, graph)) and not any(op.orders for op in graph.ops.values())
    device = torch.device(program.device)
    return CapturedGraph(run, tensors, bound, written(program, graph), device, repeatable=repeatable)


def written(program: Program, graph: OpGraph) -> tuple[bool, ...]:
    """Which placeholders a program writes."""
    storages = {storage for op in graph.ops.values() for storage in op.writes}
    return tuple(placeholder.storage in storages for placeholder in program.placeholders)


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
    if isinstance(execution, CapturedGraph):
        run = execution.replay
    else:
        plain = execution

        def run() -> None:
            plain(*tensors)

    clock = _host_us if device == "cpu" else _device_us
    clock(run, 1)
    runs = max(1, min(50, round(_ROUND_US / max(clock(run, 1), 1.0))))
    return lambda: clock(run, runs)


def _host_us(run: Callable[[], None], runs: int) -> float:
    start = time.perf_counter()
    for _ in range(runs):
        run()
    return (time.perf_counter() - start) / runs * 1e6


def _device_us(run: Callable[[], None], runs: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(runs):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / runs * 1e3
