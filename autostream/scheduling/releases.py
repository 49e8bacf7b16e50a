"""Releases: how early each storage can go back to the caching allocator, and waits that let memory be reused sooner.

The allocator hands a freed block to any later launch on the stream that allocated it, in the order of the host, and
knows nothing of other streams. So a storage can be released once all its accesses are over *as seen from the end of
that stream*: an access on it counts when it is launched, an access on another stream once the allocating stream has
waited for it, directly or through other launches (:func:`place_releases`).

Waits are placed for data alone, as few as are needed. Where the simulation says that another stream has been done with
enough memory for longer than an edge takes, one more wait delays nothing and saves that memory
(:func:`wait_for_memory`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter

from autostream.ir import FORK, Launch, OpGraph, Role, Schedule, Timeline
from autostream.scheduling.lifetimes import NEVER, Clock, clocks
from autostream.scheduling.peak import Footprint
from autostream.scheduling.postpone import delayed


def place_releases(graph: OpGraph, schedule: Schedule) -> Schedule:
    """Release every intermediate storage with a block of its own that does not escape, as early as is safe.

    That launch is always one of the allocating stream: the last access there, or the first op that happens after all
    accesses on other streams, found by bisection, since clocks only grow along a stream. A storage without such a
    launch lives until the end of the run. Takes O(V K + A log V) steps for V ops on K streams with A accesses.

    Args:
        graph: the ops with their accesses, and the storages.
        schedule: the launches with their waits; releases that it has are replaced.

    Returns:
        The schedule with ``releases``, each in the order of ``graph.storages``.

    Example:
        ``b`` reads ``a`` on another stream, and ``c`` waits for ``b``, so ``a`` is released after ``c``. ``b`` never
        is: it was allocated on stream 1, which does not wait for its reader ``c``.

        >>> from autostream.ir import Launch, Op, Storage
        >>> reads = {"a": "x", "b": "a", "c": "b"}
        >>> ops = {n: Op(n, "aten.relu.default", (n,), frozenset({r}), frozenset({n}), frozenset({n}))
        ...        for n, r in reads.items()}
        >>> storages = {n: Storage(n, Role.INTERMEDIATE, 512, (n,), escapes=n == "c") for n in ops}
        >>> graph = OpGraph(ops, (), storages, (), "cuda:0")
        >>> launches = (Launch("a", 0), Launch("b", 1, ("a",)), Launch("c", 0, ("b",)))
        >>> [launch.releases for launch in place_releases(graph, Schedule("mine", 2, launches)).launches]
        [(), (), ('a',)]
    """
    launches, streams = schedule.launches, _launches_by_stream(schedule)
    position = {launch.op: at for at, launch in enumerate(launches)}
    releases: dict[int, list[str]] = defaultdict(list)
    for storage, allocating in _allocating_streams(graph, schedule).items():
        accesses = sorted([position[op] for op in graph.users[storage]])
        last = {launches[at].stream: at for at in accesses}  # it implies the earlier ones on the same stream
        launched_there = streams[allocating]
        safe = max([launched_there.first_after(stream, at, stream == allocating) for stream, at in last.items()])
        if safe < len(launched_there.positions):
            releases[launched_there.positions[safe]].append(storage)
    released = [Launch(one.op, one.stream, one.waits, tuple(releases.get(at, ()))) for at, one in enumerate(launches)]
    return replace(schedule, launches=tuple(released))


@dataclass(frozen=True, slots=True)
class _StreamLaunches:
    """The positions and the clocks of a stream's launches."""

    positions: list[int] = field(default_factory=list)
    clocks: list[Clock] = field(default_factory=list)

    def first_after(self, stream: int, position: int, same_stream: bool) -> int:
        """Index of the first launch after which the one at ``position`` on ``stream`` is over, or their number."""
        if same_stream:
            return bisect_left(self.positions, position)
        return bisect_left(self.clocks, position, key=itemgetter(stream))


def _launches_by_stream(schedule: Schedule) -> Sequence[_StreamLaunches]:
    streams = [_StreamLaunches() for _ in range(schedule.streams)]
    for position, (launch, clock) in enumerate(zip(schedule.launches, clocks(schedule), strict=True)):
        streams[launch.stream].positions.append(position)
        streams[launch.stream].clocks.append(clock)
    return streams


def _allocating_streams(graph: OpGraph, schedule: Schedule) -> Mapping[str, int]:
    """The storages that may be released, and the stream that allocates each, in the order of ``graph.storages``.

    Those in the arena may not: the arena is allocated and freed as a whole.
    """
    allocator = {storage: op.name for op in graph.ops.values() for storage in op.allocates}
    return {
        name: schedule.stream_of[allocator[name]]
        for name, storage in graph.storages.items()
        if storage.role is Role.INTERMEDIATE
        and not storage.escapes
        and name not in schedule.arena.offsets
        and name in allocator
    }


def wait_for_memory(
    graph: OpGraph, schedule: Schedule, timeline: Timeline, edge_us: float, least_bytes: int, slack: float = 0.0
) -> Schedule:
    """Add waits for other streams that, as simulated, have finished using memory long before.

        stream 0:  a ── b ─────────── e ── f           e allocates; c ended long before e starts,
        stream 1:       c ── d ──────                  so if e waits for c, it can reuse c's memory

    A wait is also added where this holds once each launch starts later by a share of its slack.
    Takes O(V·(K² + K·log V)) steps for V ops on K streams.

    Args:
        graph: the ops with their accesses, and the storages.
        schedule: the launches with their waits.
        timeline: when each of them starts and ends.
        edge_us: what an edge between streams takes, µs: what ended that long ago is waited for.
        least_bytes: a wait is added only if at least so much became free on that stream since it was last waited for;
            above 0.
        slack: the share of its slack by which each launch may start later, 0 to 1. The later, the more memory is free,
            and the more likely the run takes longer where the simulation is wrong.

    Returns:
        The schedule with waits added, launched in the order of these later starts, without waits that others imply, but
        with those for ``FORK``. Storages are not yet placed or released.

    Example:
        >>> from autostream.ir import Op, Role, Slice, Storage
        >>> reads = {"a": "x", "c": "a", "d": "c", "b": "a", "e": "b"}
        >>> ops = {n: Op(n, "f", (n,), frozenset({r}), frozenset({n}), frozenset({n})) for n, r in reads.items()}
        >>> graph = OpGraph(ops, (), {n: Storage(n, Role.INTERMEDIATE, 512, (n,)) for n in ops}, (), "cuda:0")
        >>> launches = tuple(Launch(n, int(n in "cd"), ("a",) if n == "c" else ()) for n in "acdbe")
        >>> times = {"a": (0, 1), "b": (1, 9), "c": (2, 3), "d": (3, 4), "e": (9, 10)}
        >>> timeline = Timeline(tuple(Slice(n, int(n in "cd"), *map(float, t)) for n, t in times.items()))
        >>> found = wait_for_memory(graph, Schedule("mine", 2, launches), timeline, edge_us=1.0, least_bytes=512)
        >>> {launch.op: launch.waits for launch in found.launches if launch.waits}
        {'c': ('a',), 'e': ('d',)}
    """
    later = delayed(schedule, timeline, edge_us, slack)
    start, end = later.starts, later.ends
    freed = Footprint(graph).freed_bytes(later)
    launched = [_Launched() for _ in range(schedule.streams)]
    clock_of = {FORK: [NEVER] * schedule.streams}
    latest = [[NEVER] * schedule.streams for _ in range(schedule.streams)]
    stream_of = schedule.stream_of
    launches: list[Launch] = []

    def is_over(op: str, clock: Sequence[int]) -> bool:
        """Whether an op is over at this clock."""
        return clock[stream_of[op]] >= clock_of[op][stream_of[op]]

    def needed(waits: Iterable[str], clock: Sequence[int]) -> tuple[str, ...]:
        """The waits for ops that are not over at this clock, without those that another of them implies."""
        running = [op for op in waits if not is_over(op, clock)]
        return tuple(op for op in running if not any(is_over(op, clock_of[other]) for other in running if other != op))

    for launch in sorted(schedule.launches, key=lambda launch: start[launch.op]):
        clock = [max(at) for at in zip(latest[launch.stream], *(clock_of[op] for op in launch.waits), strict=True)]
        added: dict[int, str] = {}
        for stream, other in enumerate(launched):
            if stream == launch.stream:
                continue
            index = other.last_ended_by(start[launch.op] - edge_us)
            if index >= 0 and other.freed_between(clock[stream], index) >= least_bytes:
                added[stream] = other.ops[index]
                clock = [max(at) for at in zip(clock, clock_of[other.ops[index]], strict=True)]
        wanted = dict.fromkeys([*(op for op in launch.waits if op != FORK), *added.values()])
        fork = [FORK] if FORK in launch.waits else []
        launches.append(replace(launch, waits=(*fork, *needed(wanted, latest[launch.stream]))))
        here = launched[launch.stream]
        clock[launch.stream] = len(here.ops)
        here.append(launch.op, end[launch.op], freed[launch.op])
        latest[launch.stream] = clock_of[launch.op] = clock
    return replace(schedule, launches=tuple(launches), join_waits=needed(schedule.join_waits, latest[0]))


class _Launched:
    """The ops launched on one stream so far; an index counts the launches of this stream alone."""

    def __init__(self) -> None:
        self.ops: list[str] = []
        self._ends: list[float] = []
        self._freed = [0]

    def append(self, op: str, end_us: float, freed: int) -> None:
        self.ops.append(op)
        self._ends.append(end_us)
        self._freed.append(self._freed[-1] + freed)

    def last_ended_by(self, moment_us: float) -> int:
        """The index of the last op that has ended by then, or -1; so all before it have ended."""
        return bisect_right(self._ends, moment_us) - 1

    def freed_between(self, first: int, last: int) -> int:
        """Bytes that became free after the op at index ``first``, up to the end of the one at ``last``."""
        return self._freed[last + 1] - self._freed[first + 1] if last > first else 0
