"""The offset of each storage in the arena, so that storages in use at the same time have no byte in common.

This is dynamic storage allocation with all requests known (Garey & Johnson 1979, SR2: NP-hard), except that time is the
partial order of a schedule, see :mod:`~autostream.scheduling.lifetimes`. Several arenas are made, and the smallest is
used. Each is made by *first fit*: the storages in some order, each at the lowest offset where it overlaps none that it
conflicts with. The orders are

1. those of a few heuristics, ``RULES``;
2. the best of these, changed several times: what ended at the top of the arena moves to the front (*squeaky wheel
   optimization*: Joslin & Clements 1999, JAIR 10).

Glossary:

- Two storages *conflict* unless one is dead before the other is born.
- A *segment* is a range of the arena in which no storage begins or ends. It is *blocked* for the storages that conflict
  with one in it.
- A set of storages is represented as the bits of an integer, like sets of ops in
  :mod:`~autostream.scheduling.bitsets`. One AND tells whether a segment is blocked for a storage, and another whether
  all segments of a *chunk* are.
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
"""Every offset is a multiple of this, bytes, like blocks of the caching allocator. Compiled kernels rely on 16."""

MANY = 1000
"""For more storages than this, only the order of the first rule is tried."""

ROUNDS = 8
"""How many times the best order is changed."""

MAX_SIZES = 256
"""If there are more different sizes than this, sizes are padded to fewer: different sizes make more segments."""

DIGITS = 4
"""Significant bits of padded sizes: 8 sizes from one power of two to the next, and 4 % of padding on average."""

BLOCK = 8192
"""Storages whose conflicts are computed together, each as a set of 1 kB: 100 MB for 100,000 storages."""

CHUNK = 64
"""The least number of segments in a chunk; the most is twice as many."""

NOWHERE = -1


@dataclass(frozen=True, slots=True)
class _Request:
    """A storage to be placed; ``bytes`` are a multiple of ``ALIGNMENT``."""

    name: str
    bytes: int
    life: Lifetime


Rule = Callable[[_Request], tuple[int, int]]
"""A sort key: the order in which storages are placed."""


def by_size(request: _Request) -> tuple[int, int]:
    """Largest first: *greedy by size* (Pisarchyk & Lee 2020, "Efficient memory management for deep neural net
    inference", arXiv 2001.03288).
    """
    return -request.bytes, request.life.first


def by_area(request: _Request) -> tuple[int, int]:
    """Largest product of bytes and number of launches alive first."""
    return -request.bytes * (request.life.last - request.life.first + 1), request.life.first


def by_launch(request: _Request) -> tuple[int, int]:
    """In launch order, like an allocator that does not know later requests."""
    return request.life.first, -request.bytes


RULES: tuple[Rule, ...] = (by_size, by_area, by_launch)
"""The first orders to try, the one that is best most often first; of equal arenas the first is used."""


def place_storages(graph: OpGraph, schedule: Schedule) -> Schedule:
    """Put every placeable storage into one arena, the smallest of several.

    On one stream no arena is smaller than the most bytes that are alive at once. Neural networks take 1.00 to 1.02
    times as much, random graphs up to 1.25 times. Streams that do not wait for each other need at least the sum of what
    each needs; chains on them take up to 1.15 times that.

    Takes O(V²K/30 + V²S/30) digit operations at worst and 3·V·min(V, ``BLOCK``)/8 bytes, for V storages on K streams
    and S segments; one or two seconds for 10,000 storages.

    Args:
        graph: the ops with their accesses, and the storages.
        schedule: the launches with their waits; an arena that it has is replaced.

    Returns:
        The schedule with ``arena``: offsets in bytes, multiples of ``ALIGNMENT``, in the order of ``graph.storages``.

    Example:
        Each op reads the result of the one before it, so every other storage can have the same offset.

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
    requests = [_Request(name, size, lives[name]) for name, size in zip(lives, sizes, strict=True)]
    best = min(_arenas(requests), key=lambda arena: arena.bytes)
    return replace(schedule, arena=replace(best, offsets={name: best.offsets[name] for name in lives}))


def _arenas(requests: Sequence[_Request]) -> Iterator[Arena]:
    """One arena for each order that is tried, with its offsets in that order."""
    if len(requests) > MANY:
        yield _first_fit_in_blocks(sorted(requests, key=RULES[0]))
        return
    known = {request.name: request for request in requests}
    lives = [request.life for request in requests]
    bits = dict(zip(known, enumerate(_conflicts(lives, lives)), strict=True))
    ruled = [_first_fit(sorted(requests, key=rule), bits) for rule in RULES]
    yield from ruled
    arena = min(ruled, key=lambda arena: arena.bytes)
    for _ in range(ROUNDS):
        highest = [name for name, offset in arena.offsets.items() if offset + known[name].bytes == arena.bytes]
        arena = _first_fit([known[name] for name in dict.fromkeys([*highest, *arena.offsets])], bits)
        yield arena


def _padded(sizes: Sequence[int]) -> Sequence[int]:
    """Sizes as multiples of ``ALIGNMENT``; if too many of them differ, as numbers with few significant bits."""
    aligned = [_rounded_up(size, ALIGNMENT) for size in sizes]
    if len(set(aligned)) <= MAX_SIZES:
        return aligned
    return [_rounded_up(size, max(ALIGNMENT, 1 << size.bit_length() - DIGITS)) for size in aligned]


def _rounded_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def _first_fit(requests: Sequence[_Request], bits: Mapping[str, tuple[int, int]]) -> Arena:
    """Place each storage in turn at the lowest offset where it overlaps no earlier one that it conflicts with.

    Args:
        requests: the storages in the order in which they are placed.
        bits: for each storage, its bit in sets, and the set of those that it conflicts with.
    """
    segments, offsets = _Segments(), dict[str, int]()
    for request in requests:
        bit, conflicts = bits[request.name]
        start = offsets[request.name] = segments.lowest_free(bit, request.bytes)
        segments.block(start, start + request.bytes, conflicts)
    return Arena(max((offsets[request.name] + request.bytes for request in requests), default=0), offsets)


def _first_fit_in_blocks(requests: Sequence[_Request]) -> Arena:
    """The same in less memory, for more storages: conflicts are computed for one block of storages at a time."""
    offsets: list[int] = []
    for start in range(0, len(requests), BLOCK):
        known = requests[: start + BLOCK]
        segments = _Segments()
        for at, conflicts in enumerate(_conflicts([t.life for t in known], [t.life for t in known[start:]])):
            if at >= start:
                offsets.append(segments.lowest_free(at - start, known[at].bytes))
            segments.block(offsets[at], offsets[at] + known[at].bytes, conflicts)
    size = max((offset + request.bytes for offset, request in zip(offsets, requests, strict=True)), default=0)
    return Arena(size, {request.name: offset for offset, request in zip(offsets, requests, strict=True)})


def _conflicts(lives: Sequence[Lifetime], block: Sequence[Lifetime]) -> Sequence[int]:
    """For each of ``lives``, the set of those in ``block`` that it conflicts with."""
    every = (1 << len(block)) - 1
    before = _at_most([life.birth for life in lives], [life.death for life in block])
    after = _at_most([_negative(life.death) for life in lives], [_negative(life.birth) for life in block])
    return [every & ~(earlier | later) for earlier, later in zip(before, after, strict=True)]


def _negative(clock: Clock) -> Clock:
    return tuple(map(neg, clock))


def _at_most(limits: Sequence[Clock], clocks: Sequence[Clock]) -> Sequence[int]:
    """For each limit, the set of clocks that exceed it on no stream: one pass in ascending order for each stream."""
    sets = [(1 << len(clocks)) - 1] * len(limits)
    for limit_here, clock_here in zip(zip(*limits, strict=True), zip(*clocks, strict=True), strict=True):
        ascending = sorted(range(len(clocks)), key=clock_here.__getitem__)
        passed, below = 0, 0
        for at in sorted(range(len(limits)), key=limit_here.__getitem__):
            while passed < len(ascending) and clock_here[ascending[passed]] <= limit_here[at]:
                below |= 1 << ascending[passed]
                passed += 1
            sets[at] &= below
    return sets


@dataclass(slots=True)
class _Chunk:
    """Neighbouring segments.

    Attributes:
        starts: the first byte of each segment; it ends where the next one begins, perhaps in the next chunk.
        blocked: for each segment, the set of storages that it is blocked for.
        full: the set of storages that all of these segments are blocked for.
    """

    starts: list[int]
    blocked: list[int]
    full: int = 0

    def __post_init__(self) -> None:
        self.full = reduce(and_, self.blocked)


class _Segments:
    """The arena while it is filled; its last segment has no end and is always free."""

    def __init__(self) -> None:
        self._chunks = [_Chunk([0], [0])]
        self._starts = [0]

    def lowest_free(self, bit: int, size: int) -> int:
        """The lowest offset from which ``size`` bytes are free for the storage of this bit."""
        storage = 1 << bit
        free = NOWHERE
        for chunk, first in zip(self._chunks, self._starts, strict=True):
            if free != NOWHERE and first - free >= size:
                return free
            if chunk.full & storage:
                free = NOWHERE
                continue
            for start, blocked in zip(chunk.starts, chunk.blocked, strict=True):
                if blocked & storage:
                    if free != NOWHERE and start - free >= size:
                        return free
                    free = NOWHERE
                elif free == NOWHERE:
                    free = start
        return free

    def block(self, start: int, end: int, conflicts: int) -> None:
        """Block the bytes from ``start``, where a segment begins, to ``end`` for a set of storages."""
        self._split(end)
        for chunk in self._chunks[bisect_right(self._starts, start) - 1 : bisect_left(self._starts, end)]:
            for at in range(bisect_left(chunk.starts, start), bisect_left(chunk.starts, end)):
                chunk.blocked[at] |= conflicts
            chunk.full = reduce(and_, chunk.blocked)

    def _split(self, offset: int) -> None:
        """Split a segment at ``offset``, unless one begins there."""
        index = bisect_right(self._starts, offset) - 1
        starts, blocked = self._chunks[index].starts, self._chunks[index].blocked
        at = bisect_right(starts, offset)
        if starts[at - 1] == offset:
            return
        starts.insert(at, offset)
        blocked.insert(at, blocked[at - 1])
        if len(starts) > 2 * CHUNK:
            halves = [_Chunk(starts[:CHUNK], blocked[:CHUNK]), _Chunk(starts[CHUNK:], blocked[CHUNK:])]
            self._chunks[index : index + 1] = halves
            self._starts.insert(index + 1, halves[1].starts[0])
