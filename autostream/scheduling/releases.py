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
from autostream.scheduling.lifetimes import NEVER, Clock, seen_before
from autostream.scheduling.peak import Footprint
from autostream.scheduling.postpone import delayed


def place_releases(graph: OpGraph, schedule: Schedule) -> Schedule:
    """Release every intermediate storage with a block of its own that does not escape, as early as is safe.

    That launch is always one of the allocating stream: the last access there, or the first op that comes after all
    accesses elsewhere, found by bisection, since what a stream has seen only grows. Storages for which there is none
    are kept until the end of the run. Takes O(V K + A log V) steps for V ops on K streams with A accesses.

    Args:
        graph: the ops with their accesses, and the storages.
        schedule: the launches with their waits; releases that it has are replaced.

    Returns:
        The schedule with ``releases``, each in the order of ``graph.storages``.

    Example:
        ``b`` reads ``a`` on another stream; ``c`` waits for ``b``, so behind ``c`` both are free of readers, but ``b``
        was allocated on stream 1, which never hears of ``c``.

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
    launches, streams = schedule.launches, _streams(schedule)
    position = {launch.op: at for at, launch in enumerate(launches)}
    releases: dict[int, list[str]] = defaultdict(list)
    for storage, home in _homes(graph, schedule).items():
        accesses = sorted([position[op] for op in graph.users[storage]])
        last = {launches[at].stream: at for at in accesses}  # it implies the earlier ones there
        safe = max([streams[home].first_to_see(stream, at, stream == home) for stream, at in last.items()])
        if safe < len(streams[home].launches):
            releases[streams[home].launches[safe]].append(storage)
    released = [Launch(one.op, one.stream, one.waits, tuple(releases.get(at, ()))) for at, one in enumerate(launches)]
    return replace(schedule, launches=tuple(released))


@dataclass(frozen=True, slots=True)
class _Seen:
    """The positions of a stream's launches, and the last launches on each stream that each of them comes after."""

    launches: list[int] = field(default_factory=list)
    seen: list[Clock] = field(default_factory=list)

    def first_to_see(self, stream: int, position: int, own: bool) -> int:
        """Index of the first launch behind which the one at ``position`` on ``stream`` is over, or their number."""
        if own:
            return bisect_left(self.launches, position)
        return bisect_left(self.seen, position, key=itemgetter(stream))


def _streams(schedule: Schedule) -> Sequence[_Seen]:
    streams = [_Seen() for _ in range(schedule.streams)]
    for position, (launch, seen) in enumerate(zip(schedule.launches, seen_before(schedule), strict=True)):
        streams[launch.stream].launches.append(position)
        streams[launch.stream].seen.append(seen)
    return streams


def _homes(graph: OpGraph, schedule: Schedule) -> Mapping[str, int]:
    """The storages that may be released, and the stream that allocates each, in the order of ``graph.storages``.

    Those in the arena are not: it is taken and given back as a whole.
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
    """Let streams wait for others that are done with memory already, by a simulation.

    Takes O(V·(K² + K·log V)) steps for V ops on K streams.

    Args:
        graph: the ops with their accesses, and the storages.
        schedule: the launches with their waits.
        timeline: when each of them starts and ends.
        edge_us: what an edge between streams takes, µs: what ended that long ago is waited for.
        least_bytes: what must have become free on a stream since it was last waited for, to make a wait worth it; above
            0.
        slack: the share of its slack by which each launch may start later, 0 to 1: the later, the more memory is free,
            and the sooner the run is held up where the simulation is wrong.

    Returns:
        The schedule with waits added, launched in the order of these later starts; waits of launches that follow from
        others are gone, but for the fork's. Memory is still to be placed and released.

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
    freed = Footprint(graph).freed(later)
    done = [_Launched() for _ in range(schedule.streams)]
    clock_of = {FORK: [NEVER] * schedule.streams}
    clocks = [[NEVER] * schedule.streams for _ in range(schedule.streams)]
    stream_of = schedule.stream_of
    launches: list[Launch] = []

    def follows(op: str, clock: Sequence[int]) -> bool:
        """Whether whoever has seen this much has seen the end of the op."""
        return clock[stream_of[op]] >= clock_of[op][stream_of[op]]

    def needed(waits: Iterable[str], known: Sequence[int]) -> tuple[str, ...]:
        """The waits that do not follow from what is known, or from another wait."""
        unknown = [op for op in waits if not follows(op, known)]
        return tuple(op for op in unknown if not any(follows(op, clock_of[other]) for other in unknown if other != op))

    for launch in sorted(schedule.launches, key=lambda launch: start[launch.op]):
        clock = [max(seen) for seen in zip(clocks[launch.stream], *(clock_of[op] for op in launch.waits), strict=True)]
        added: dict[int, str] = {}
        for stream, other in enumerate(done):
            if stream == launch.stream:
                continue
            at = other.over_by(start[launch.op] - edge_us)
            if at >= 0 and other.freed_between(clock[stream], at) >= least_bytes:
                added[stream] = other.ops[at]
                clock = [max(seen) for seen in zip(clock, clock_of[other.ops[at]], strict=True)]
        wanted = dict.fromkeys([*(op for op in launch.waits if op != FORK), *added.values()])
        fork = [FORK] if FORK in launch.waits else []
        launches.append(replace(launch, waits=(*fork, *needed(wanted, clocks[launch.stream]))))
        own = done[launch.stream]
        clock[launch.stream] = len(own.ops)
        own.launched(launch.op, end[launch.op], freed[launch.op])
        clocks[launch.stream] = clock_of[launch.op] = clock
    return replace(schedule, launches=tuple(launches), join_waits=needed(schedule.join_waits, clocks[0]))


class _Launched:
    """What was launched on a stream so far; places count its own launches."""

    def __init__(self) -> None:
        self.ops: list[str] = []
        self._ends: list[float] = []
        self._freed = [0]

    def launched(self, op: str, end_us: float, freed: int) -> None:
        self.ops.append(op)
        self._ends.append(end_us)
        self._freed.append(self._freed[-1] + freed)

    def over_by(self, moment_us: float) -> int:
        """The place of the last op that has ended by then, or -1; streams keep their order, so those before have."""
        return bisect_right(self._ends, moment_us) - 1

    def freed_between(self, known: int, at: int) -> int:
        """Bytes that became free behind the op at place ``known``, up to the one at ``at``."""
        return self._freed[at + 1] - self._freed[known + 1] if at > known else 0
