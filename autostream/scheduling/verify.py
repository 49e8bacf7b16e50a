"""The proof that a schedule is right, from the schedule and the ops' own accesses alone.

Nothing here trusts what made the schedule: hazards are derived anew from what each op reads, writes and orders, not
from ``graph.dependencies``, and happens-before is computed as plain sets of all that came before, not as the clocks of
:mod:`~autostream.scheduling.synchronize` and :mod:`~autostream.scheduling.releases`. No code is shared with either.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from autostream.errors import ScheduleError
from autostream.ir import FORK, JOIN, Dependency, Hazard, Launch, OpGraph, Role, Schedule


def verify(graph: OpGraph, schedule: Schedule, *, pinned: frozenset[str] = frozenset()) -> None:
    """Raise unless the schedule must compute what the ops compute one by one in program order.

    It proves, in this order, that

    1. every op of the graph is launched once, nothing else is, streams exist, and pinned ops are on stream 0;
    2. every wait names ``FORK`` or an op launched earlier, on another stream;
    3. every launch happens-after ``FORK`` and happens-before ``JOIN``;
    4. any two accesses of a storage, or of one part of it, of which one writes, and any two uses of an ordered
       resource, happen in program order;
    5. every release is of an intermediate storage that does not escape, once, and at a moment when the end of the
       stream that allocated it comes after all of its accesses.

    Takes O(A + V (W + V / 64)) steps for V ops, W waits per op and A accesses, and V² / 16 bytes: 6 MB for 10,000 ops.

    Args:
        graph: the ops in program order, and the storages; its dependencies are not looked at.
        schedule: the launches, waits and releases to check.
        pinned: ops that must be on stream 0.

    Raises:
        ScheduleError: one of these does not hold; the message names the ops, their lines, and what is missing.

    Example:
        >>> from autostream.ir import Op
        >>> none = frozenset()
        >>> a = Op("a", "aten.relu.default", ("a",), reads=none, writes=frozenset({"a"}))
        >>> b = Op("b", "aten.relu.default", ("b",), reads=frozenset({"a"}), writes=none)
        >>> graph = OpGraph({"a": a, "b": b}, (), {}, (), "cuda:0")
        >>> verify(graph, Schedule("mine", 2, (Launch("a", 0), Launch("b", 1, ("a",))), ("b",)))
        >>> verify(graph, Schedule("mine", 2, (Launch("a", 0), Launch("b", 1, (FORK,))), ("b",)))
        Traceback (most recent call last):
        autostream.errors.ScheduleError: 'b' must come after 'a' (read after write of storage 'a'), but no wait \
orders 'a' on stream 0 before 'b' on stream 1
    """
    _check_launches(graph, schedule, pinned)
    _check_waits(graph, schedule)
    order = _happens_before(schedule)
    _check_fork_and_join(graph, schedule, order)
    _check_hazards(graph, schedule, order)
    _check_releases(graph, schedule, order)


@dataclass(frozen=True, slots=True)
class _Order:
    """Happens-before: bit i of ``history[p]`` says whether the point at position i has happened when p has, p included.

    ``FORK`` is at position 0, the launches follow, ``JOIN`` is last. V²/2 bits for V points.
    """

    position: Mapping[str, int]
    history: Mapping[str, int]

    def holds(self, before: str, after: str) -> bool:
        return self.includes(self.history[after], before)

    def includes(self, history: int, point: str) -> bool:
        return bool(history >> self.position[point] & 1)


def _points(schedule: Schedule) -> tuple[Launch, ...]:
    """The launches with fork and join, which behave as launches on stream 0."""
    return (Launch(FORK, 0), *schedule.launches, Launch(JOIN, 0, schedule.join_waits))


def _happens_before(schedule: Schedule) -> _Order:
    """What the device guarantees: stream order and waits, closed transitively."""
    history: dict[str, int] = {}
    end: dict[int, int] = defaultdict(int)
    for position, point in enumerate(_points(schedule)):
        past = end[point.stream] | 1 << position
        for producer in point.waits:
            past |= history[producer]
        end[point.stream] = history[point.op] = past
    return _Order({op: position for position, op in enumerate(history)}, history)


def _check_launches(graph: OpGraph, schedule: Schedule, pinned: Collection[str]) -> None:
    """Every op is launched once, nothing else is, streams exist, and pinned ops are on stream 0."""
    launched: set[str] = set()
    for launch in schedule.launches:
        if launch.op not in graph.ops:
            raise ScheduleError(f"{launch.op!r} is launched but is no op of the graph")
        if launch.op in launched:
            raise ScheduleError(f"{_at(graph, launch.op)} is launched twice")
        if launch.stream not in range(schedule.streams):
            raise ScheduleError(
                f"{_at(graph, launch.op)} is on stream {launch.stream}, but streams go from 0 to {schedule.streams - 1}"
            )
        if launch.op in pinned and launch.stream != 0:
            raise ScheduleError(f"{_at(graph, launch.op)} is pinned to stream 0 but is on stream {launch.stream}")
        launched.add(launch.op)
    for op in graph.ops:
        if op not in launched:
            raise ScheduleError(f"{_at(graph, op)} is never launched")


def _check_waits(graph: OpGraph, schedule: Schedule) -> None:
    """Every wait is for an event that has been recorded by then, on another stream."""
    stream: dict[str, int] = {}
    for point in _points(schedule):
        for producer in point.waits:
            if producer not in stream:
                raise ScheduleError(
                    f"{_at(graph, point.op)} waits for {_at(graph, producer)}, which is not launched before it; "
                    "a wait for an event that is not yet recorded waits for nothing"
                )
            if stream[producer] == point.stream:
                raise ScheduleError(
                    f"{_at(graph, point.op)} waits for {_at(graph, producer)}, but both are on stream {point.stream}, "
                    "whose order is enough"
                )
        stream[point.op] = point.stream


def _check_fork_and_join(graph: OpGraph, schedule: Schedule, order: _Order) -> None:
    """Every launch happens after what the caller did before, and before what the caller does next."""
    for launch in schedule.launches:
        for before, after in ((FORK, launch.op), (launch.op, JOIN)):
            if not order.holds(before, after):
                raise ScheduleError(
                    f"no wait orders {_at(graph, before)} before {_at(graph, after)}: what stream {launch.stream} does "
                    f"there is not {'forked off' if before == FORK else 'joined'}"
                )


def _check_hazards(graph: OpGraph, schedule: Schedule, order: _Order) -> None:
    """Conflicting accesses happen in program order."""
    for hazard in _hazards(graph):
        before, after = hazard.before, hazard.after
        if order.holds(before, after):
            continue
        kind = "resource" if hazard.hazard is Hazard.ORDER else "storage"
        raise ScheduleError(
            f"{_at(graph, after)} must come after {_at(graph, before)} "
            f"({hazard.hazard.value} of {kind} {hazard.resource!r}), but {_missing(schedule, order, before, after)}"
        )


def _missing(schedule: Schedule, order: _Order, before: str, after: str) -> str:
    """Why the one does not happen before the other."""
    if order.position[after] < order.position[before]:
        return f"{after!r} is launched before {before!r}"
    stream = schedule.stream_of
    return f"no wait orders {before!r} on stream {stream[before]} before {after!r} on stream {stream[after]}"


def _hazards(graph: OpGraph) -> Iterator[Dependency]:
    """Conflicts between neighbouring accesses of each storage, part and resource, from the accesses in program order.

    Each read is paired with the write before it, each write with the write before it and the reads in between: as many
    pairs as accesses, at most twice.
    """
    # Neighbours are enough: happens-before is transitive and consecutive writes are paired. So a write is before all
    # later writes, hence before the write that a later read is paired with, hence before that read; and a read is
    # before the next write, hence before all later ones.
    writer: dict[str, str] = {}
    readers: dict[str, list[str]] = defaultdict(list)
    user: dict[str, str] = {}
    parts = {storage.name: storage.parts for storage in graph.storages.values() if storage.parts}
    for op in graph.ops.values():
        read, written = _in_parts(op.reads, parts), _in_parts(op.writes | op.allocates, parts)
        for storage in sorted(read):
            if storage in writer:
                yield Dependency(writer[storage], op.name, Hazard.RAW, storage)
        for storage in sorted(written):
            for reader in readers.pop(storage, ()):
                yield Dependency(reader, op.name, Hazard.WAR, storage)
            if storage in writer:
                yield Dependency(writer[storage], op.name, Hazard.WAW, storage)
            writer[storage] = op.name
        for storage in read - written:
            readers[storage].append(op.name)
        for resource in sorted(op.orders):
            if resource in user:
                yield Dependency(user[resource], op.name, Hazard.ORDER, resource)
            user[resource] = op.name


def _in_parts(names: frozenset[str], parts: Mapping[str, Iterable[str]]) -> frozenset[str]:
    """What an op names, with all parts in the place of a storage that has some."""
    divided = names & parts.keys()
    return (names - divided).union(*(parts[storage] for storage in divided)) if divided else names


def _check_releases(graph: OpGraph, schedule: Schedule, order: _Order) -> None:
    """Whoever is handed a released block, on the stream that allocated it, finds all of its accesses over."""
    accesses, allocators = _accesses(graph), _allocators(graph)
    end: dict[int, int] = defaultdict(int)
    released: dict[str, str] = {}
    for launch in schedule.launches:
        end[launch.stream] = order.history[launch.op]
        for storage in launch.releases:
            what = f"storage {storage!r} is released behind {_at(graph, launch.op)}, but"
            if reason := _unreleasable(graph, storage, allocators[storage], released):
                raise ScheduleError(f"{what} {reason}")
            home = schedule.stream_of[allocators[storage][0]]
            for op in accesses[storage]:
                if order.position[op] > order.position[launch.op]:
                    raise ScheduleError(f"{what} {_at(graph, op)} uses it and is launched later")
                if not order.includes(end[home], op):
                    raise ScheduleError(
                        f"{what} no wait orders {_at(graph, op)}, which uses it on stream {schedule.stream_of[op]}, "
                        f"before what comes next on stream {home}, which allocated it"
                    )
            released[storage] = launch.op


def _unreleasable(graph: OpGraph, storage: str, allocators: Collection[str], released: Mapping[str, str]) -> str:
    """Why no schedule may release the storage, or not once more, or ``""``."""
    if storage not in graph.storages:
        return "the graph has no storage of that name"
    if graph.storages[storage].role is not Role.INTERMEDIATE:
        return f"it is the caller's: {graph.storages[storage].role.value}"
    if graph.storages[storage].escapes:
        return "an output keeps it alive"
    if len(allocators) != 1:
        return f"{len(allocators)} ops allocate it, so no stream is known to own it"
    if storage in released:
        return f"it was already released behind {_at(graph, released[storage])}"
    return ""


def _accesses(graph: OpGraph) -> Mapping[str, list[str]]:
    """The ops that touch each storage, or a part of it."""
    accesses: dict[str, list[str]] = defaultdict(list)
    for op in graph.ops.values():
        for name in op.reads | op.writes | op.allocates:
            accesses[name].append(op.name)
    for storage in graph.storages.values():
        for part in storage.parts:
            accesses[storage.name] += accesses.pop(part, [])
    return accesses


def _allocators(graph: OpGraph) -> Mapping[str, list[str]]:
    """The ops that allocate each storage: one, if the graph is sound."""
    allocators: dict[str, list[str]] = defaultdict(list)
    for op in graph.ops.values():
        for storage in op.allocates:
            allocators[storage].append(op.name)
    return allocators


def _at(graph: OpGraph, point: str) -> str:
    """A point as messages name it, with the user's source line where it is known."""
    source = graph.ops[point].source if point in graph.ops else ""
    return f"{point!r} ({source})" if source else repr(point)
