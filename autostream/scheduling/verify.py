"""The proof that a schedule is right, from the schedule and the ops' own accesses alone.

Nothing here trusts what made the schedule: hazards are derived anew from what each op reads, writes and orders, not
from ``graph.dependencies``, and happens-before is computed as plain sets of all that came before, not as the clocks of
:mod:`~autostream.scheduling.synchronize` and :mod:`~autostream.scheduling.releases`. A clock says what is over by the
latest op of each stream, which is right as long as streams keep their order; a set names every op and takes nothing for
granted. No code is shared with either, nor with what places storages in the arena.

The schedule is walked through as the host issues it. After every launch it is known what will have happened at the end
of each stream as it is by then, and all that is to be proven of that launch is looked up there, so the past of an op is
kept only while a later one is still to wait for it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from autostream.errors import ScheduleError
from autostream.ir import FORK, JOIN, Dependency, Hazard, Launch, OpGraph, Role, Schedule

ALIGNMENT = 512
"""Storages in the arena start at multiples of so many bytes, as blocks of PyTorch's CUDA caching allocator do: Triton
compiles kernels for aligned addresses, and cuBLAS chooses among its own by them."""


def verify(graph: OpGraph, *schedules: Schedule, pinned: frozenset[str] = frozenset()) -> None:
    """Raise unless each of these schedules must compute what the ops compute one by one in program order.

    It proves of each that

    1. every op of the graph is launched once, nothing else is, streams exist, and pinned ops are on stream 0;
    2. every wait names ``FORK`` or an op launched earlier, on another stream;
    3. every storage in the arena is an intermediate one whose place is free to choose and that does not escape, lies
       within it, and starts at a multiple of ``ALIGNMENT``;

    and then, launch by launch, that

    4. every launch happens-after ``FORK`` and happens-before ``JOIN``;
    5. any two accesses of a storage, or of one part of it, of which one writes, and any two uses of an ordered
       resource, happen in program order;
    6. every release is of an intermediate storage that does not escape and has a block of its own, once, and at a
       moment when the end of the stream that allocated it comes after all of its accesses;
    7. of any two storages that have a byte of the arena in common, all accesses of the one happen before all accesses
       of the other.

    Takes O((A + V·(1 + W))·V/30) digit operations for V ops, W waits per op and A accesses, where the accesses of a
    storage in the arena count once more for each storage that has some of its bytes right after it. Takes V/8 bytes
    for the end of each stream, for each op that is still to be waited for and for each storage in the arena that is in
    use: 12 kB apiece for 100,000 ops.

    Args:
        graph: the ops in program order, and the storages; its dependencies are not looked at.
        schedules: the launches, waits, releases and places to check.
        pinned: ops that must be on stream 0.

    Raises:
        ScheduleError: one of these does not hold; the message names the ops, their lines, storages and bytes, and what
            is missing.

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
    accesses = _accesses(graph)
    hazards, allocators = _hazards_by_op(graph), _allocators(graph)
    for schedule in schedules:
        _check_launches(graph, schedule, pinned)
        _check_waits(graph, schedule)
        _check_places(graph, schedule)
        memory, tenants = _Memory(allocators, accesses), _tenants(graph, schedule, accesses)
        for moment in _moments(schedule):
            _check_fork_and_join(graph, schedule, moment)
            _check_hazards(graph, schedule, moment, hazards)
            _check_releases(graph, schedule, moment, memory)
            _check_tenants(graph, schedule, moment, tenants)


@dataclass(frozen=True, slots=True)
class _Moment:
    """The moment behind a launch, as the host issues them.

    Attributes:
        point: what was launched last, or ``FORK`` or ``JOIN``.
        position: point to place in launch order; ``FORK`` is at 0, the launches follow, ``JOIN`` is last.
        past: stream to all that has happened when the stream is done with what it was given so far: bit i is the point
            at position i.
    """

    point: Launch
    position: Mapping[str, int]
    past: Mapping[int, int]

    def sees(self, point: str, stream: int) -> bool:
        """Whether a point is over when a stream is done with what it was given so far."""
        return bool(self.past[stream] >> self.position[point] & 1)


def _points(schedule: Schedule) -> tuple[Launch, ...]:
    """The launches with fork and join, which behave as launches on stream 0."""
    return (Launch(FORK, 0), *schedule.launches, Launch(JOIN, 0, schedule.join_waits))


def _moments(schedule: Schedule) -> Iterator[_Moment]:
    """What the device guarantees, which is stream order and waits, closed transitively, launch by launch."""
    points = _points(schedule)
    position = {point.op: at for at, point in enumerate(points)}
    waiting = Counter(producer for point in points for producer in point.waits)
    awaited: dict[str, int] = {}
    past: dict[int, int] = defaultdict(int)
    for at, point in enumerate(points):
        seen = past[point.stream] | 1 << at
        for producer in point.waits:
            seen |= awaited[producer]
            waiting[producer] -= 1
            if not waiting[producer]:
                del awaited[producer]
        if waiting[point.op]:
            awaited[point.op] = seen
        past[point.stream] = seen
        yield _Moment(point, position, past)


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


def _check_fork_and_join(graph: OpGraph, schedule: Schedule, moment: _Moment) -> None:
    """A launch happens after what the caller did before, and before what the caller does next."""
    here = moment.point
    if not moment.past[here.stream] & 1:  # the point at 0
        raise ScheduleError(_unordered(graph, FORK, here.op, f"what stream {here.stream} does there is not forked off"))
    for launch in schedule.launches if here.op == JOIN else ():
        if not moment.sees(launch.op, here.stream):
            reason = f"what stream {launch.stream} does there is not joined"
            raise ScheduleError(_unordered(graph, launch.op, JOIN, reason))


def _unordered(graph: OpGraph, before: str, after: str, reason: str) -> str:
    return f"no wait orders {_at(graph, before)} before {_at(graph, after)}: {reason}"


def _check_hazards(
    graph: OpGraph, schedule: Schedule, moment: _Moment, hazards: Mapping[str, Iterable[Dependency]]
) -> None:
    """A launch happens after the accesses that it conflicts with and that come before it in program order."""
    for hazard in hazards.get(moment.point.op, ()):
        if not moment.sees(hazard.before, moment.point.stream):
            kind = "resource" if hazard.hazard is Hazard.ORDER else "storage"
            raise ScheduleError(
                f"{_at(graph, hazard.after)} must come after {_at(graph, hazard.before)} "
                f"({hazard.hazard.value} of {kind} {hazard.resource!r}), "
                f"but {_missing(schedule, moment, hazard.before, hazard.after)}"
            )


def _missing(schedule: Schedule, moment: _Moment, before: str, after: str) -> str:
    """Why the one does not happen before the other."""
    if moment.position[after] < moment.position[before]:
        return f"{after!r} is launched before {before!r}"
    stream = schedule.stream_of
    return f"no wait orders {before!r} on stream {stream[before]} before {after!r} on stream {stream[after]}"


def _hazards_by_op(graph: OpGraph) -> Mapping[str, Sequence[Dependency]]:
    """The conflicts of each op with earlier ones."""
    hazards: dict[str, list[Dependency]] = defaultdict(list)
    for hazard in _hazards(graph):
        hazards[hazard.after].append(hazard)
    return hazards


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


@dataclass(frozen=True, slots=True)
class _Memory:
    """The ops that allocate each storage, those that touch it, and those behind which it was released so far."""

    allocators: Mapping[str, Sequence[str]]
    accesses: Mapping[str, Sequence[str]]
    released: dict[str, str] = field(default_factory=dict)


def _check_releases(graph: OpGraph, schedule: Schedule, moment: _Moment, memory: _Memory) -> None:
    """Whoever is handed a released block, on the stream that allocated it, finds all of its accesses over."""
    here = moment.point.op
    for storage in moment.point.releases:
        allocators = memory.allocators.get(storage, ())
        reason = _unreleasable(graph, schedule, storage, allocators, memory.released)
        if reason := reason or _in_use(graph, schedule, moment, memory.accesses[storage], allocators[0]):
            raise ScheduleError(f"storage {storage!r} is released behind {_at(graph, here)}, but {reason}")
        memory.released[storage] = here


def _in_use(graph: OpGraph, schedule: Schedule, moment: _Moment, accesses: Iterable[str], allocator: str) -> str:
    """Which access of a storage is not over for what comes next on the stream that allocated it, or ``""``."""
    home, here = schedule.stream_of[allocator], moment.position[moment.point.op]
    for op in accesses:
        if moment.position[op] > here:
            return f"{_at(graph, op)} uses it and is launched later"
        if not moment.sees(op, home):
            return (
                f"no wait orders {_at(graph, op)}, which uses it on stream {schedule.stream_of[op]}, "
                f"before what comes next on stream {home}, which allocated it"
            )
    return ""


def _unreleasable(
    graph: OpGraph, schedule: Schedule, storage: str, allocators: Collection[str], released: Mapping[str, str]
) -> str:
    """Why the schedule may not release the storage, or not once more, or ``""``."""
    if reason := _not_owned(graph, storage):
        return reason
    if storage in schedule.arena.offsets:
        return "it lies in the arena and has no block of its own"
    if len(allocators) != 1:
        return f"{len(allocators)} ops allocate it, so no stream is known to own it"
    if storage in released:
        return f"it was already released behind {_at(graph, released[storage])}"
    return ""


def _not_owned(graph: OpGraph, storage: str) -> str:
    """Why no schedule may say where or how long the storage lives, or ``""``."""
    if storage not in graph.storages:
        return "the graph has no storage of that name"
    if graph.storages[storage].role is not Role.INTERMEDIATE:
        return f"it is the caller's: {graph.storages[storage].role.value}"
    if graph.storages[storage].escapes:
        return "an output keeps it alive"
    return ""


def _check_places(graph: OpGraph, schedule: Schedule) -> None:
    """Whatever lies in the arena may lie there, within it, as kernels expect memory to be aligned."""
    for storage, offset in schedule.arena.offsets.items():
        if reason := _unplaceable(graph, storage, offset, schedule.arena.bytes):
            raise ScheduleError(f"storage {storage!r} is placed at byte {offset} of the arena, but {reason}")


def _unplaceable(graph: OpGraph, storage: str, offset: int, size: int) -> str:
    """Why no schedule may place the storage there, or ``""``."""
    if reason := _not_owned(graph, storage):
        return reason
    if not graph.storages[storage].placeable:
        return "what takes its memory does more than that, so its place is not free to choose"
    if offset % ALIGNMENT:
        return f"kernels expect a multiple of {ALIGNMENT}"
    if offset < 0 or offset + graph.storages[storage].bytes > size:
        return f"its {graph.storages[storage].bytes} bytes are not all within the {size} that there are"
    return ""


@dataclass(frozen=True, slots=True)
class _Tenants:
    """The storages that have bytes of the arena, one after the other.

    Attributes:
        accesses: the ops that touch each of them.
        touched: op to those that it touches.
        last: each to the op that touches it last in launch order.
        previous: each to those that had some of its bytes right before it.
        awaited: each that is in use to the accesses that its own must come after: bit i is the point at position i.
    """

    accesses: Mapping[str, Collection[str]]
    touched: Mapping[str, Sequence[str]]
    last: Mapping[str, str]
    previous: Mapping[str, Sequence[str]]
    awaited: dict[str, int] = field(default_factory=dict)


def _tenants(graph: OpGraph, schedule: Schedule, accesses: Mapping[str, Sequence[str]]) -> _Tenants:
    """Who follows whom on each byte of the arena, by their first accesses in launch order."""
    placed = {name: frozenset(accesses[name]) for name in schedule.arena.offsets if graph.storages[name].bytes}
    touched: dict[str, list[str]] = defaultdict(list)
    for storage, ops in placed.items():
        for op in ops:
            touched[op].append(storage)
    arena, previous, last = _Bytes(), dict[str, Sequence[str]](), dict[str, str]()
    for launch in schedule.launches:
        for storage in touched.get(launch.op, ()):
            last[storage] = launch.op
            if storage not in previous:
                first, end = _place(graph, schedule, storage)
                previous[storage] = arena.take(first, end, storage)
    return _Tenants(placed, touched, last, previous)


def _place(graph: OpGraph, schedule: Schedule, storage: str) -> tuple[int, int]:
    """The first byte of a storage in the arena, and the first behind it."""
    first = schedule.arena.offsets[storage]
    return first, first + graph.storages[storage].bytes


class _Bytes:
    """Who had each byte of the arena last, so far: one entry for each run of bytes with the same owner."""

    def __init__(self) -> None:
        self._starts = [0]
        self._owners = [""]

    def take(self, first: int, end: int, owner: str) -> Sequence[str]:
        """Give bytes ``first`` to ``end - 1`` to a storage. Returns those that had any of them."""
        low, high = self._cut(first), self._cut(end)
        had = dict.fromkeys(self._owners[low:high])
        self._starts[low:high], self._owners[low:high] = [first], [owner]
        return [storage for storage in had if storage]

    def _cut(self, at: int) -> int:
        """The run that starts at this byte, made if there is none."""
        run = bisect_left(self._starts, at)
        if run == len(self._starts) or self._starts[run] != at:
            self._starts.insert(run, at)
            self._owners.insert(run, self._owners[run - 1])
        return run


def _check_tenants(graph: OpGraph, schedule: Schedule, moment: _Moment, tenants: _Tenants) -> None:
    """A launch that touches a storage in the arena happens after all that was done with its bytes before."""
    # Neighbours are enough. Let two storages have a byte in common, and look at all that have this byte, by their first
    # accesses in launch order. Each is compared with the one before it, all accesses with all, those to come included;
    # each has an access; and happens-before is transitive. So every access of the earlier of the two happens before
    # every access of the later. And nothing right is refused: two that are compared have bytes in common, and waits are
    # for earlier launches only, so of two accesses the one launched first is the only one that can happen first.
    here, position = moment.point, moment.position
    if here.op not in tenants.touched:
        return
    before = moment.past[here.stream] & ~(1 << position[here.op])
    for storage in tenants.touched[here.op]:
        if storage not in tenants.awaited:
            ends = {op for other in tenants.previous[storage] for op in tenants.accesses[other]}
            tenants.awaited[storage] = _bits(position[op] for op in ends)
        if missing := tenants.awaited[storage] & ~before:
            raise ScheduleError(_overlapping(graph, schedule, moment, tenants, storage, missing))
        if tenants.last[storage] == here.op:
            del tenants.awaited[storage]


def _bits(positions: Iterable[int]) -> int:
    bits = 0
    for position in positions:
        bits |= 1 << position
    return bits


def _overlapping(
    graph: OpGraph, schedule: Schedule, moment: _Moment, tenants: _Tenants, storage: str, missing: int
) -> str:
    """What is wrong with an access of a storage, given those that it should come after and does not."""
    here, first_missing = moment.point.op, (missing & -missing).bit_length() - 1
    op = next(op for op, position in moment.position.items() if position == first_missing)
    other = next(other for other in tenants.previous[storage] if op in tenants.accesses[other])
    (first, end), (other_first, other_end) = _place(graph, schedule, storage), _place(graph, schedule, other)
    shared = f"bytes {max(first, other_first)} to {min(end, other_end) - 1} of the arena"
    if op == here:
        return f"storages {other!r} and {storage!r} share {shared}, but {_at(graph, here)} uses both"
    return (
        f"{_at(graph, here)} must come after {_at(graph, op)} (storage {storage!r} has {shared} after {other!r}), "
        f"but {_missing(schedule, moment, op, here)}"
    )


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
