"""Minimum path cover: the fewest paths that cover every op, each on its own stream as long as there are enough.

1. Reduce the graph to its minimum equivalent graph: dependencies that others imply need no wait.
2. Cover it with as few disjoint paths as possible: match each op to at most one direct successor and each successor
   to at most one op (Fulkerson 1956, "Note on Dilworth's decomposition theorem for partially ordered sets"). Ops of one
   path depend on each other, so ops that may run at the same time are on different paths, and matched dependencies need
   no wait (Kwon et al., "Nimble: lightweight and parallel GPU task scheduling for deep learning", NeurIPS 2020).
3. Assign the paths to streams: a path goes to a stream whose last path ends before it can begin (interval
   partitioning: Kleinberg & Tardos 2005, section 4.1), else to an unused stream, else to the one that is free first.

Collectives are on a stream of their own, whatever their path (:mod:`~autostream.scheduling.communication`), and so are
ops that follow them, if two streams are left for the others.

Launches are issued in the order of their earliest possible starts, those that follow collectives last. Costs matter
only for step 3 and this order.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

from autostream.ir import Assignment, Costs, Decision, DeviceProfile, OpGraph
from autostream.scheduling.bitsets import reduction
from autostream.scheduling.communication import followers_last, placed_apart, set_apart
from autostream.scheduling.matching import maximum_matching
from autostream.scheduling.structure import top_levels


def path_cover(
    graph: OpGraph, costs: Costs, profile: DeviceProfile, streams: int, pinned: frozenset[str]
) -> Assignment:
    """Cover the graph with paths on at most ``streams`` streams; ``pinned`` ops are on stream 0 whatever their path.

    O(E·V/30) digit operations for the reduction, and O(E·√V) steps at worst for the matching.

    Example:
        >>> from autostream.ir import Op, OpCost
        >>> ops = {name: Op(name, "f", (name,), frozenset(), frozenset({name})) for name in "ab"}
        >>> costs = {name: OpCost(9.0, 0.1, 0.1, "roofline") for name in "ab"}
        >>> profile = DeviceProfile("GPU", 132, 4.8e6, {}, 2.0, 1.0, 2.0, 1.0, 1.0, "table")
        >>> path_cover(OpGraph(ops, (), {}, (), "cuda:0"), costs, profile, 4, frozenset()).stream
        {'a': 0, 'b': 1}
    """
    earliest = top_levels(graph, costs)
    paths, (apart, following) = minimum_path_cover(graph), placed_apart(graph, streams, pinned)
    spare = bool(following) and streams - bool(apart) > 2
    stream_of_path = _assign_streams(paths, earliest, costs, streams - bool(apart) - spare)
    stream = {name: at for path, at in zip(paths, stream_of_path, strict=True) for name in path}
    stream.update(dict.fromkeys(pinned & graph.ops.keys(), 0))
    for own in (following - pinned if spare else (), apart):
        stream = set_apart(stream, own) if own else stream
    used = max(stream.values(), default=0) + 1
    return Assignment(
        policy="path_cover",
        streams=used,
        order=tuple(followers_last(sorted(graph.ops, key=earliest.__getitem__), following)),
        stream={name: stream[name] for name in graph.ops},
        decisions=_decisions(paths, stream, used, pinned),
    )


def minimum_path_cover(graph: OpGraph) -> tuple[tuple[str, ...], ...]:
    """The fewest disjoint paths of the minimum equivalent graph that cover every op, in order of their first ops."""
    names = list(graph.ops)
    following = maximum_matching(reduction(graph.successors))
    heads = sorted(set(range(len(names))) - set(following.values()))
    return tuple(tuple(names[at] for at in _walk(head, following)) for head in heads)


def _walk(head: int, following: Mapping[int, int]) -> list[int]:
    path = [head]
    while path[-1] in following:
        path.append(following[path[-1]])
    return path


def _assign_streams(
    paths: tuple[tuple[str, ...], ...], earliest: Mapping[str, float], costs: Costs, streams: int
) -> tuple[int, ...]:
    """A stream for each path, chosen in order of the paths' earliest starts."""
    ends: list[float] = []
    chosen = {}
    for path in sorted(paths, key=lambda path: earliest[path[0]]):
        begin, end = earliest[path[0]], earliest[path[-1]] + costs[path[-1]].duration_us
        work = sum(costs[name].duration_us for name in path)
        stream = min(range(len(ends)), key=ends.__getitem__, default=0)
        if ends and ends[stream] <= begin:
            ends[stream] = end
        elif len(ends) < streams:
            stream = len(ends)
            ends.append(end)
        else:
            ends[stream] = max(end, ends[stream] + work)
        chosen[path] = stream
    return tuple(chosen[path] for path in paths)


def _decisions(
    paths: tuple[tuple[str, ...], ...], stream: Mapping[str, int], used: int, pinned: Set[str]
) -> tuple[Decision, ...]:
    whole = Decision("", f"{used} stream{'s' * (used > 1)}", f"{len(paths)} paths hold every op, and no fewer do")
    # Neither length nor last op of a path: its ops may be chains, of which only the first ops are known here.
    begun = tuple(
        Decision(path[0], f"stream {stream[path[0]]}", f"begins path {number} of {len(paths)}")
        for number, path in enumerate(paths, 1)
        if stream[path[0]]
    )
    of_path = {path: next((stream[name] for name in path if name not in pinned), 0) for path in paths}
    moved = tuple(
        Decision(name, "stream 0", f"must be on the caller's stream; its path is on stream {at}")
        for path, at in of_path.items()
        for name in path
        if at and name in pinned
    )
    return (whole, *begun, *moved)
