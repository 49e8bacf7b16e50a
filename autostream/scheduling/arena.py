"""The arena: where each storage lies, so that no byte belongs to two storages in use at the same time.

This is dynamic storage allocation with all requests known (Garey & Johnson 1979, SR2: NP-hard), but that time is the
partial order of a schedule, see :mod:`~autostream.scheduling.lifetimes`. The smallest arena is kept of some that are
made by *first fit*: storages are taken in some order, and each is put at the lowest offset where it has no byte in
common with one that it conflicts with. The orders are

1. those of a few rules of thumb, ``RULES``;
2. the best of these again and again, each time with what ended at the top of the arena moved to the front: *squeaky
   wheel optimization* (Joslin & Clements 1999, JAIR 10).

Glossary:

- Two storages *conflict* unless one is dead before the other is born.
- A *slot* is a range of the arena in which no storage begins or ends. It is *barred* to those that conflict with one
  that lies there.
- A set of storages is kept as the bits of an integer, as sets of ops are in :mod:`~autostream.scheduling.bitsets`: one
  AND tells whether a slot is barred to a storage, and another whether a *chunk* of neighbouring slots is as a whole.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import and_, neg

from autostream.ir import Arena, OpGraph, Schedule
from autostream.scheduling.lifetimes import Clock, Lifetime, lifetimes

ALIGNMENT = 512
"""Every offset is a multiple of this, bytes: as the caching allocator aligns. Compiled kernels count on 16."""

MANY = 1000
"""Of more storages than this, only one order is tried, that of the first rule."""

ROUNDS = 8
"""How often the best order is changed."""

KINDS = 256
"""Where there are more kinds of sizes than this, sizes are padded to fewer: each kind cuts the others' slots."""

DIGITS = 4
"""Significant bits of padded sizes: 8 sizes from one power of two to the next, and 4 % of padding on average."""

BLOCK = 8192
"""Storages whose conflicts are found together, with all that are placed by then: 1 kB each, 100 MB for 100,000."""

CHUNK = 64
"""Slots of a chunk, at least; at most twice as many."""

NOWHERE = -1


@dataclass(frozen=True, slots=True)
class _Tenant:
    """A storage to be placed; ``bytes`` are a multiple of ``ALIGNMENT``."""

    name: str
    bytes: int
    life: Lifetime


Rule = Callable[[_Tenant], tuple[int, int]]
"""A key by which storages are sorted before they are placed."""


def by_size(tenant: _Tenant) -> tuple[int, int]:
    """The largest first: *greedy by size* (Pisarchyk & Lee 2020, "Efficient memory management for deep neural net
    inference", arXiv 2001.03288).
    """
    return -tenant.bytes, tenant.life.first


def by_area(tenant: _Tenant) -> tuple[int, int]:
    """The largest product of bytes and launches lived through first."""
    return -tenant.bytes * (tenant.life.last - tenant.life.first + 1), tenant.life.first


def by_launch(tenant: _Tenant) -> tuple[int, int]:
    """As they are launched: what an allocator does, which does not know what is to come."""
    return tenant.life.first, -tenant.bytes


RULES: tuple[Rule, ...] = (by_size, by_area, by_launch)
"""Orders to begin with, the one that wins most often first; of equal arenas the first is kept."""


def place_storages(graph: OpGraph, schedule: Schedule) -> Schedule:
    """Put every storage whose place is free to choose into one arena, as small as the tried orders make it.

    On one stream no arena is smaller than the most bytes that are alive at once. The residual, dense, attention and
    training networks of the tests take 1.00 to 1.02 times as much, chains of random sizes up to 1.1 times, and random
    graphs up to 1.25 times. Streams that do not wait for each other need the sum of what each needs; chains on them
    take up to 1.15 times that.

    For V storages on K streams and S slots, O(V²K/30 + V²S/30) digit operations at worst, and 3·V·min(V, ``BLOCK``)/8
    bytes; one or two seconds for 10,000 storages.

    Args:
        graph: the ops with their accesses, and the storages.
        schedule: the launches with their waits; an arena that it has is replaced.

    Returns:
        The schedule with ``arena``: offsets in bytes, multiples of ``ALIGNMENT``, in the order of ``graph.storages``.

    Example:
        Each op reads what the one before it made, so every other storage can lie in the same place.

            0:  a ── b ── c ── d

        >>> from autostream.ir import Launch, Op, Role, Storage
        >>> reads = {"a": "x", "b": "a", "c": "b", "d": "c"}
        >>> ops = {n: Op(n, "aten.relu.default", (n,), frozenset({r}), frozenset({n}), frozenset({n}))
        ...        for n, r in reads.items()}
        >>> storages = {n: Storage(n, Role.INTERMEDIATE, 1000, (n,), placeable=True) for n in ops}
        >>> schedule = Schedule("mine", 1, tuple(Launch(n, 0) for n in ops))
        >>> place_storages(OpGraph(ops, (), storages, (), "cuda:0"), schedule).arena
        Arena(bytes=2048, offsets={'a': 0, 'b': 1024, 'c': 0, 'd': 1024})
    """
    lives = lifetimes(graph, schedule)
    sizes = _padded([graph.storages[name].bytes for name in lives])
    tenants = [_Tenant(name, size, lives[name]) for name, size in zip(lives, sizes, strict=True)]
    best = min(_arenas(tenants), key=lambda arena: arena.bytes)
    return replace(schedule, arena=replace(best, offsets={name: best.offsets[name] for name in lives}))


def _arenas(tenants: Sequence[_Tenant]) -> Iterator[Arena]:
    """One arena for each order that is tried; their offsets iterate in that order."""
    if len(tenants) > MANY:
        yield _first_fit_in_blocks(sorted(tenants, key=RULES[0]))
        return
    known = {tenant.name: tenant for tenant in tenants}
    lives = [tenant.life for tenant in tenants]
    bits = dict(zip(known, enumerate(_conflicts(lives, lives)), strict=True))
    ruled = [_first_fit(sorted(tenants, key=rule), bits) for rule in RULES]
    yield from ruled
    arena = min(ruled, key=lambda arena: arena.bytes)
    for _ in range(ROUNDS):
        highest = [name for name, offset in arena.offsets.items() if offset + known[name].bytes == arena.bytes]
        arena = _first_fit([known[name] for name in dict.fromkeys([*highest, *arena.offsets])], bits)
        yield arena


def _padded(sizes: Sequence[int]) -> Sequence[int]:
    """Multiples of ``ALIGNMENT``, and where these are of many kinds, numbers with few significant bits."""
    aligned = [_rounded_up(size, ALIGNMENT) for size in sizes]
    if len(set(aligned)) <= KINDS:
        return aligned
    return [_rounded_up(size, max(ALIGNMENT, 1 << size.bit_length() - DIGITS)) for size in aligned]


def _rounded_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def _first_fit(tenants: Sequence[_Tenant], bits: Mapping[str, tuple[int, int]]) -> Arena:
    """Put one after the other at the lowest offset where it conflicts with none of those before it.

    Args:
        tenants: in this order.
        bits: of each, the place of its bit in sets, and the set of those that it conflicts with.
    """
    slots, offsets = _Slots(), dict[str, int]()
    for tenant in tenants:
        bit, conflicts = bits[tenant.name]
        start = offsets[tenant.name] = slots.lowest(bit, tenant.bytes)
        slots.take(start, start + tenant.bytes, conflicts)
    return Arena(max((offsets[tenant.name] + tenant.bytes for tenant in tenants), default=0), offsets)


def _first_fit_in_blocks(tenants: Sequence[_Tenant]) -> Arena:
    """The same, where sets of all would take too much memory: a block is put beside all that are there by then."""
    offsets: list[int] = []
    for start in range(0, len(tenants), BLOCK):
        known = tenants[: start + BLOCK]
        slots = _Slots()
        for at, conflicts in enumerate(_conflicts([t.life for t in known], [t.life for t in known[start:]])):
            if at >= start:
                offsets.append(slots.lowest(at - start, known[at].bytes))
            slots.take(offsets[at], offsets[at] + known[at].bytes, conflicts)
    size = max((offset + tenant.bytes for offset, tenant in zip(offsets, tenants, strict=True)), default=0)
    return Arena(size, {tenant.name: offset for offset, tenant in zip(offsets, tenants, strict=True)})


def _conflicts(lives: Sequence[Lifetime], block: Sequence[Lifetime]) -> Sequence[int]:
    """For each of ``lives``, the set of those in ``block`` that are neither dead before it nor born after it."""
    every = (1 << len(block)) - 1
    before = _at_most([life.birth for life in lives], [life.death for life in block])
    after = _at_most([_negative(life.death) for life in lives], [_negative(life.birth) for life in block])
    return [every & ~(earlier | later) for earlier, later in zip(before, after, strict=True)]


def _negative(clock: Clock) -> Clock:
    return tuple(map(neg, clock))


def _at_most(limits: Sequence[Clock], clocks: Sequence[Clock]) -> Sequence[int]:
    """For each limit, the set of clocks that exceed it nowhere: stream by stream, in rising order, met in one pass."""
    sets = [(1 << len(clocks)) - 1] * len(limits)
    for limit_here, clock_here in zip(zip(*limits, strict=True), zip(*clocks, strict=True), strict=True):
        rising = sorted(range(len(clocks)), key=clock_here.__getitem__)
        met, below = 0, 0
        for at in sorted(range(len(limits)), key=limit_here.__getitem__):
            while met < len(rising) and clock_here[rising[met]] <= limit_here[at]:
                below |= 1 << rising[met]
                met += 1
            sets[at] &= below
    return sets


@dataclass(slots=True)
class _Chunk:
    """Neighbouring slots.

    Attributes:
        starts: where each slot begins; it ends where the next one begins, be it that of the next chunk.
        barred: for each slot, the set of storages that must not lie there.
        full: the set of storages to which all of these slots are barred.
    """

    starts: list[int]
    barred: list[int]
    full: int = 0

    def __post_init__(self) -> None:
        self.full = reduce(and_, self.barred)


class _Slots:
    """An arena in the making; its last slot has no end, and is barred to nobody."""

    def __init__(self) -> None:
        self._chunks = [_Chunk([0], [0])]
        self._starts = [0]

    def lowest(self, tenant: int, size: int) -> int:
        """The lowest offset from which ``size`` bytes are not barred to the storage of bit ``tenant``."""
        bit = 1 << tenant
        free = NOWHERE
        for chunk, first in zip(self._chunks, self._starts, strict=True):
            if free != NOWHERE and first - free >= size:
                return free
            if chunk.full & bit:
                free = NOWHERE
                continue
            for start, barred in zip(chunk.starts, chunk.barred, strict=True):
                if barred & bit:
                    if free != NOWHERE and start - free >= size:
                        return free
                    free = NOWHERE
                elif free == NOWHERE:
                    free = start
        return free

    def take(self, start: int, end: int, conflicts: int) -> None:
        """Bar the bytes from ``start``, where a slot begins, to ``end`` to a set of storages."""
        self._cut(end)
        for chunk in self._chunks[bisect_right(self._starts, start) - 1 : bisect_left(self._starts, end)]:
            for at in range(bisect_left(chunk.starts, start), bisect_left(chunk.starts, end)):
                chunk.barred[at] |= conflicts
            chunk.full = reduce(and_, chunk.barred)

    def _cut(self, offset: int) -> None:
        """Let a slot begin at ``offset``."""
        place = bisect_right(self._starts, offset) - 1
        starts, barred = self._chunks[place].starts, self._chunks[place].barred
        at = bisect_right(starts, offset)
        if starts[at - 1] == offset:
            return
        starts.insert(at, offset)
        barred.insert(at, barred[at - 1])
        if len(starts) > 2 * CHUNK:
            halves = [_Chunk(starts[:CHUNK], barred[:CHUNK]), _Chunk(starts[CHUNK:], barred[CHUNK:])]
            self._chunks[place : place + 1] = halves
            self._starts.insert(place + 1, halves[1].starts[0])
