"""Happens-before in a schedule: what is over when each launch starts, and from when until when storages are in use.

    stream 0:  a(0) ── d(3)          before d: a on stream 0, and of stream 1 all up to c
    stream 1:  b(1) ── c(2) ─▶ d

Streams run at the same time, so one launch happens before another only if stream order and waits say so, directly or
through other launches. Vector clocks (Fidge and Mattern, 1988) tell: a clock holds one position per stream, and what
that stream did up to there is over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import le

from autostream.ir import FORK, Op, OpGraph, Role, Schedule

NEVER = -1

Clock = tuple[int, ...]
"""For each stream, the position of a launch there, or ``NEVER``."""


def seen_before(schedule: Schedule) -> Iterator[Clock]:
    """For each launch, the last launches that it comes after. O(V K + W K) steps for V launches with W waits.

    Example:
        >>> from autostream.ir import Launch
        >>> launches = (Launch("a", 0), Launch("b", 1), Launch("c", 1), Launch("d", 0, ("c",)))
        >>> list(seen_before(Schedule("mine", 2, launches)))
        [(-1, -1), (-1, -1), (-1, 1), (0, 2)]
    """
    nothing = (NEVER,) * schedule.streams
    after: dict[str, Clock] = {FORK: nothing}
    end = [nothing] * schedule.streams
    for position, launch in enumerate(schedule.launches):
        here = launch.stream
        seen = tuple(map(max, end[here], *(after[op] for op in launch.waits))) if launch.waits else end[here]
        yield seen
        end[here] = after[launch.op] = at_the_end(seen, here, position)


def at_the_end(seen: Clock, stream: int, position: int) -> Clock:
    """What has happened when the launch at a position has, which is on this stream and had seen that much before.

    Example:
        >>> at_the_end((-1, 1), stream=0, position=2)
        (2, 1)
    """
    return (*seen[:stream], position, *seen[stream + 1 :])


@dataclass(frozen=True, slots=True)
class Lifetime:
    """When a storage is in use.

    Attributes:
        birth: the last launches that all of its accesses come after.
        death: its own last accesses, one on each stream that has any.
        first: position of the launch that touches it first, as the host issues them.
    """

    birth: Clock
    death: Clock
    first: int

    @property
    def last(self) -> int:
        """Position of the launch that touches it last, as the host issues them."""
        return max(self.death)

    def before(self, other: Lifetime) -> bool:
        """Whether every access of this storage happens before every access of the other."""
        return all(map(le, self.death, other.birth))


def lifetimes(graph: OpGraph, schedule: Schedule) -> Mapping[str, Lifetime]:
    """The lifetimes of the storages whose place is free to choose, in the order of ``graph.storages``.

    Those are intermediate, placeable and not empty, no output keeps them alive, and some op touches them. What reads,
    writes or allocates a storage or one of its parts touches it. Takes O(V K + W K + A K) steps for V ops on K streams
    with W waits and A accesses.

    Args:
        graph: the ops with their accesses, and the storages.
        schedule: the launches with their waits.

    Example:
        Stream 1 reads ``a``, and ``b`` does not wait for that, though it is launched later. ``d`` does, so it may lie
        where ``a`` was.

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
    owner = _owners(graph)
    if not owner:
        return {}
    birth: dict[str, list[int]] = {}
    death: dict[str, list[int]] = {}
    first: dict[str, int] = {}
    for position, (launch, seen) in enumerate(zip(schedule.launches, seen_before(schedule), strict=True)):
        for storage in _touched(graph.ops[launch.op], owner):
            if storage not in first:
                first[storage], birth[storage], death[storage] = position, list(seen), [NEVER] * schedule.streams
            birth[storage] = list(map(min, birth[storage], seen))
            death[storage][launch.stream] = position
    return {
        name: Lifetime(tuple(birth[name]), tuple(death[name]), first[name]) for name in graph.storages if name in first
    }


def _owners(graph: OpGraph) -> Mapping[str, str]:
    """By what ops name, the storage that is to be placed: the name of itself and of its parts."""
    return {
        name: storage.name
        for storage in graph.storages.values()
        if storage.role is Role.INTERMEDIATE and storage.placeable and not storage.escapes and storage.bytes > 0
        for name in (storage.name, *storage.parts)
    }


def _touched(op: Op, owner: Mapping[str, str]) -> frozenset[str]:
    return frozenset(owner[name] for name in op.reads | op.writes | op.allocates if name in owner)
