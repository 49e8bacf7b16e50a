"""What runs beside what on a timeline.

stream 0   ▐── a ──▌▐── c ──▌      a runs beside b for most of its time, c beside b for a moment;
stream 1      ▐──── b ────▌        two ops run at once from the start of b to its end
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from autostream.ir import Costs, Slice, Timeline


@dataclass(frozen=True, slots=True)
class Company:
    """An op and those that run while it does.

    Attributes:
        op: its name.
        stream: its stream.
        shared_us: how long at least one other runs beside it, µs.
        beside: the others with the time that each runs beside it, µs, in order of their starts.
    """

    op: str
    stream: int
    shared_us: float
    beside: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Demand:
    """What the ops that run from a moment on ask for together; where that is more than 1, they slow each other down.

    Attributes:
        at_us: from when on, µs.
        multiprocessors: the sum of their shares of the multiprocessors.
        bandwidth: the sum of their shares of the memory bandwidth.
    """

    at_us: float
    multiprocessors: float
    bandwidth: float


def companies(timeline: Timeline, most: int) -> tuple[Company, ...]:
    """The ops that have company longest, longest first, at most so many; none is told of twice.

    Example:
        >>> timeline = Timeline((Slice("a", 0, 0.0, 5.0), Slice("b", 1, 1.0, 3.0), Slice("c", 1, 3.0, 4.0)))
        >>> for company in companies(timeline, most=3):
        ...     print(company.op, company.shared_us, company.beside)
        a 3.0 {'b': 2.0, 'c': 1.0}
    """
    found = sorted(_all_companies(timeline), key=lambda company: -company.shared_us)
    kept: list[Company] = []
    told: set[str] = set()
    for company in found:
        if len(kept) == most:
            break
        if company.op not in told:
            kept.append(company)
            told |= {company.op, *company.beside}
    return tuple(kept)


def concurrency(timeline: Timeline) -> Mapping[int, float]:
    """How long exactly so many ops run at once, µs, by their number; 0 is the time when none does.

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
    """What is asked of the device, from each moment on at which that changes.

    Example:
        >>> from autostream.ir import OpCost
        >>> timeline = Timeline((Slice("a", 0, 0.0, 5.0), Slice("b", 1, 1.0, 3.0)))
        >>> asked = demands(timeline, dict.fromkeys("ab", OpCost(4.0, 0.75, 0.25, "roofline")))
        >>> [(demand.at_us, demand.multiprocessors) for demand in asked]
        [(0.0, 0.75), (1.0, 1.5), (3.0, 0.75), (5.0, 0)]
    """
    lasting = [piece for piece in timeline.slices if piece.op in costs and piece.end_us > piece.start_us]
    steps = [(piece.start_us, piece.op, True) for piece in lasting] + [
        (piece.end_us, piece.op, False) for piece in lasting
    ]
    running: dict[str, None] = {}
    found: dict[float, Demand] = {}
    for at_us, op, starts in sorted(steps):
        if starts:
            running[op] = None
        else:
            del running[op]
        ours = [costs[name] for name in running]
        found[at_us] = Demand(at_us, sum(cost.sm_share for cost in ours), sum(cost.bandwidth_share for cost in ours))
    return tuple(found.values())


def _all_companies(timeline: Timeline) -> list[Company]:
    """By a sweep over the starts: O(V·log V) and the number of pairs that overlap."""
    beside: dict[Slice, list[Slice]] = {s: [] for s in timeline.slices if s.end_us > s.start_us}
    running: list[Slice] = []
    for entry in sorted(beside, key=lambda s: (s.start_us, s.stream)):
        running = [other for other in running if other.end_us > entry.start_us]
        for other in running:
            beside[other].append(entry)
            beside[entry].append(other)
        running.append(entry)
    return [
        Company(entry.op, entry.stream, _covered_us(entry, others), {o.op: _shared_us(entry, o) for o in others})
        for entry, others in beside.items()
        if others
    ]


def _shared_us(one: Slice, other: Slice) -> float:
    return min(one.end_us, other.end_us) - max(one.start_us, other.start_us)


def _covered_us(entry: Slice, others: Sequence[Slice]) -> float:
    """How much of a slice the others cover together; they come in order of their starts."""
    covered, reached = 0.0, entry.start_us
    for other in others:
        until = min(other.end_us, entry.end_us)
        covered += max(0.0, until - max(other.start_us, reached))
        reached = max(reached, until)
    return covered
