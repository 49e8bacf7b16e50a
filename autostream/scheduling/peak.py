"""How much memory a schedule takes: in its memory pools (:func:`peak_bytes`), and at each simulated moment.

The caching allocator keeps a block for the stream that allocated it, and only the arena is shared by all streams. So
memory is a few *pools*, each as large as it ever gets, and the run reserves their sum.

The simulated :class:`Footprint` is a lower bound: it takes memory as free the moment that its last user ends, whether
or not the stream that reuses it waits for that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from autostream.ir import OpGraph, Role, Schedule, Timeline

ARENA = -1
"""The ``stream`` of the arena's pool."""


@dataclass(frozen=True, slots=True)
class Pool:
    """The memory of one stream in the caching allocator, or the arena.

    Attributes:
        stream: the stream that allocates from it; ``ARENA`` for the arena, which all streams share.
        bytes: its size.
        live: the storages in it when most of it is in use, the largest first.
    """

    stream: int
    bytes: int
    live: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Allocation:
    """A storage in memory from the launch at one position to that at another, both included."""

    storage: str
    first: int
    last: int


def given_bytes(graph: OpGraph) -> int:
    """Bytes of parameters, buffers, constants and inputs, which no schedule changes.

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

    Blocks are allocated and freed in launch order, each in the pool of its op's stream. So this is what the run
    reserves, except for rounding and libraries' workspaces. The arena counts as a whole.

    Args:
        graph: the ops, what they allocate and how large that is.
        schedule: the launches with their releases; what is never released lives to the end.

    Example:
        The first storage is released before the third is allocated:

        >>> from autostream.ir import Launch, Op, Role, Storage
        >>> none = frozenset()
        >>> ops = {name: Op(name, "f", (name,), none, frozenset(name), frozenset(name)) for name in "abc"}
        >>> storages = {name: Storage(name, Role.INTERMEDIATE, 512, (name,)) for name in "abc"}
        >>> launches = (Launch("a", 0), Launch("b", 0, releases=("a",)), Launch("c", 0, releases=("b",)))
        >>> peak_bytes(OpGraph(ops, (), storages, (), "cuda:0"), Schedule("mine", 1, launches))
        1024
    """
    pools = _allocations_by_pool(graph, schedule)
    blocks = (max(_bytes_by_launch(graph, pool), default=0) for stream, pool in pools.items() if stream != ARENA)
    return schedule.arena.bytes + sum(blocks)


def pools(graph: OpGraph, schedule: Schedule) -> tuple[Pool, ...]:
    """The pools of a schedule, and what is in them when they are first fullest; the largest pool first.

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
    pools = []
    for stream, allocations in _allocations_by_pool(graph, schedule).items():
        used = _bytes_by_launch(graph, allocations)
        most = max(used)
        fullest = used.index(most)
        live = [each for each in allocations if each.first <= fullest <= each.last]
        live.sort(key=lambda each: (-graph.storages[each.storage].bytes, each.first, each.storage))
        size = schedule.arena.bytes if stream == ARENA else most
        pools.append(Pool(stream, size, tuple(each.storage for each in live)))
    return tuple(sorted(pools, key=lambda pool: -pool.bytes))


def _bytes_by_launch(graph: OpGraph, allocations: Sequence[_Allocation]) -> Sequence[int]:
    """Bytes in use at each launch, up to the last one at which that changes."""
    change = [0] * (max((each.last for each in allocations), default=-1) + 2)
    for each in allocations:
        size = graph.storages[each.storage].bytes
        change[each.first] += size
        change[each.last + 1] -= size
    return [*accumulate(change)]


def _allocations_by_pool(graph: OpGraph, schedule: Schedule) -> Mapping[int, Sequence[_Allocation]]:
    """When storages are in memory, by pool: blocks until their release, those in the arena while ops access them."""
    placed = schedule.arena.offsets
    pools: dict[int, list[_Allocation]] = defaultdict(list)
    for name, (first, last) in _spans_in_arena(graph, schedule).items():
        pools[ARENA].append(_Allocation(name, first, last))
    end = len(schedule.launches) - 1
    released = {name: at for at, launch in enumerate(schedule.launches) for name in launch.releases}
    for at, launch in enumerate(schedule.launches):
        for name in graph.ops[launch.op].allocates:
            if name in graph.storages and name not in placed:
                pools[launch.stream].append(_Allocation(name, at, released.get(name, end)))
    counted = placed.keys() | {name for op in graph.ops.values() for name in op.allocates}
    for storage in graph.storages.values():  # what the prelude allocates, on the caller's stream
        if storage.role is Role.INTERMEDIATE and storage.name not in counted:
            pools[0].append(_Allocation(storage.name, 0, max(end, 0)))
    return pools


def _spans_in_arena(graph: OpGraph, schedule: Schedule) -> Mapping[str, tuple[int, int]]:
    """The first and the last launch that accesses each storage in the arena, or a part of it."""
    if not schedule.arena.offsets:
        return {}
    whole = {part: name for name in schedule.arena.offsets for part in (name, *graph.storages[name].parts)}
    spans: dict[str, tuple[int, int]] = {}
    for at, launch in enumerate(schedule.launches):
        op = graph.ops[launch.op]
        for part in op.reads | op.writes | op.allocates:
            if name := whole.get(part):
                spans[name] = spans.get(name, (at, at))[0], at
    return spans


@dataclass(frozen=True)
class Footprint:
    """The memory that is in use at each moment of a timeline, in bytes.

    Attributes:
        graph: the ops with their accesses, and the storages.
    """

    graph: OpGraph

    @cached_property
    def users(self) -> Mapping[str, Sequence[str]]:
        """The ops that access each intermediate storage or a part of it, in program order."""
        role = {name: storage.role for name, storage in self.graph.storages.items()}
        users = self.graph.users.items()
        return {name: ops for name, ops in users if ops and role[name] is Role.INTERMEDIATE}

    @cached_property
    def allocated(self) -> frozenset[str]:
        """The storages that ops allocate; the prelude allocates the others."""
        return frozenset(name for op in self.graph.ops.values() for name in op.allocates)

    @cached_property
    def prelude_bytes(self) -> int:
        """What the prelude allocates, which stays to the end."""
        return sum(
            storage.bytes
            for storage in self.graph.storages.values()
            if storage.role is Role.INTERMEDIATE and storage.name not in self.allocated and not storage.placeable
        )

    @cached_property
    def allocated_bytes(self) -> Mapping[str, int]:
        """What each op allocates."""
        storages = self.graph.storages
        return {
            op.name: sum(storages[name].bytes for name in op.allocates if name in storages)
            for op in self.graph.ops.values()
        }

    def freed_bytes(self, timeline: Timeline) -> Mapping[str, int]:
        """What each op frees: storages of which it is the last user to end; outputs are never freed."""
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
            ``c`` reuses the memory of ``a``, which only ``b`` reads.

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
        """Each moment at which the memory in use changes, µs, with the bytes in use from then on.

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
        """Each moment at which a storage is allocated or freed, µs, with its bytes, negative if freed."""
        start, end = timeline.starts, timeline.ends
        changes: list[tuple[float, int]] = []
        for name, users in self.users.items():
            storage = self.graph.storages[name]
            if name not in self.allocated and not storage.placeable:
                continue  # allocated by the prelude
            changes.append((min(start[op] for op in users), storage.bytes))
            if not storage.escapes:
                changes.append((max(end[op] for op in users), -storage.bytes))
        return sorted(changes)
