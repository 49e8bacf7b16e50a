"""Releases: how early each storage can go back to the caching allocator.

The allocator hands a freed block to any later launch on the stream that allocated it, in the order of the host, and
knows nothing of other streams. So a storage may go once all its accesses are over *as seen from the end of that
stream*: an access on it counts when it is launched, an access elsewhere when the stream has waited for it, directly or
through others.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from autostream.ir import OpGraph, Role, Schedule
from autostream.scheduling.clocks import Clock, at_the_end, seen_before


@dataclass(frozen=True, slots=True)
class _Moment:
    """The end of a stream behind the launch at ``position``, and the last launch on each stream that it has seen."""

    position: int
    clock: Clock


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
    accesses = _accesses(graph)
    position = {launch.op: index for index, launch in enumerate(schedule.launches)}
    moments = _moments(schedule)
    releases: dict[int, list[str]] = defaultdict(list)
    for storage, home in _homes(graph, schedule).items():
        last = _last_access_by_stream((position[op] for op in accesses[storage]), schedule)
        safe = max(_first_to_see(moments[home], stream, at) for stream, at in last.items())
        if safe < len(moments[home]):
            releases[moments[home][safe].position].append(storage)
    launches = (replace(launch, releases=tuple(releases[i])) for i, launch in enumerate(schedule.launches))
    return replace(schedule, launches=tuple(launches))


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


def _accesses(graph: OpGraph) -> Mapping[str, Sequence[str]]:
    """The ops that read, write or allocate each storage, or a part of it."""
    whole = {part: storage.name for storage in graph.storages.values() for part in storage.parts}
    accesses: dict[str, list[str]] = defaultdict(list)
    for op in graph.ops.values():
        for storage in {whole.get(name, name) for name in op.reads | op.writes | op.allocates}:
            accesses[storage].append(op.name)
    return accesses


def _moments(schedule: Schedule) -> Mapping[int, Sequence[_Moment]]:
    """The ends of each stream, launch by launch."""
    moments: dict[int, list[_Moment]] = defaultdict(list)
    for position, (launch, seen) in enumerate(zip(schedule.launches, seen_before(schedule), strict=True)):
        moments[launch.stream].append(_Moment(position, at_the_end(seen, launch.stream, position)))
    return moments


def _last_access_by_stream(positions: Iterable[int], schedule: Schedule) -> Mapping[int, int]:
    """Stream to the position of the last access there; it implies the earlier ones."""
    return {schedule.launches[position].stream: position for position in sorted(positions)}


def _first_to_see(moments: Sequence[_Moment], stream: int, position: int) -> int:
    """Index of the first moment that comes after the launch at ``position`` on ``stream``, or their number."""
    return bisect_left(moments, position, key=lambda moment: moment.clock[stream])
