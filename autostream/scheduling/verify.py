"""Verification: raise unless a schedule computes what its ops compute one by one in program order.

This module shares no code with those that make schedules, and does not rely on their results. It derives hazards from
what each op reads, writes and orders, not from ``graph.dependencies``. It represents happens-before as sets of ops, not
as the vector clocks of :mod:`~autostream.scheduling.lifetimes`: clocks assume that streams keep their order, sets
assume nothing.

Launches are checked in the order in which the host issues them. After each, the set of ops that precede the end of each
stream is known, and everything that must hold for that launch is checked against it. So the set of an op is stored only
while a later op is still to wait for it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from autostream.errors import ScheduleError
from autostream.ir import FORK, JOIN, Dependency, Hazard, Launch, OpGraph, Role, Schedule

ALIGNMENT = 512
"""Storages in the arena start at multiples of this, bytes, like blocks of PyTorch's CUDA caching allocator: Triton
compiles kernels for aligned addresses, and cuBLAS chooses its kernels by alignment."""


def verify(graph: OpGraph, *schedules: Schedule, pinned: frozenset[str] = frozenset()) -> None:
    """Raise unless each of these schedules must compute what the ops compute one by one in program order.

    It checks of each schedule that

    1. every op of the graph is launched once, nothing else is, streams exist, and pinned ops are on stream 0;
    2. every wait is for ``FORK`` or an op launched earlier, on another stream;
    3. every storage in the arena is intermediate, placeable and does not escape, lies within the arena, and starts at a
       multiple of ``ALIGNMENT``;

    and then, launch by launch, that

    4. every launch happens after ``FORK`` and before ``JOIN``;
    5. any two accesses of a storage, or of one part of it, of which one writes, and any two uses of an ordered
       resource, happen in program order;
    6. every release is of an intermediate storage that does not escape and has a block of its own, once, and when the
       end of the stream that allocated it comes after all of its accesses;
    7. of any two storages that have a byte of the arena in common, all accesses of the one happen before all accesses
       of the other.

    Takes O((A + V·(1 + W))·V/30) digit operations for V ops, W waits per op and A accesses, where the accesses of a
    storage in the arena count once more for each storage that uses some of its bytes next. Takes V/8 bytes for the end
    of each stream, for each op that is still to be waited for and for each storage in the arena that is in use: 12 kB
    each for 100,000 ops.

    Args:
        graph: the ops in program order, and the storages; its dependencies are ignored.
        schedules: the launches, waits, releases and offsets to check.
        pinned: ops that must be on stream 0.

    Raises:
        ScheduleError: one of these does not hold; the message names the ops with their source lines, the storages and
            bytes, and what is missing.

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
        _check_offsets(graph, schedule)
        releases, placed = _Releases(allocators, accesses), _placed_storages(graph, schedule, accesses)
        for state in _states(schedule):
            _check_fork_and_join(graph, schedule, state)
            _check_hazards(graph, schedule, state, hazards)
            _check_releases(graph, schedule, state, releases)
            _check_shared_bytes(graph, schedule, state, placed)


@dataclass(frozen=True, slots=True)
class _State:
    """What precedes the end of each stream, after the host has issued a launch.

    Attributes:
        point: the last launch, or ``FORK`` or ``JOIN``.
        position: of each point in launch order: ``FORK`` is at 0, ``JOIN`` is last.
        past: for each stream, the set of points that are over when the stream has run all its launches so far: bit i is
            the point at position i.
    """

    point: Launch
    position: Mapping[str, int]
    past: Mapping[int, int]

    def sees(self, point: str, stream: int) -> bool:
        """Whether a point is over when a stream has run all its launches so far."""
        return bool(self.past[stream] >> self.position[point] & 1)


def _points(schedule: Schedule) -> tuple[Launch, ...]:
    """The launches between ``FORK`` and ``JOIN``, which behave as launches on stream 0."""
    return (Launch(FORK, 0), *schedule.launches, Launch(JOIN, 0, schedule.join_waits))


def _states(schedule: Schedule) -> Iterator[_State]:
    """The state after each launch: the transitive closure of stream order and waits."""
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
        yield _State(point, position, past)


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
    """Every wait is for an event that is recorded earlier, on another stream."""
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


def _check_fork_and_join(graph: OpGraph, schedule: Schedule, state: _State) -> None:
    """A launch happens after the caller's earlier work, and before its later work."""
    here = state.point
    if not state.past[here.stream] & 1:  # the point at 0
        raise ScheduleError(_unordered(graph, FORK, here.op, f"what stream {here.stream} does there is not forked off"))
    for launch in schedule.launches if here.op == JOIN else ():
        if not state.sees(launch.op, here.stream):
            reason = f"what stream {launch.stream} does there is not joined"
            raise ScheduleError(_unordered(graph, launch.op, JOIN, reason))


def _unordered(graph: OpGraph, before: str, after: str, reason: str) -> str:
    return f"no wait orders {_at(graph, before)} before {_at(graph, after)}: {reason}"


def _check_hazards(
    graph: OpGraph, schedule: Schedule, state: _State, hazards: Mapping[str, Iterable[Dependency]]
) -> None:
    """A launch happens after the earlier accesses, in program order, that it conflicts with."""
    for hazard in hazards.get(state.point.op, ()):
        if not state.sees(hazard.before, state.point.stream):
            kind = "resource" if hazard.hazard is Hazard.ORDER else "storage"
            raise ScheduleError(
                f"{_at(graph, hazard.after)} must come after {_at(graph, hazard.before)} "
                f"({hazard.hazard.value} of {kind} {hazard.resource!r}), "
                f"but {_missing(schedule, state, hazard.before, hazard.after)}"
            )


def _missing(schedule: Schedule, state: _State, before: str, after: str) -> str:
    """Why one op does not happen before the other."""
    if state.position[after] < state.position[before]:
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
    """Conflicts between neighbouring accesses of each storage, part and resource, in program order.

    Each read is paired with the write before it, and each write with the write before it and the reads in between: at
    most twice as many pairs as accesses.
    """
    # Neighbours are enough, since happens-before is transitive and consecutive writes are paired. A write is before all
    # later writes, so before the write that a later read is paired with, so before that read. A read is before the next
    # write, so before all later ones.
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
    """These names, with each storage that has parts replaced by its parts."""
    divided = names & parts.keys()
    return (names - divided).union(*(parts[storage] for storage in divided)) if divided else names


@dataclass(frozen=True, slots=True)
class _Releases:
    """The ops that allocate and access each storage, and the op after which it was released."""

    allocators: Mapping[str, Sequence[str]]
    accesses: Mapping[str, Sequence[str]]
    released: dict[str, str] = field(default_factory=dict)


def _check_releases(graph: OpGraph, schedule: Schedule, state: _State, releases: _Releases) -> None:
    """All accesses of a released block are over for the next launch of the stream that allocated it."""
    here = state.point.op
    for storage in state.point.releases:
        allocators = releases.allocators.get(storage, ())
        reason = _release_fault(graph, schedule, storage, allocators, releases.released)
        if reason := reason or _in_use(graph, schedule, state, releases.accesses[storage], allocators[0]):
            raise ScheduleError(f"storage {storage!r} is released behind {_at(graph, here)}, but {reason}")
        releases.released[storage] = here


def _in_use(graph: OpGraph, schedule: Schedule, state: _State, accesses: Iterable[str], allocator: str) -> str:
    """Which access of a storage is not over for the next launch of the stream that allocated it, or ``""``."""
    stream, here = schedule.stream_of[allocator], state.position[state.point.op]
    for op in accesses:
        if state.position[op] > here:
            return f"{_at(graph, op)} uses it and is launched later"
        if not state.sees(op, stream):
            return (
                f"no wait orders {_at(graph, op)}, which uses it on stream {schedule.stream_of[op]}, "
                f"before what comes next on stream {stream}, which allocated it"
            )
    return ""


def _release_fault(
    graph: OpGraph, schedule: Schedule, storage: str, allocators: Collection[str], released: Mapping[str, str]
) -> str:
    """Why the schedule must not release the storage here, or ``""``."""
    if reason := _ownership_fault(graph, storage):
        return reason
    if storage in schedule.arena.offsets:
        return "it lies in the arena and has no block of its own"
    if len(allocators) != 1:
        return f"{len(allocators)} ops allocate it, so no stream is known to own it"
    if storage in released:
        return f"it was already released behind {_at(graph, released[storage])}"
    return ""


def _ownership_fault(graph: OpGraph, storage: str) -> str:
    """Why no schedule may place or release the storage, or ``""``."""
    if storage not in graph.storages:
        return "the graph has no storage of that name"
    if graph.storages[storage].role is not Role.INTERMEDIATE:
        return f"it is the caller's: {graph.storages[storage].role.value}"
    if graph.storages[storage].escapes:
        return "an output keeps it alive"
    return ""


def _check_offsets(graph: OpGraph, schedule: Schedule) -> None:
    """Every storage in the arena may be there, lies within it, and is aligned."""
    for storage, offset in schedule.arena.offsets.items():
        if reason := _offset_fault(graph, storage, offset, schedule.arena.bytes):
            raise ScheduleError(f"storage {storage!r} is placed at byte {offset} of the arena, but {reason}")


def _offset_fault(graph: OpGraph, storage: str, offset: int, size: int) -> str:
    """Why the storage must not have this offset, or ``""``."""
    if reason := _ownership_fault(graph, storage):
        return reason
    if not graph.storages[storage].placeable:
        return "what takes its memory does more than that, so its place is not free to choose"
    if offset % ALIGNMENT:
        return f"kernels expect a multiple of {ALIGNMENT}"
    if offset < 0 or offset + graph.storages[storage].bytes > size:
        return f"its {graph.storages[storage].bytes} bytes are not all within the {size} that there are"
    return ""


@dataclass(frozen=True, slots=True)
class _Placed:
    """The storages in the arena, and in what order they use its bytes.

    Attributes:
        accesses: for each of them, the ops that access it.
        storages_of: for each op, those that it accesses.
        last: for each, the op that accesses it last in launch order.
        previous: for each, those that used some of its bytes right before it.
        awaited: for each that is in use, the set of accesses that must come before its own: bit i is the point at
            position i.
    """

    accesses: Mapping[str, Collection[str]]
    storages_of: Mapping[str, Sequence[str]]
    last: Mapping[str, str]
    previous: Mapping[str, Sequence[str]]
    awaited: dict[str, int] = field(default_factory=dict)


def _placed_storages(graph: OpGraph, schedule: Schedule, accesses: Mapping[str, Sequence[str]]) -> _Placed:
    """The order in which storages use each byte of the arena, by their first accesses in launch order."""
    placed = {name: frozenset(accesses[name]) for name in schedule.arena.offsets if graph.storages[name].bytes}
    storages_of: dict[str, list[str]] = defaultdict(list)
    for storage, ops in placed.items():
        for op in ops:
            storages_of[op].append(storage)
    arena, previous, last = _LastStorages(), dict[str, Sequence[str]](), dict[str, str]()
    for launch in schedule.launches:
        for storage in storages_of.get(launch.op, ()):
            last[storage] = launch.op
            if storage not in previous:
                first, end = _byte_range(graph, schedule, storage)
                previous[storage] = arena.take(first, end, storage)
    return _Placed(placed, storages_of, last, previous)


def _byte_range(graph: OpGraph, schedule: Schedule, storage: str) -> tuple[int, int]:
    """The first byte of a storage in the arena, and the first after it."""
    first = schedule.arena.offsets[storage]
    return first, first + graph.storages[storage].bytes


class _LastStorages:
    """The storage that used each byte of the arena last: one entry for each range of bytes with the same storage."""

    def __init__(self) -> None:
        self._starts = [0]
        self._storages = [""]

    def take(self, first: int, end: int, storage: str) -> Sequence[str]:
        """Let a storage use bytes ``first`` to ``end - 1``. Returns the storages that used any of them last."""
        low, high = self._split(first), self._split(end)
        previous = dict.fromkeys(self._storages[low:high])
        self._starts[low:high], self._storages[low:high] = [first], [storage]
        return [other for other in previous if other]

    def _split(self, at: int) -> int:
        """The index of the range that starts at this byte; splits one if there is none."""
        index = bisect_left(self._starts, at)
        if index == len(self._starts) or self._starts[index] != at:
            self._starts.insert(index, at)
            self._storages.insert(index, self._storages[index - 1])
        return index


def _check_shared_bytes(graph: OpGraph, schedule: Schedule, state: _State, placed: _Placed) -> None:
    """A launch that accesses a storage in the arena happens after all accesses of the storages before it there."""
    # Neighbours are enough. Take two storages with a byte in common, and all storages with this byte in the order of
    # their first accesses. Each is compared with the one before it, all accesses with all, later ones included; each
    # has an access; and happens-before is transitive. So every access of the earlier of the two happens before every
    # access of the later. And no correct schedule is refused: two storages that are compared have bytes in common, and
    # waits are for earlier launches only, so of two accesses only the one launched first can happen first.
    here, position = state.point, state.position
    if here.op not in placed.storages_of:
        return
    before = state.past[here.stream] & ~(1 << position[here.op])
    for storage in placed.storages_of[here.op]:
        if storage not in placed.awaited:
            ends = {op for other in placed.previous[storage] for op in placed.accesses[other]}
            placed.awaited[storage] = _bit_set(position[op] for op in ends)
        if missing := placed.awaited[storage] & ~before:
            raise ScheduleError(_overlap(graph, schedule, state, placed, storage, missing))
        if placed.last[storage] == here.op:
            del placed.awaited[storage]


def _bit_set(positions: Iterable[int]) -> int:
    bits = 0
    for position in positions:
        bits |= 1 << position
    return bits


def _overlap(graph: OpGraph, schedule: Schedule, state: _State, placed: _Placed, storage: str, missing: int) -> str:
    """The error message for an access of a storage, given the earlier accesses that it does not come after."""
    here, first_missing = state.point.op, (missing & -missing).bit_length() - 1
    op = next(op for op, position in state.position.items() if position == first_missing)
    other = next(other for other in placed.previous[storage] if op in placed.accesses[other])
    (first, end), (other_first, other_end) = _byte_range(graph, schedule, storage), _byte_range(graph, schedule, other)
    shared = f"bytes {max(first, other_first)} to {min(end, other_end) - 1} of the arena"
    if op == here:
        return f"storages {other!r} and {storage!r} share {shared}, but {_at(graph, here)} uses both"
    return (
        f"{_at(graph, here)} must come after {_at(graph, op)} (storage {storage!r} has {shared} after {other!r}), "
        f"but {_missing(schedule, state, op, here)}"
    )


def _accesses(graph: OpGraph) -> Mapping[str, list[str]]:
    """The ops that access each storage, or a part of it."""
    accesses: dict[str, list[str]] = defaultdict(list)
    for op in graph.ops.values():
        for name in op.reads | op.writes | op.allocates:
            accesses[name].append(op.name)
    for storage in graph.storages.values():
        for part in storage.parts:
            accesses[storage.name] += accesses.pop(part, [])
    return accesses


def _allocators(graph: OpGraph) -> Mapping[str, list[str]]:
    """The ops that allocate each storage: one, if the graph is valid."""
    allocators: dict[str, list[str]] = defaultdict(list)
    for op in graph.ops.values():
        for storage in op.allocates:
            allocators[storage].append(op.name)
    return allocators


def _at(graph: OpGraph, point: str) -> str:
    """The name of a point in messages, with the user's source line where it is known."""
    source = graph.ops[point].source if point in graph.ops else ""
    return f"{point!r} ({source})" if source else repr(point)
