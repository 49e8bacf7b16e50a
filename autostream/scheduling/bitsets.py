"""Reachability, transitive reduction and bipartite matching, with sets of ops kept as the bits of integers.

Bit ``i`` of a set is the op at position ``i`` of program order, and a relation is a tuple of such sets, one per op.
Python works on some thirty bits at a time, so the union of two sets of 10,000 ops takes a fraction of a microsecond,
and the closure of their graph fits into 13 MB. (A ``networkx`` closure would hold up to 50 million edges; its
matching recurses, and visits nodes in the order of their hashes, which differs from run to run.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autostream.ir import OpGraph


def descendants(graph: OpGraph) -> tuple[int, ...]:
    """What must come after each op, directly or not. O(E·V/30) digit operations.

    Example:
        >>> from autostream.ir import Dependency, Hazard, Op
        >>> ops = {name: Op(name, "f", (name,), frozenset(), frozenset({name})) for name in "abc"}
        >>> chain = OpGraph(ops, tuple(Dependency(x, y, Hazard.RAW, x) for x, y in ("ab", "bc", "ac")), {}, (), "cpu")
        >>> [f"{after:03b}" for after in descendants(chain)]
        ['110', '100', '000']
    """
    after = [0] * len(graph.ops)
    for at, successors in reversed(list(enumerate(successor_positions(graph)))):
        for successor in successors:
            after[at] |= after[successor] | 1 << successor
    return tuple(after)


def ancestors(graph: OpGraph) -> tuple[int, ...]:
    """What must come before each op, directly or not. O(E·V/30) digit operations."""
    before = [0] * len(graph.ops)
    for at, successors in enumerate(successor_positions(graph)):
        for successor in successors:
            before[successor] |= before[at] | 1 << at
    return tuple(before)


def reduction(graph: OpGraph) -> tuple[int, ...]:
    """The direct successors of each op that no longer path leads to: the minimum equivalent graph.

    Successors are visited in program order: a longer path to one leads through an earlier one. O(E·V/30) digit
    operations (Aho, Garey & Ullman 1972: the transitive reduction of an acyclic graph is unique).
    """
    after = descendants(graph)
    kept = []
    for successors in successor_positions(graph):
        direct = reached = 0
        for successor in sorted(successors):
            if not reached >> successor & 1:
                direct |= 1 << successor
                reached |= after[successor]
        kept.append(direct)
    return tuple(kept)


def maximum_matching(rows: Sequence[int]) -> dict[int, int]:
    """Match as many left vertices as possible, each to one right vertex of its row and none to the same.

    Hopcroft & Karp 1973: at most O(√V) rounds, each of which finds the shortest augmenting paths and flips as many
    disjoint ones as it can, in O(V²/30) digit operations.

    Args:
        rows: for each left vertex, the set of right vertices it may be matched to.

    Returns:
        Left vertex to right vertex. Where there is a choice, the same matching every time.

    Example:
        >>> maximum_matching([0b11, 0b01])
        {0: 1, 1: 0}
    """
    left_of: dict[int, int] = {}
    free = [left for left, row in enumerate(rows) if row]
    while layers := _layers(rows, left_of, free):
        free = [left for left in free if not _augment(rows, left_of, layers, left)]
    return {left: right for right, left in sorted(left_of.items(), key=lambda pair: pair[1])}


def members(bits: int) -> Iterator[int]:
    """The elements of a set, in ascending order.

    Example:
        >>> list(members(0b10110))
        [1, 2, 4]
    """
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


def successor_positions(graph: OpGraph) -> list[list[int]]:
    """The direct successors of each op, as positions in program order."""
    position = {name: at for at, name in enumerate(graph.ops)}
    return [[position[after] for after in graph.digraph.successors(name)] for name in graph.ops]


def _layers(rows: Sequence[int], left_of: dict[int, int], free: Sequence[int]) -> list[int]:
    """Right vertices by their distance from the free left ones, up to the first unmatched; empty if there are none."""
    layers: list[int] = []
    seen, frontier = 0, free
    while reached := _reached(rows, frontier) & ~seen:
        seen |= reached
        frontier, unmatched = [], 0
        for right in members(reached):
            if right in left_of:
                frontier.append(left_of[right])
            else:
                unmatched |= 1 << right
        if unmatched:
            return [*layers, unmatched]
        layers.append(reached)
    return []


def _reached(rows: Sequence[int], frontier: Sequence[int]) -> int:
    reached = 0
    for left in frontier:
        reached |= rows[left]
    return reached


def _augment(rows: Sequence[int], left_of: dict[int, int], layers: list[int], root: int) -> bool:
    """Flip one augmenting path from ``root``, one right vertex per layer, if there is one left.

    Vertices that were tried leave their layer: a path through them either was taken or leads nowhere.
    """
    lefts, rights = [root], list[int]()
    while lefts:
        depth = len(rights)
        candidates = rows[lefts[-1]] & layers[depth]
        if not candidates:
            lefts.pop()
            del rights[-1:]
            continue
        right = (candidates & -candidates).bit_length() - 1
        layers[depth] ^= 1 << right
        rights.append(right)
        if depth == len(layers) - 1:
            left_of.update(zip(rights, lefts, strict=True))
            return True
        lefts.append(left_of[right])
    return False
