"""Compares autostream's schedule with the best one that a long random search on the device finds.

    python -m benchmarks.random_search googlenet inception_v3 --seconds 600 --out benchmarks/results/latest

autostream optimizes a workload with default options. The ops of the level that it chose are then scheduled at random
for the given time: a quarter of the schedules are *fresh*, the others *changed*: one of the best so far after a few
random moves. The search starts with the schedules that autostream measured. The simulator is not used.
Rows of the same commit, machine and settings in the folder stay.

Each schedule is verified, captured and timed against autostream's in interleaved rounds. The minimum of thousands of
noisy measurements is biased, so each candidate is measured again several times:

    first look ── faster than the worst kept? ─▶ careful look ── still? ─▶ one of the few that are kept
                                                                                  │ at the end
    reported ◀── final look at the best of them, captured again ◀── final look at each
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from math import inf, isfinite
from random import Random
from statistics import median
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor

from autostream.cli.changes import spread
from autostream.errors import CaptureError
from autostream.frontend.trace import trace
from autostream.ir import Assignment, Candidate, OpGraph, Role, Schedule
from autostream.options import Options
from autostream.runtime.clock import Clock, clock_of
from autostream.runtime.cuda_graph import CapturedGraph
from autostream.runtime.restore import Restore, undone
from autostream.scheduling.releases import place_releases
from autostream.scheduling.simulate import run_us
from autostream.scheduling.synchronize import synchronize
from autostream.scheduling.verify import verify
from autostream.tuning.select import Execution, build, interleaved, written
from autostream.tuning.tune import Tuned, tune
from autostream.utils.stopwatch import Stopwatch
from benchmarks import zoo
from benchmarks.stamp import earlier_rows, save, saving_parser, stamp

WORKLOADS = ("googlenet", "inception_v3")

FRESH = 0.25
"""The share of fresh schedules."""

MOST_STREAMS = 8
MOST_MOVES = 4
LONGEST_MOVE = 8
"""Largest number of consecutive ops of a stream that one move puts on another stream."""

KEPT = 5
CAREFUL, FINAL = 9, 33
"""Pairs of measurements in a look; the first look has one."""

Pair = tuple[float, float]
"""Interleaved times of autostream's schedule and another one, µs."""

Look = Callable[[Assignment, float], float]
"""Time of a schedule relative to autostream's: by a first look, or by a careful one if that is below a bound; infinity
where it cannot run."""


def main(argv: list[str] | None = None) -> int:
    """Measure, save and print the results."""
    parser = saving_parser("random_search", __doc__)
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=f"default: {' '.join(WORKLOADS)}")
    parser.add_argument("--seconds", type=float, default=600.0, help="search for so long each (default: 600)")
    parser.add_argument("--seed", type=int, default=0, help="of the random choices (default: 0)")
    options = parser.parse_args(argv)
    unknown = set(options.workloads) - set(zoo.INFERENCE)
    if unknown:
        parser.error(f"{min(unknown)}: use {', '.join(zoo.INFERENCE)}")
    if not (isfinite(options.seconds) and options.seconds > 0):
        parser.error(f"--seconds {options.seconds}: use a finite number above 0")
    now, settings = stamp(), {"seconds": options.seconds, "seed": options.seed, "fresh": FRESH}
    found = [row(name, options.seconds, options.seed) for name in options.workloads or WORKLOADS]
    earlier = earlier_rows("random_search", options.out, now, **settings)  # read late: another process may have written
    rows = {row["workload"]: row for row in (*earlier, *found)}
    result: dict[str, Any] = {"schema": 1, "stamp": now, **settings, "rows": list(rows.values())}
    save("random_search", result, table(result["rows"]), options.out)
    return 0


def row(workload: str, seconds: float, seed: int) -> dict[str, Any]:
    """The schedule of autostream for a workload, and the best one of the search."""
    with torch.no_grad():
        comparison = _comparison(workload)
        program, graph = comparison.tuned.program, comparison.tuned.priced.graph
        with undone(comparison.arguments, written(program, graph), program.devices):
            found = explore(graph, comparison.pinned, comparison.known(), comparison.look, seconds, seed)
            best, pairs = best_of(found.kept, comparison.pairs)
    ratio = spread([ours / theirs for ours, theirs in pairs])
    ours_us, theirs_us = map(median, zip(*pairs, strict=True))
    return {
        "workload": workload,
        "level": program.level,
        "ops": len(graph.ops),
        "tried": dict(found.tried),
        "refused": found.refused,
        "autostream": _line(comparison.tuned.selection.chosen, ours_us),
        "best": _line(comparison.candidate(best), theirs_us),
        "ratio": round(ratio.median, 4),
        "standard_error": round(ratio.standard_error, 4),
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line for each workload; the ratio is the time of autostream's schedule over that of the best one."""
    lines = [
        [
            measured["workload"],
            measured["level"],
            measured["ops"],
            sum(measured["tried"].values()),
            measured["refused"],
            *(
                value
                for schedule in (measured["autostream"], measured["best"])
                for value in (f"{schedule['policy']} {schedule['streams']}", schedule["measured_us"])
            ),
            f"{measured['ratio']:.3f}× ±{measured['standard_error']:.3f}",
        ]
        for measured in rows
    ]
    headers = ["workload", "level", "ops", "tried", "refused", "autostream", "µs", "best found", "µs", "ratio"]
    return tabulate(lines, headers, tablefmt="github", floatfmt=".1f")


def fresh(graph: OpGraph, pinned: frozenset[str], random: Random) -> Assignment:
    """A random assignment, in any order that the dependencies allow.

    An op stays on the stream of one of its producers with a probability that is random for the whole schedule, so that
    schedules range from long chains to an edge at every op.
    """
    streams, loyalty = random.randint(2, MOST_STREAMS), random.random()
    missing = {name: graph.digraph.in_degree(name) for name in graph.ops}
    ready = [name for name, count in missing.items() if not count]
    stream: dict[str, int] = {}
    while ready:
        name = ready.pop(random.randrange(len(ready)))
        before = list(graph.digraph.predecessors(name))
        stays = before and random.random() < loyalty
        stream[name] = stream[random.choice(before)] if stays else random.randrange(streams)
        for after in graph.digraph.successors(name):
            missing[after] -= 1
            if not missing[after]:
                ready.append(after)
    return _assignment("fresh", tuple(stream), stream, pinned)


def changed(graph: OpGraph, pinned: frozenset[str], parent: Assignment, random: Random) -> Assignment:
    """An assignment after a few moves: consecutive ops go to another stream, or one op to another launch position."""
    order, stream = parent.order, dict(parent.stream)
    streams = min(parent.streams + 1, MOST_STREAMS)
    for _ in range(random.randint(1, MOST_MOVES)):
        name = random.choice(order)
        if random.random() < 0.5:
            behind = (other for other in order[order.index(name) :] if stream[other] == stream[name])
            ops = list(islice(behind, random.randint(1, LONGEST_MOVE)))
            stream |= dict.fromkeys(ops, random.randrange(streams))
        else:
            order = _relaunched(graph, order, name, random)
    return _assignment("changed", order, stream, pinned)


def _relaunched(graph: OpGraph, order: Sequence[str], name: str, random: Random) -> tuple[str, ...]:
    """The order with one op at a random position between its predecessors and successors."""
    rest = [other for other in order if other != name]
    position = {other: at for at, other in enumerate(rest)}
    after = max((position[other] for other in graph.digraph.predecessors(name)), default=-1)
    until = min((position[other] for other in graph.digraph.successors(name)), default=len(rest))
    at = random.randint(after + 1, until)
    return (*rest[:at], name, *rest[at:])


def _assignment(policy: str, order: tuple[str, ...], stream: Mapping[str, int], pinned: frozenset[str]) -> Assignment:
    """Pinned ops on stream 0, and streams numbered without gaps."""
    wanted = {**stream, **dict.fromkeys(pinned, 0)}
    number = {used: at for at, used in enumerate(sorted(set(wanted.values())))}
    return Assignment(policy, len(number), order, {name: number[at] for name, at in wanted.items()})


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    Attributes:
        kept: the best assignments, the fastest first.
        tried: the number of ``"fresh"`` and ``"changed"`` ones.
        refused: how many of these could not run.
    """

    kept: tuple[Assignment, ...]
    tried: Mapping[str, int]
    refused: int


def explore(
    graph: OpGraph, pinned: frozenset[str], known: Sequence[Assignment], look: Look, seconds: float, seed: int
) -> SearchResult:
    """Try random schedules for some seconds, each once, and keep the fastest.

    Args:
        graph: the ops.
        pinned: those that must be on stream 0.
        known: the first ones; at least one of them can run.
        look: measures one.
        seconds: time of the search.
        seed: of the random choices, which also depend on measurements.
    """
    random, end = Random(seed), time.perf_counter() + seconds
    kept = _fastest([(look(assignment, inf), assignment) for assignment in known])
    seen = {_key(assignment) for assignment in known}
    tried: Counter[str] = Counter()
    refused = 0
    while time.perf_counter() < end:
        parent = random.choice(kept)[1]
        candidate = fresh(graph, pinned, random) if random.random() < FRESH else changed(graph, pinned, parent, random)
        if _key(candidate) in seen:
            continue
        seen.add(_key(candidate))
        relative = look(candidate, kept[-1][0] if len(kept) == KEPT else inf)
        tried[candidate.policy] += 1
        refused += relative == inf
        best, kept = kept[0], _fastest([*kept, (relative, candidate)])
        if kept[0] is not best:
            print(f"schedule {tried.total()}: {relative:.3f} × autostream's time", file=sys.stderr, flush=True)
    return SearchResult(tuple(assignment for _, assignment in kept), tried, refused)


Measured = tuple[float, Assignment]


def _fastest(measured: Iterable[Measured]) -> list[Measured]:
    return sorted((pair for pair in measured if pair[0] < inf), key=lambda pair: pair[0])[:KEPT]


def _key(assignment: Assignment) -> tuple[tuple[str, int], ...]:
    return tuple((name, assignment.stream[name]) for name in assignment.order)


def best_of(kept: Sequence[Assignment], pairs: Callable[[Assignment], Iterator[Pair]]) -> tuple[Assignment, list[Pair]]:
    """The best by a final look at each, and another, unbiased look at that one."""
    best = min(kept, key=lambda assignment: _times_as_long(islice(pairs(assignment), FINAL)))
    return best, list(islice(pairs(best), FINAL))


def _times_as_long(pairs: Iterable[Pair]) -> float:
    return median(theirs / ours for ours, theirs in pairs)


@dataclass(frozen=True)
class Comparison:
    """Measures schedules of one program against the one that autostream chose.

    Attributes:
        tuned: the program as tuned by autostream.
        arguments: its tensors.
        bound: which of them a captured graph may use in place.
        clock: of its device.
    """

    tuned: Tuned
    arguments: Sequence[Tensor]
    bound: Sequence[bool]
    clock: Clock

    @property
    def pinned(self) -> frozenset[str]:
        """Ops that must be on stream 0."""
        return frozenset() if self.tuned.selection.chosen.captured else self.tuned.priced.graph.pinned

    def known(self) -> list[Assignment]:
        """The assignments of the schedules that autostream measured."""
        measured = [each.schedule for each in self.tuned.selection.candidates if each.measured_us is not None]
        return [_assignment_of(schedule) for schedule in measured]

    def candidate(self, assignment: Assignment) -> Candidate:
        """A verified schedule, captured if autostream's is."""
        priced, captured = self.tuned.priced, self.tuned.selection.chosen.captured
        schedule = place_releases(priced.graph, synchronize(priced.graph, assignment))
        verify(priced.graph, schedule, pinned=self.pinned)
        return Candidate(schedule, captured, run_us(schedule, priced.costs, priced.profile, captured=captured))

    def pairs(self, assignment: Assignment) -> Iterator[Pair]:
        """Interleaved times of autostream's schedule and this one, which lives as long as the iterator.

        Raises:
            CaptureError: it cannot be captured.
        """
        # Free the memory pool of the last graph, which the next one cannot use.
        torch.cuda.empty_cache()
        tuned = self.tuned
        nothing = Restore([])  # models of the zoo write nothing
        candidate = self.candidate(assignment)
        other = build(tuned.program, tuned.priced.graph, candidate, self.arguments, self.bound, nothing)
        timers = [self._timer(tuned.selection.execution), self._timer(other)]
        while True:
            ours, theirs = interleaved(timers)
            yield ours, theirs

    def look(self, assignment: Assignment, bound: float) -> float:
        """See :data:`Look`."""
        pairs = self.pairs(assignment)
        try:
            first = _times_as_long([next(pairs)])
            return first if first >= bound else _times_as_long(islice(pairs, CAREFUL))
        except (CaptureError, torch.OutOfMemoryError):
            return inf

    def _timer(self, execution: Execution) -> Callable[[], float]:
        run = execution.replay if isinstance(execution, CapturedGraph) else partial(execution, *self.arguments)
        return partial(self.clock.once_us, run)


def _comparison(workload: str) -> Comparison:
    """A workload, tuned with the default options of :func:`autostream.optimize`."""
    cuda = torch.cuda.is_available()
    device, dtype = (torch.device("cuda", 0), torch.float16) if cuda else (torch.device("cpu"), torch.float32)
    subject = zoo.prepare(zoo.INFERENCE[workload], 1, device, dtype)
    traced = trace(subject.model, subject.args)
    arguments = traced.arguments(subject.model, subject.args)
    bound = [placeholder.role is not Role.INPUT for placeholder in traced.program.placeholders]
    tuned = tune(traced.program, arguments, bound, Options(), Stopwatch())
    return Comparison(tuned, arguments, bound, clock_of(device))


def _assignment_of(schedule: Schedule) -> Assignment:
    order = tuple(launch.op for launch in schedule.launches)
    return Assignment(schedule.policy, schedule.streams, order, schedule.stream_of)


def _line(candidate: Candidate, measured_us: float) -> dict[str, Any]:
    return {
        "policy": candidate.schedule.policy,
        "streams": candidate.schedule.streams,
        "waits": candidate.schedule.wait_count,
        "captured": candidate.captured,
        "predicted_us": round(candidate.predicted_us, 2),
        "measured_us": round(measured_us, 2),
    }


if __name__ == "__main__":
    sys.exit(main())
