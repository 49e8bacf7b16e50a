"""Happens-before in a schedule: what is over when each launch starts, and while which launches a storage is in use.

    stream 0:  a(0) ── d(3)          before d: a on stream 0, and of stream 1 all up to c
    stream 1:  b(1) ── c(2) ─▶ d

Streams run at the same time, so one launch happens before another only if stream order and waits say so, directly or
through other launches. Vector clocks (Fidge and Mattern, 1988) represent that: a clock holds one position per stream,
and every launch of that stream up to this position is over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import le

from autostream.ir import FORK, Op, OpGraph, Role, Schedule

NEVER = -1

Clock = tuple[int, ...]
"""For each stream, the position of a launch there, or ``NEVER``."""


def clocks(schedule: Schedule) -> Iterator[Clock]:
    """For each launch, the last launch of each stream that happens before it.

    Takes O(V K + W K) steps for V launches with W waits on K streams.

    Example:
        >>> from autostream.ir import Launch
        >>> launches = (Launch("a", 0), Launch("b", 1), Launch("c", 1), Launch("d", 0, ("c",)))
        >>> list(clocks(Schedule("mine", 2, launches)))
        [(-1, -1), (-1, -1), (-1, 1), (0, 2)]
    """
    start = (NEVER,) * schedule.streams
    clock_after: dict[str, Clock] = {FORK: start}
    latest = [start] * schedule.streams
    for position, launch in enumerate(schedule.launches):
        stream = launch.stream
        waits = [clock_after[op] for op in launch.waits]
        clock = tuple(map(max, latest[stream], *waits)) if waits else latest[stream]
        yield clock
        latest[stream] = clock_after[launch.op] = (*clock[:stream], position, *clock[stream + 1 :])


@dataclass(frozen=True, slots=True)
class Lifetime:
    """When a storage is in use.

    Attributes:
        birth: on each stream, the last launch that happens before all of its accesses.
        death: on each stream, its last access.
        first: position of the first launch that accesses it, in launch order.
    """

    birth: Clock
    death: Clock
    first: int

    @property
    def last(self) -> int:
        """Position of the last launch that accesses it, in launch order."""
        return max(self.death)

    def before(self, other: Lifetime) -> bool:
        """Whether every access of this storage happens before every access of the other."""
        return all(map(le, self.death, other.birth))


def lifetimes(graph: OpGraph, schedule: Schedule) -> Mapping[str, Lifetime]:
    """The lifetimes of the storages that the arena may hold, in the order of ``graph.storages``.

    Those are intermediate, placeable and not empty, no output keeps them alive, and some op accesses them. To read,
    write or allocate a storage or one of its parts is an access. Takes O(V K + W K + A K) steps for V ops on K streams
    with W waits and A accesses.

    Args:
        graph: the ops with their accesses, and the storages.
        schedule: the launches with their waits.

    Example:
        Stream 1 reads ``a``, and ``b`` does not wait for that, though it is launched later. ``d`` does, so it may reuse
        the memory of ``a``.

            0:  a ── b ─▶ d
                 ╲       ╱
            1:    c ────╯

        >>> from autostream.ir import Launch, Op, Storage
        >>> reads = {"a": "x", "c": "a", "b": "x", "d": "c"}
        >>> ops = {n: Op(n, "aten.relu.default", (n,), frozenset({r}), frozenset({n}), frozenset({n}))
        ...        for n, r in reads.items()}
        >>> storages = {n: Storage(n, Role.INTERMEDIATE, 512, (n,), placeable=True) for n in ops}
        >>> launches = (Launch("a", 0), Launch("c", 1, ("a",)), Launch("b", 0), Launch("d", 0, ("c",)))
        >>> lives = lifetimes(OpGraph(ops, (), storages, (), "cuda:0"), Schedule("mine", 2, launches))
        >>> lives["a"].death, lives["b"].birth, lives["d"].birth
        ((0, 1), (0, -1), (2, 1))
        >>> lives["a"].before(lives["b"]), lives["a"].before(lives["d"])
        (False, True)
    """
    storage_of = _storage_of_name(graph)
    if not storage_of:
        return {}
    birth: dict[str, list[int]] = {}
    death: dict[str, list[int]] = {}
    first: dict[str, int] = {}
    for position, (launch, clock) in enumerate(zip(schedule.launches, clocks(schedule), strict=True)):
        for storage in _accessed(graph.ops[launch.op], storage_of):
            if storage not in first:
                first[storage], birth[storage], death[storage] = position, list(clock), [NEVER] * schedule.streams
            birth[storage] = list(map(min, birth[storage], clock))
            death[storage][launch.stream] = position
    return {
        name: Lifetime(tuple(birth[name]), tuple(death[name]), first[name]) for name in graph.storages if name in first
    }


def _storage_of_name(graph: OpGraph) -> Mapping[str, str]:
    """The storages that the arena may hold, by their own names and by those of their parts."""
    return {
        name: storage.name
        for storage in graph.storages.values()
        if storage.role is Role.INTERMEDIATE and storage.placeable and not storage.escapes and storage.bytes > 0
        for name in (storage.name, *storage.parts)
    }


def _accessed(op: Op, storage_of: Mapping[str, str]) -> frozenset[str]:
    return frozenset(storage_of[name] for name in op.reads | op.writes | op.allocates if name in storage_of)
