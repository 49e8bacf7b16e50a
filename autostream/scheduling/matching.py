"""Maximum matchings on adjacency lists: in a bipartite graph, and in the closure of an acyclic one.

What ``networkx`` has recurses, and visits vertices in the order of their hashes, which differs from run to run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set


def maximum_matching(rows: Sequence[Sequence[int]]) -> dict[int, int]:
    """Match as many left vertices as possible, each to one right vertex of its row and none to the same.

    Hopcroft & Karp 1973: at most O(√V) rounds, each of which finds the shortest augmenting paths and flips as many
    disjoint ones as it can, in O(V + E) steps.

    Args:
        rows: for each left vertex, the right vertices that it may be matched to.

    Returns:
        Left vertex to right vertex. Where there is a choice, the same matching every time.

    Example:
        >>> maximum_matching([[0, 1], [0]])
        {0: 1, 1: 0}
    """
    left_of: dict[int, int] = {}
    free = [left for left, row in enumerate(rows) if row]
    while layer_of := _layers(rows, left_of, free):
        free = [left for left in free if not _augment(rows, left_of, layer_of, left)]
    return {left: right for right, left in sorted(left_of.items(), key=lambda pair: pair[1])}


def maximum_chain_matching(successors: Sequence[Sequence[int]]) -> dict[int, int]:
    """Match as many vertices as possible, each to one that comes after it, directly or not, and none to the same.

    That is a maximum matching in the transitive closure, which is not made: what a vertex may be matched to is its
    successors, and what they may be matched to. A maximum matching of the graph's own edges is augmented (Kuhn 1955) by
    way of the nearest vertices. What a search in vain has seen leads nowhere, then or later, and is not seen again.

    O(V + E) memory, and O(V + E) steps for each of the augmentations at worst: as many as chains of edges exceed those
    of the closure. Few steps of each are taken where the next free vertex is near, as it is in networks.

    Args:
        successors: of each vertex of an acyclic graph.

    Example:
        Two paths cross in vertex 2, and both can go on behind it.

        >>> maximum_chain_matching([[2], [2], [3, 4], [], []])
        {0: 2, 1: 4, 2: 3}
    """
    right_of = maximum_matching(successors)
    left_of = {right: left for left, right in right_of.items()}
    dead: set[int] = set()
    for root in range(len(successors)):
        if root in right_of:
            continue
        reached_from, right = _nearest_unmatched(successors, left_of, dead, root)
        if right is None:
            dead |= reached_from.keys()
        while right is not None:
            left = left_of[right] = reached_from[right]
            right_of[left], right = right, right_of.get(left)
    return dict(sorted(right_of.items()))


def _nearest_unmatched(
    successors: Sequence[Sequence[int]], left_of: Mapping[int, int], dead: Set[int], root: int
) -> tuple[dict[int, int], int | None]:
    """From which left vertex each right one was reached, up to the first unmatched, and that one if there is one.

    Nearest is what fewest matches have to be changed for, and of those what fewest edges lead to.
    """
    reached_from: dict[int, int] = {}
    lefts = [root]
    while lefts:
        ahead = [(left, left) for left in lefts]
        lefts = []
        for left, at in ahead:  # grows meanwhile: what comes after a successor comes after the left vertex too
            for right in successors[at]:
                if right in dead or right in reached_from:
                    continue
                reached_from[right] = left
                if right not in left_of:
                    return reached_from, right
                lefts.append(left_of[right])
                ahead.append((left, right))
    return reached_from, None


def _layers(rows: Sequence[Sequence[int]], left_of: Mapping[int, int], frontier: Sequence[int]) -> dict[int, int]:
    """Right vertices to their distance from the free left ones, up to the first unmatched; empty if there are none."""
    layer_of: dict[int, int] = {}
    layer = 0
    while frontier:
        reached = dict.fromkeys(right for left in frontier for right in rows[left] if right not in layer_of)
        unmatched = [right for right in reached if right not in left_of]
        layer_of.update(dict.fromkeys(unmatched or reached, layer))
        if unmatched:
            return layer_of
        frontier = [left_of[right] for right in reached]
        layer += 1
    return {}


def _augment(rows: Sequence[Sequence[int]], left_of: dict[int, int], layer_of: dict[int, int], root: int) -> bool:
    """Flip one augmenting path from ``root``, one right vertex per layer, if there is one left.

    Vertices that were tried leave their layer: a path through them either was taken or leads nowhere.
    """
    lefts, rights, untried = [root], list[int](), [iter(rows[root])]
    while lefts:
        right = next((right for right in untried[-1] if layer_of.get(right) == len(rights)), None)
        if right is None:
            lefts.pop()
            untried.pop()
            del rights[-1:]
            continue
        del layer_of[right]
        rights.append(right)
        if right not in left_of:
            left_of.update(zip(rights, lefts, strict=True))
            return True
        lefts.append(left_of[right])
        untried.append(iter(rows[left_of[right]]))
    return False
