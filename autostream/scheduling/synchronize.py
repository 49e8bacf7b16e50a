"""Waits: how few of them make an assignment of ops to streams correct.

Glossary:

- A *point* is an op, ``FORK`` or ``JOIN``; it is named here by its position in launch order, ``FORK`` at 0.
- The *clock* of a point holds, for each stream, the position of the latest point there that happens-before it, itself
  included, or ``NEVER``. What a stream did up to that position has happened as well, so a clock says it all.

``FORK`` is a producer of every op and ``JOIN`` a consumer of every op, both on stream 0. With that, forking side
streams off and joining them again needs no rule of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from autostream.errors import ScheduleError
from autostream.ir import FORK, JOIN, Assignment, Launch, OpGraph, Schedule

NEVER = -1


def synchronize(graph: OpGraph, assignment: Assignment) -> Schedule:
    """Add the fewest waits that cover every dependency, the fork and the join.

    They are the cross-stream edges of the transitive reduction of stream order, dependencies, ``FORK`` before every op
    and every op before ``JOIN``. Each of those edges is the only path between its ends, so no plan can go without it,
    and together they have the same transitive closure, so no op waits for anything that it did not have to wait for:
    the plan of fewest synchronisations at maximum logical concurrency of Nimble (Kwon et al., NeurIPS 2020), found for
    streams that are already given. Takes O((V + E) K) steps, and K² for each op that waits for K streams.

    Args:
        graph: V ops and E dependencies.
        assignment: K streams, and a launch order in which every dependency points forward.

    Returns:
        The launches in the assignment's order, with waits in launch order of their producers; nothing is released.

    Raises:
        ScheduleError: the order is not a topological order of the graph's ops.

    Example:
        ``b`` runs aside; that ``c`` waits for it makes a join wait needless.

        >>> from autostream.ir import Dependency, Hazard, Op
        >>> none = frozenset()
        >>> ops = {name: Op(name, "aten.relu.default", (name,), reads=none, writes=none) for name in "abc"}
        >>> after = [Dependency(u, v, Hazard.RAW, u) for u, v in ("ab", "ac", "bc")]
        >>> graph = OpGraph(ops, tuple(after), {}, (), "cuda:0")
        >>> schedule = synchronize(graph, Assignment("mine", 2, ("a", "b", "c"), {"a": 0, "b": 1, "c": 0}))
        >>> [(launch.op, launch.waits) for launch in schedule.launches], schedule.join_waits
        ([('a', ()), ('b', ('a',)), ('c', ('b',))], ())
    """
    _check_complete(graph, assignment)
    points = (FORK, *assignment.order, JOIN)
    waits = _waits(points, {**assignment.stream, FORK: 0, JOIN: 0}, _producers(graph, points), assignment.streams)
    launches = tuple(Launch(op, assignment.stream[op], waits[op]) for op in assignment.order)
    return Schedule(assignment.policy, assignment.streams, launches, waits[JOIN], assignment.decisions)


def _check_complete(graph: OpGraph, assignment: Assignment) -> None:
    """Raise unless the order holds every op once."""
    launched = Counter(assignment.order)
    for op in {**graph.ops, **launched}:
        if launched[op] != 1 or op not in graph.ops:
            known = "an op" if op in graph.ops else "no op"
            raise ScheduleError(
                f"policy {assignment.policy!r} launches {op!r} {launched[op]} times, and it is {known} of the graph; "
                "an order holds every op of the graph exactly once"
            )


def _producers(graph: OpGraph, points: Sequence[str]) -> Mapping[str, Sequence[int]]:
    """What each point must come after, as positions; raises where that is launched later."""
    position = {point: index for index, point in enumerate(points)}
    producers: dict[str, list[int]] = {point: [position[FORK]] for point in points}
    producers[FORK] = []
    producers[JOIN] = list(range(len(points) - 1))
    for dependency in graph.dependencies:
        before, after = dependency.before, dependency.after
        if position[before] >= position[after]:
            raise ScheduleError(
                f"{after!r} is launched before {before!r}, but must come after it "
                f"({dependency.hazard.value} of {dependency.resource!r}); the launch order must be topological"
            )
        producers[after].append(position[before])
    return producers


def _waits(
    points: Sequence[str], stream: Mapping[str, int], producers: Mapping[str, Sequence[int]], streams: int
) -> Mapping[str, tuple[str, ...]]:
    """The cross-stream edges of the transitive reduction, by consumer."""
    clocks: list[list[int]] = []
    ends = [[NEVER] * streams for _ in range(streams)]
    waits: dict[str, tuple[str, ...]] = {}
    for position, point in enumerate(points):
        here = stream[point]
        # Later points of a stream imply earlier ones, so one candidate per stream is enough; those that this stream's
        # end has seen, its own ops among them, need no wait.
        latest: dict[int, int] = {}
        for producer in producers[point]:
            there = stream[points[producer]]
            latest[there] = max(latest.get(there, NEVER), producer)
        candidates = [(there, producer) for there, producer in latest.items() if producer > ends[here][there]]
        needed = sorted(
            producer
            for there, producer in candidates
            if not any(clocks[other][there] >= producer for _, other in candidates if other != producer)
        )
        clock = [max(seen) for seen in zip(ends[here], *(clocks[producer] for producer in needed), strict=True)]
        clock[here] = position
        clocks.append(clock)
        ends[here] = clock
        waits[point] = tuple(points[producer] for producer in needed)
    return waits
