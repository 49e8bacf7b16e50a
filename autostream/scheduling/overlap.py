"""Which ops of a timeline run at the same time, for how long, and what they need of the device together.

stream 0   ▐── a ──▌▐── c ──▌      a overlaps with b for most of its time, c with b for a moment;
stream 1      ▐──── b ────▌        two ops run at once from the start of b to its end
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from autostream.ir import Costs, Slice, Timeline


@dataclass(frozen=True, slots=True)
class Overlap:
    """An op and the ops that run at the same time.

    Attributes:
        op: its name.
        stream: its stream.
        shared_us: how long at least one other runs at the same time, µs.
        beside: the others, in order of their starts, with the time that each runs at the same time, µs.
    """

    op: str
    stream: int
    shared_us: float
    beside: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Demand:
    """What the ops that run from some time on need together; where that is more than 1, they slow each other down.

    Attributes:
        at_us: that time, µs.
        multiprocessors: the sum of their shares of the multiprocessors.
        bandwidth: the sum of their shares of the memory bandwidth.
    """

    at_us: float
    multiprocessors: float
    bandwidth: float


def longest_overlaps(timeline: Timeline, most: int) -> tuple[Overlap, ...]:
    """The ops that overlap with others longest, longest first, at most ``most``, without those in an earlier result.

    Example:
        >>> timeline = Timeline((Slice("a", 0, 0.0, 5.0), Slice("b", 1, 1.0, 3.0), Slice("c", 1, 3.0, 4.0)))
        >>> for overlap in longest_overlaps(timeline, most=3):
        ...     print(overlap.op, overlap.shared_us, overlap.beside)
        a 3.0 {'b': 2.0, 'c': 1.0}
    """
    longest: list[Overlap] = []
    mentioned: set[str] = set()
    for overlap in sorted(_overlaps(timeline), key=lambda overlap: -overlap.shared_us):
        if len(longest) == most:
            break
        if overlap.op not in mentioned:
            longest.append(overlap)
            mentioned |= {overlap.op, *overlap.beside}
    return tuple(longest)


def concurrency(timeline: Timeline) -> Mapping[int, float]:
    """For each number of ops, how long exactly so many run at once, µs; 0 for the time when none does.

    Example:
        >>> concurrency(Timeline((Slice("a", 0, 0.0, 5.0), Slice("b", 1, 1.0, 3.0))))
        {1: 3.0, 2: 2.0}
    """
    steps = sorted([(s.start_us, 1) for s in timeline.slices] + [(s.end_us, -1) for s in timeline.slices])
    spent: dict[int, float] = {}
    running = 0
    for (at, step), (until, _) in pairwise(steps):
        running += step
        if until > at:
            spent[running] = spent.get(running, 0.0) + until - at
    return dict(sorted(spent.items()))


def demands(timeline: Timeline, costs: Costs) -> tuple[Demand, ...]:
    """What the running ops need of the device, at each time at which that changes.

    Example:
        >>> from autostream.ir import OpCost
        >>> timeline = Timeline((Slice("a", 0, 0.0, 5.0), Slice("b", 1, 1.0, 3.0)))
        >>> found = demands(timeline, dict.fromkeys("ab", OpCost(4.0, 0.75, 0.25, "roofline")))
        >>> [(demand.at_us, demand.multiprocessors) for demand in found]
        [(0.0, 0.75), (1.0, 1.5), (3.0, 0.75), (5.0, 0)]
    """
    slices = [s for s in timeline.slices if s.op in costs and s.end_us > s.start_us]
    steps = [(s.start_us, s.op, True) for s in slices] + [(s.end_us, s.op, False) for s in slices]
    running: dict[str, None] = {}
    at_time: dict[float, Demand] = {}
    for at_us, op, starts in sorted(steps):
        if starts:
            running[op] = None
        else:
            del running[op]
        now = [costs[name] for name in running]
        at_time[at_us] = Demand(at_us, sum(cost.sm_share for cost in now), sum(cost.bandwidth_share for cost in now))
    return tuple(at_time.values())


def _overlaps(timeline: Timeline) -> list[Overlap]:
    """All ops that overlap with others, by a sweep over the starts: O(V·log V + P) steps for P pairs that overlap."""
    beside: dict[Slice, list[Slice]] = {s: [] for s in timeline.slices if s.end_us > s.start_us}
    running: list[Slice] = []
    for entry in sorted(beside, key=lambda s: (s.start_us, s.stream)):
        running = [other for other in running if other.end_us > entry.start_us]
        for other in running:
            beside[other].append(entry)
            beside[entry].append(other)
        running.append(entry)
    return [
        Overlap(entry.op, entry.stream, _covered_us(entry, others), {o.op: _shared_us(entry, o) for o in others})
        for entry, others in beside.items()
        if others
    ]


def _shared_us(one: Slice, other: Slice) -> float:
    return min(one.end_us, other.end_us) - max(one.start_us, other.start_us)


def _covered_us(entry: Slice, others: Sequence[Slice]) -> float:
    """How much of a slice others cover together, given in order of their starts."""
    covered, covered_to = 0.0, entry.start_us
    for other in others:
        end = min(other.end_us, entry.end_us)
        covered += max(0.0, end - max(other.start_us, covered_to))
        covered_to = max(covered_to, end)
    return covered
