"""List scheduling: the op with the longest path after it goes first, to the stream where it starts earliest.

    stream 0   ─ a ─ b ─── c ─ e ─     an op stays on the stream of the predecessor that ends last, its *home* stream
    stream 1        └─ d ────┘         d would start later there than on stream 1, by more than the edges cost

1. Rank every op by its bottom level (HLFET: Adam, Chandy & Dickson 1974, "A comparison of list schedules for parallel
   processing systems"); of equal ones, the first in program order goes first.
2. Advance a clock. Whenever a stream is free, take the ready op of the highest level (greedy, so without edge costs
   within 2 - 1/K of the optimum: Graham 1969). Pinned ops wait for stream 0.
3. Give it the stream on which it starts earliest, edges between streams included (as in HEFT: Topcuoglu, Hariri & Wu
   2002). It leaves its home stream only if it starts earlier by more than the edge back costs, and to use one more
   stream, by more than that and the join.

Collectives have the last stream (:mod:`~autostream.scheduling.communication`), and no other op is on it. Ops that
follow them are placed when all others are, behind these or on a stream that was kept for them.

Launches are issued in the order of their starts. O(E + V·(log V + K)) for V ops, E dependencies and K streams.

Starts assume that ops do not slow each other down; only the simulator models that. An ``sm_share`` of 1 says how many
multiprocessors an op *can* fill. Such ops still gain from overlap, since one fills the tail of the other, so the policy
does not keep them apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf

from autostream.ir import Assignment, Costs, Decision, DeviceProfile, OpGraph
from autostream.scheduling.communication import placed_apart, set_apart
from autostream.scheduling.structure import bottom_levels

_MOST_LATER = 1.05
"""A stream is kept for ops that follow collectives if all ends at most so many times as late. Where it is 2 % later for
steps over two GPUs, the simulator says that it is 1 % earlier: others gain less from one more stream, as they slow each
other down."""


def critical_path(
    graph: OpGraph, costs: Costs, profile: DeviceProfile, streams: int, pinned: frozenset[str]
) -> Assignment:
    """Schedule over at most ``streams`` streams by bottom level; ``pinned`` ops stay on stream 0.

    Example:
        >>> from autostream.ir import Op, OpCost
        >>> ops = {name: Op(name, "f", (name,), frozenset(), frozenset({name})) for name in "ab"}
        >>> costs = {name: OpCost(9.0, 0.1, 0.1, "roofline") for name in "ab"}
        >>> profile = DeviceProfile("GPU", 132, 4.8e6, {}, 2.0, 1.0, 2.0, 1.0, 1.0, "table")
        >>> assignment = critical_path(OpGraph(ops, (), {}, (), "cuda:0"), costs, profile, 4, frozenset())
        >>> assignment.stream
        {'a': 0, 'b': 1}
        >>> print(assignment.decisions[1].reason)
        starts 9.0 µs earlier than on stream 0
    """
    profile, names, level = profile.over(streams), list(graph.ops), bottom_levels(graph, costs)
    apart, following = placed_apart(graph, streams, pinned)
    computing = streams - bool(apart)
    first, last = ([at for at, name in enumerate(names) if (name in following) == kind] for kind in (False, True))

    def placed(spare: bool) -> _PartialSchedule:
        """All ops; with ``spare``, those that follow collectives have a stream beside those of the others."""
        free = [0.0] + [profile.fork_us] * (streams - 1)
        partial = _PartialSchedule(profile, free, computing - spare, apart)
        _fill(partial, graph, costs, level, pinned, first)
        partial.computing = computing
        _fill(partial, graph, costs, level, pinned, last)
        return partial

    partial = placed(spare=False)
    if following and computing > 1 and (other := placed(spare=True)).end_us <= _MOST_LATER * partial.end_us:
        partial = other
    return Assignment(
        policy="critical_path",
        streams=partial.used + bool(apart),
        order=tuple([names[at] for at in sorted(partial.start, key=partial.start.__getitem__)]),
        stream=set_apart({name: partial.stream[at] for at, name in enumerate(names)}, apart),
        decisions=(_summary(partial, streams), *partial.decisions),
    )


def _fill(
    partial: _PartialSchedule,
    graph: OpGraph,
    costs: Costs,
    level: Mapping[str, float],
    pinned: frozenset[str],
    ops: Sequence[int],
) -> None:
    """Place ops in the order of the queues; they are represented by their positions in program order.

    All that they depend on is among them or has been placed.
    """
    names = list(graph.ops)
    by_rank = sorted(ops, key=lambda at: -level[names[at]])
    rank = {at: rank for rank, at in enumerate(by_rank)}
    missing = {at: sum(before in rank for before in graph.predecessors[at]) for at in ops}
    inputs = {at: partial.inputs(graph.predecessors[at]) for at in ops if not missing[at]}
    queues = _Queues()
    for at, given in inputs.items():
        queues.push(rank[at], given.near, names[at] in pinned)
    while (next_rank := queues.pop(partial.free[: partial.computing])) is not None:
        at = by_rank[next_rank]
        name = names[at]
        partial.place(at, name, costs[name].duration_us, inputs[at], name in pinned)
        for after in filter(rank.__contains__, graph.successors[at]):
            missing[after] -= 1
            if not missing[after]:
                inputs[after] = partial.inputs(graph.predecessors[after])
                queues.push(rank[after], inputs[after].near, names[after] in pinned)


@dataclass(frozen=True, slots=True)
class _Inputs:
    """When an op's inputs are available: at ``near`` on its home stream, at ``far`` on any other, µs.

    The home stream of an op without predecessors is stream 0.
    """

    home: int = 0
    near: float = 0.0
    far: float = 0.0


@dataclass(slots=True)
class _PartialSchedule:
    """The stream, start and end of each op placed so far, and when each stream is free, µs after the fork.

    If some ops are set apart, the last stream is theirs; the first ``computing`` ones are for the others now.
    """

    profile: DeviceProfile
    free: list[float]
    computing: int
    apart: Set[str]
    used: int = 1
    stream: dict[int, int] = field(default_factory=dict)
    start: dict[int, float] = field(default_factory=dict)
    finish: dict[int, float] = field(default_factory=dict)
    decisions: list[Decision] = field(default_factory=list)

    @property
    def end_us(self) -> float:
        """When the last op ends."""
        return max(self.finish.values(), default=0.0)

    def inputs(self, predecessors: Sequence[int]) -> _Inputs:
        """When and where an op's inputs are available; all its predecessors are placed."""
        if not predecessors:
            return _Inputs()
        last = max(predecessors, key=self.finish.__getitem__)
        home, end = self.stream[last], self.finish[last]
        foreign = max([self.finish[at] for at in predecessors if self.stream[at] != home], default=-inf)
        near, far = self.profile.same_stream_edge_us, self.profile.cross_stream_edge_us
        return _Inputs(home, max(end + near, foreign + far), end + far)

    def start_on(self, stream: int, inputs: _Inputs) -> float:
        """The earliest start at the end of a stream, µs."""
        return max(self.free[stream], inputs.near if stream == inputs.home else inputs.far)

    def best_stream(self, inputs: _Inputs) -> int:
        """The stream of the earliest start, with penalties for leaving home and for using one more stream."""
        leaving_us = max(0.0, self.profile.cross_stream_edge_us - self.profile.same_stream_edge_us)
        usable = self.free[: min(self.used + 1, self.computing)]
        starts = [(max(free, inputs.far) + leaving_us, True, stream) for stream, free in enumerate(usable)]
        if len(starts) > self.used:
            start, away, stream = starts[-1]
            starts[-1] = start + self.profile.join_us, away, stream
        if inputs.home < self.computing:
            starts[inputs.home] = self.start_on(inputs.home, inputs), False, inputs.home
        return min(starts)[-1]

    def place(self, at: int, name: str, duration_us: float, inputs: _Inputs, pinned: bool) -> None:
        """Append an op to stream 0, to that of collectives, or to its best one."""
        apart = name in self.apart
        stream = 0 if pinned else len(self.free) - 1 if apart else self.best_stream(inputs)
        start = self.start_on(stream, inputs)
        if stream != inputs.home and not apart and inputs.home < self.computing:
            gain = None if pinned else self.start_on(inputs.home, inputs) - start
            self.decisions.append(_explain(name, stream, inputs.home, gain))
        if not apart:
            self.used = max(self.used, stream + 1)
        self.stream[at], self.start[at], self.finish[at] = stream, start, start + duration_us
        self.free[stream] = start + duration_us + self.profile.same_stream_edge_us


@dataclass(slots=True)
class _Queues:
    """Ops by rank: pinned ones, which need stream 0, others, and pending ones, which are not yet ready."""

    pinned: list[int] = field(default_factory=list)
    others: list[int] = field(default_factory=list)
    pending: list[tuple[float, int, bool]] = field(default_factory=list)
    now: float = 0.0

    def push(self, rank: int, ready_us: float, pinned: bool) -> None:
        """Add an op that is ready at ``ready_us``."""
        heappush(self.pending, (ready_us, rank, pinned))

    def pop(self, free: Sequence[float]) -> int | None:
        """The lowest rank that can start when a stream is next free; ``None`` if no op is left."""
        while True:
            self._admit()
            waiting = [(queue, at) for queue, at in ((self.pinned, free[0]), (self.others, min(free))) if queue]
            startable = [queue for queue, at in waiting if at <= self.now]
            if startable:
                return heappop(min(startable))
            times = [at for _, at in waiting] + [ready for ready, _, _ in self.pending[:1]]
            if not times:
                return None
            self.now = min(times)

    def _admit(self) -> None:
        while self.pending and self.pending[0][0] <= self.now:
            _, rank, pinned = heappop(self.pending)
            heappush(self.pinned if pinned else self.others, rank)


def _explain(name: str, stream: int, home: int, gain_us: float | None) -> Decision:
    if gain_us is None:
        return Decision(name, f"stream {stream}", f"must be on the caller's stream; what it needs is on stream {home}")
    return Decision(name, f"stream {stream}", f"starts {gain_us:.1f} µs earlier than on stream {home}")


def _summary(partial: _PartialSchedule, streams: int) -> Decision:
    if streams == 1:
        return Decision("", "1 stream", "no more are allowed")
    if partial.apart:
        beside = "the last is that of collectives, which run beside all else; what follows them delays nothing else"
        return Decision("", f"{partial.used + 1} streams", beside)
    if partial.used == 1:
        return Decision("", "1 stream", "no op would start earlier on another by more than the edges cost")
    return Decision("", f"{partial.used} streams", "some ops start earlier on another by more than the edges cost")
