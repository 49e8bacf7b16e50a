"""Maximum matchings on adjacency lists: in a bipartite graph, and in the closure of an acyclic one.

The matching of ``networkx`` recurses, and visits vertices in the order of their hashes, which differs between runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set


def maximum_matching(rows: Sequence[Sequence[int]]) -> dict[int, int]:
    """Match as many left vertices as possible, each to a different right vertex of its row.

    The algorithm of Hopcroft & Karp 1973: at most O(√V) rounds of O(V + E) steps, each of which flips a maximal set of
    disjoint shortest augmenting paths.

    Args:
        rows: for each left vertex, the right vertices that it may be matched to.

    Returns:
        Left vertex to right vertex; the same matching every time.

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
    """Match as many vertices as possible, each to a different vertex that is reachable from it.

    That is a maximum matching in the transitive closure, but the closure is not computed. A maximum matching of the
    graph's own edges is augmented (Kuhn 1955), with a breadth-first search for the nearest unmatched vertex. Vertices
    that a failed search has visited lead to no unmatched one, then or later, and are not visited again.

    Takes O(V + E) memory, and at worst O(V + E) steps for each augmentation. The number of augmentations is the
    difference in size between the two matchings. Each takes few steps where the next unmatched vertex is near, as it is
    in neural networks.

    Args:
        successors: of each vertex of an acyclic graph.

    Example:
        Two paths cross in vertex 2, and both continue after it.

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
    """The left vertex from which each right one was reached, up to the first unmatched one, and that one if any.

    The nearest vertex is the one for which the fewest matches change; of equal ones, the one over the fewest edges.
    """
    reached_from: dict[int, int] = {}
    lefts = [root]
    while lefts:
        ahead = [(left, left) for left in lefts]
        lefts = []
        for left, at in ahead:  # grows in the loop: vertices after a successor come after the left vertex too
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
    """The distance of right vertices from the free left ones, up to the first unmatched; empty if there is none."""
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
    """Flip one augmenting path from ``root``, with one right vertex per layer; whether there was one.

    Visited vertices are removed from their layer: a path through them was already used, or does not exist.
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
