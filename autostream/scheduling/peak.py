"""How much memory a schedule takes: at a time, as simulated (`Footprint`), and in each memory pool (`pools`).

The footprint is what a schedule would need if memory could be reused the moment that its last user ends. No schedule
needs less; a real one needs more where streams do not wait for each other: the caching allocator keeps what one stream
freed for that stream, and only the arena reuses memory across streams. So memory is a few *pools*, each as large as it
ever gets, and the run reserves their sum.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from autostream.ir import OpGraph, Role, Schedule, Timeline

ARENA = -1
"""Stands for the arena where others have the number of a stream."""


@dataclass(frozen=True, slots=True)
class Pool:
    """Memory whose blocks nobody else is handed.

    Attributes:
        stream: whose it is; ``ARENA`` for the arena, which all streams share.
        bytes: what is taken for it.
        live: the storages that are there when most of it is in use, the largest first.
    """

    stream: int
    bytes: int
    live: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Stay:
    """A storage is there from one launch to another, both included: places in launch order."""

    storage: str
    first: int
    last: int


def given_bytes(graph: OpGraph) -> int:
    """What is there whatever the schedule, in bytes: parameters, buffers, constants and inputs.

    Example:
        >>> from autostream.ir import Role, Storage
        >>> roles = {"w": Role.PARAMETER, "y": Role.INTERMEDIATE}
        >>> storages = {name: Storage(name, role, 512, (name,)) for name, role in roles.items()}
        >>> given_bytes(OpGraph({}, (), storages, (), "cuda:0"))
        512
    """
    return sum(storage.bytes for storage in graph.storages.values() if storage.role is not Role.INTERMEDIATE)


def peak_bytes(graph: OpGraph, schedule: Schedule) -> int:
    """The most that is allocated in each pool at a time, summed over the pools, in bytes.

    Blocks come and go in the order of the launches, each in the pool of the stream that its op is on: so this is what
    the run reserves, but for rounding and libraries' workspaces. An arena is taken as a whole.

    Args:
        graph: the ops, what they allocate and how large that is.
        schedule: the launches with their releases; what is never released lives on to the end.

    Example:
        The first storage is gone when the third is made:

        >>> from autostream.ir import Launch, Op, Role, Storage
        >>> none = frozenset()
        >>> ops = {name: Op(name, "f", (name,), none, frozenset(name), frozenset(name)) for name in "abc"}
        >>> storages = {name: Storage(name, Role.INTERMEDIATE, 512, (name,)) for name in "abc"}
        >>> launches = (Launch("a", 0), Launch("b", 0, releases=("a",)), Launch("c", 0, releases=("b",)))
        >>> peak_bytes(OpGraph(ops, (), storages, (), "cuda:0"), Schedule("mine", 1, launches))
        1024
    """
    stays = _stays(graph, schedule)
    own = (max(_in_use(graph, stays[stream]), default=0) for stream in stays if stream != ARENA)
    return schedule.arena.bytes + sum(own)


def pools(graph: OpGraph, schedule: Schedule) -> tuple[Pool, ...]:
    """The pools of a schedule, and what is in them when they are fullest; the largest first.

    Of several moments at which a pool is as full as ever, the first counts.

    Args:
        graph: the ops, what they allocate and how large that is.
        schedule: the launches with their releases.

    Example:
        >>> from autostream.ir import Arena, Launch, Op, Role, Storage
        >>> none = frozenset()
        >>> ops = {name: Op(name, "f", (name,), none, frozenset(name), frozenset(name)) for name in "ab"}
        >>> storages = {name: Storage(name, Role.INTERMEDIATE, 512, (name,), placeable=True) for name in "ab"}
        >>> launches = (Launch("a", 0), Launch("b", 0))
        >>> graph = OpGraph(ops, (), storages, (), "cuda:0")
        >>> pools(graph, Schedule("mine", 1, launches))
        (Pool(stream=0, bytes=1024, live=('a', 'b')),)
        >>> pools(graph, Schedule("mine", 1, launches, arena=Arena(512, {"a": 0, "b": 0})))
        (Pool(stream=-1, bytes=512, live=('a',)),)
    """
    found = []
    for stream, stays in _stays(graph, schedule).items():
        used = _in_use(graph, stays)
        most = max(used)
        fullest = used.index(most)
        live = [stay for stay in stays if stay.first <= fullest <= stay.last]
        live.sort(key=lambda stay: (-graph.storages[stay.storage].bytes, stay.first, stay.storage))
        size = schedule.arena.bytes if stream == ARENA else most
        found.append(Pool(stream, size, tuple(stay.storage for stay in live)))
    return tuple(sorted(found, key=lambda pool: -pool.bytes))


def _in_use(graph: OpGraph, stays: Sequence[_Stay]) -> Sequence[int]:
    """Bytes in use at each launch, up to the last one at which that changes."""
    change = [0] * (max((stay.last for stay in stays), default=-1) + 2)
    for stay in stays:
        size = graph.storages[stay.storage].bytes
        change[stay.first] += size
        change[stay.last + 1] -= size
    return [*accumulate(change)]


def _stays(graph: OpGraph, schedule: Schedule) -> Mapping[int, Sequence[_Stay]]:
    """When storages are there, by pool: blocks until they are released, placed ones as long as ops touch them."""
    placed = schedule.arena.offsets
    stays: dict[int, list[_Stay]] = defaultdict(list)
    for name, (first, last) in _touched(graph, schedule).items():
        stays[ARENA].append(_Stay(name, first, last))
    end = len(schedule.launches) - 1
    gone = {name: at for at, launch in enumerate(schedule.launches) for name in launch.releases}
    for at, launch in enumerate(schedule.launches):
        for name in graph.ops[launch.op].allocates:
            if name in graph.storages and name not in placed:
                stays[launch.stream].append(_Stay(name, at, gone.get(name, end)))
    elsewhere = placed.keys() | {name for op in graph.ops.values() for name in op.allocates}
    for storage in graph.storages.values():  # what the prelude takes, on the caller's stream
        if storage.role is Role.INTERMEDIATE and storage.name not in elsewhere:
            stays[0].append(_Stay(storage.name, 0, max(end, 0)))
    return stays


def _touched(graph: OpGraph, schedule: Schedule) -> Mapping[str, tuple[int, int]]:
    """The first and the last launch that touches each placed storage or a part of it."""
    if not schedule.arena.offsets:
        return {}
    whole = {part: name for name in schedule.arena.offsets for part in (name, *graph.storages[name].parts)}
    found: dict[str, tuple[int, int]] = {}
    for at, launch in enumerate(schedule.launches):
        op = graph.ops[launch.op]
        for part in op.reads | op.writes | op.allocates:
            if name := whole.get(part):
                found[name] = found.get(name, (at, at))[0], at
    return found


@dataclass(frozen=True)
class Footprint:
    """The memory of a graph whatever its schedule, in bytes.

    Attributes:
        graph: the ops with their accesses, and the storages.
    """

    graph: OpGraph

    @cached_property
    def users(self) -> Mapping[str, Sequence[str]]:
        """By intermediate storage, the ops that touch it or a part of it, in program order."""
        role = {name: storage.role for name, storage in self.graph.storages.items()}
        users = self.graph.users.items()
        return {name: ops for name, ops in users if ops and role[name] is Role.INTERMEDIATE}

    @cached_property
    def allocated(self) -> frozenset[str]:
        """The storages that ops allocate; others are there before the first."""
        return frozenset(name for op in self.graph.ops.values() for name in op.allocates)

    @cached_property
    def prelude_bytes(self) -> int:
        """What is taken before the first op, and there until the end whatever the schedule."""
        return sum(
            storage.bytes
            for storage in self.graph.storages.values()
            if storage.role is Role.INTERMEDIATE and storage.name not in self.allocated and not storage.placeable
        )

    @cached_property
    def taken(self) -> Mapping[str, int]:
        """What each op allocates."""
        storages = self.graph.storages
        return {
            op.name: sum(storages[name].bytes for name in op.allocates if name in storages)
            for op in self.graph.ops.values()
        }

    def freed(self, timeline: Timeline) -> Mapping[str, int]:
        """What nobody uses after each op, by the ops that are the last to end; outputs are never freed."""
        end = timeline.ends
        freed = dict.fromkeys(self.graph.ops, 0)
        for name, users in self.users.items():
            storage = self.graph.storages[name]
            if not storage.escapes and (name in self.allocated or storage.placeable):
                freed[max(users, key=end.__getitem__)] += storage.bytes
        return freed

    def live_bytes(self, timeline: Timeline) -> int:
        """The most that is in use at a time.

        Example:
            ``b`` reads what ``a`` made; then it is gone, and ``c`` takes as much.

            >>> from autostream.ir import Op, Slice, Storage
            >>> reads = {"a": "x", "b": "a", "c": "b"}
            >>> ops = {n: Op(n, "f", (n,), frozenset({r}), frozenset({n}), frozenset({n})) for n, r in reads.items()}
            >>> storages = {n: Storage(n, Role.INTERMEDIATE, 512, (n,)) for n in ops}
            >>> footprint = Footprint(OpGraph(ops, (), storages, (), "cuda:0"))
            >>> footprint.live_bytes(Timeline(tuple(Slice(n, 0, at, at + 1.0) for at, n in enumerate("abc"))))
            1024
        """
        # At one moment, what is freed goes first.
        return max(accumulate((size for _, size in self._changes(timeline)), initial=self.prelude_bytes))

    def in_use(self, timeline: Timeline) -> tuple[tuple[float, int], ...]:
        """What is in use from each moment on at which that changes, µs and bytes; from 0 on, what the prelude takes.

        Example:
            >>> from autostream.ir import Op, Slice, Storage
            >>> op = Op("a", "f", ("a",), frozenset(), frozenset("a"), frozenset("a"))
            >>> graph = OpGraph({"a": op}, (), {"a": Storage("a", Role.INTERMEDIATE, 512, ("a",))}, (), "cuda:0")
            >>> Footprint(graph).in_use(Timeline((Slice("a", 0, 1.0, 3.0),)))
            ((0.0, 0), (1.0, 512), (3.0, 0))
        """
        used = {0.0: self.prelude_bytes}
        live = self.prelude_bytes
        for at_us, size in self._changes(timeline):
            used[at_us] = live = live + size
        return tuple(used.items())

    def _changes(self, timeline: Timeline) -> list[tuple[float, int]]:
        """What ops take and give back, in bytes, by the clock; outputs are never given back."""
        start, end = timeline.starts, timeline.ends
        changes: list[tuple[float, int]] = []
        for name, users in self.users.items():
            storage = self.graph.storages[name]
            if name not in self.allocated and not storage.placeable:
                continue  # the prelude's, which is there all the time
            changes.append((min(start[op] for op in users), storage.bytes))
            if not storage.escapes:
                changes.append((max(end[op] for op in users), -storage.bytes))
        return sorted(changes)
