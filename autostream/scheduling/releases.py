"""Releases: how early each storage can go back to the caching allocator.

The allocator hands a freed block to any later launch on the stream that allocated it, in the order of the host, and
knows nothing of other streams. So a storage may go once all its accesses are over *as seen from the end of that
stream*: an access on it counts when it is launched, an access elsewhere when the stream has waited for it, directly or
through others.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter

from autostream.ir import Launch, OpGraph, Role, Schedule
from autostream.scheduling.clocks import Clock, seen_before


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
class _Stream:
    """The positions of a stream's launches, and the last launches on each stream that each of them comes after."""

    launches: list[int] = field(default_factory=list)
    seen: list[Clock] = field(default_factory=list)

    def first_to_see(self, stream: int, position: int, own: bool) -> int:
        """Index of the first launch behind which the one at ``position`` on ``stream`` is over, or their number."""
        if own:
            return bisect_left(self.launches, position)
        return bisect_left(self.seen, position, key=itemgetter(stream))


def _streams(schedule: Schedule) -> Sequence[_Stream]:
    streams = [_Stream() for _ in range(schedule.streams)]
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
