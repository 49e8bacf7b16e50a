"""Waits: the fewest that make an assignment of ops to streams correct.

Glossary:

- A *point* is an op, ``FORK`` or ``JOIN``, represented by its position in launch order; ``FORK`` is at 0.
- The *clock* of a point holds, for each stream, the position of the latest point there that happens before it, itself
  included, or ``NEVER``. All earlier points of that stream happen before it as well.

``FORK`` is a producer of every op and ``JOIN`` a consumer of every op, both on stream 0. So forking and joining side
streams needs no special case.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from autostream.errors import ScheduleError
from autostream.ir import FORK, JOIN, Assignment, Launch, OpGraph, Schedule
from autostream.scheduling.lifetimes import NEVER


def synchronize(graph: OpGraph, assignment: Assignment) -> Schedule:
    """Add the fewest waits that cover every dependency, the fork and the join.

    They are the cross-stream edges of the transitive reduction of stream order, dependencies, ``FORK`` before every op
    and every op before ``JOIN``. Each of those edges is the only path between its ends, so every correct schedule has
    it. Together they have the same transitive closure, so no op waits for one that it does not depend on. This is the
    plan of fewest synchronizations at maximum logical concurrency of Nimble (Kwon et al., NeurIPS 2020), for streams
    that are already assigned. Takes O((V + E) K) steps, and K² for each op that waits for K streams.

    Args:
        graph: V ops and E dependencies.
        assignment: K streams, and a launch order in which every dependency points forward.

    Returns:
        The launches in the assignment's order, with waits in launch order of their producers; nothing is released.

    Raises:
        ScheduleError: the order is not a topological order of the graph's ops.

    Example:
        ``b`` runs on a side stream; ``c`` waits for it, so the join need not.

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
    stream = [0, *map(assignment.stream.__getitem__, assignment.order), 0]
    waits = [tuple([points[at] for at in needed]) for needed in _waits(stream, _producers(graph, points))]
    launches = tuple(map(Launch, assignment.order, stream[1:], waits[1:]))
    return Schedule(assignment.policy, assignment.streams, launches, waits[-1], assignment.decisions)


def _check_complete(graph: OpGraph, assignment: Assignment) -> None:
    """Raise unless the order holds every op once."""
    if len(assignment.order) == len(graph.ops) and graph.ops.keys() == set(assignment.order):
        return
    launched = Counter(assignment.order)
    for op in {**graph.ops, **launched}:
        if launched[op] != 1 or op not in graph.ops:
            known = "an op" if op in graph.ops else "no op"
            raise ScheduleError(
                f"policy {assignment.policy!r} launches {op!r} {launched[op]} times, and it is {known} of the graph; "
                "an order holds every op of the graph exactly once"
            )


def _producers(graph: OpGraph, points: Sequence[str]) -> list[list[int]]:
    """The positions of the points that each point must come after; raises if one is launched later."""
    position = {point: index for index, point in enumerate(points)}
    producers: list[list[int]] = [[], *([0] for _ in graph.ops), list(range(len(points) - 1))]
    for dependency in graph.dependencies:
        before, after = position[dependency.before], position[dependency.after]
        if before >= after:
            raise ScheduleError(
                f"{dependency.after!r} is launched before {dependency.before!r}, but must come after it "
                f"({dependency.hazard.value} of {dependency.resource!r}); the launch order must be topological"
            )
        producers[after].append(before)
    return producers


def _waits(stream: Sequence[int], producers: Sequence[Sequence[int]]) -> Iterator[Sequence[int]]:
    """The cross-stream edges of the transitive reduction: for each point, the producers that it waits for."""
    streams = max(stream) + 1
    clocks: list[Sequence[int]] = []
    ends: list[Sequence[int]] = [[NEVER] * streams] * streams
    for position, here in enumerate(stream):
        # Later points of a stream imply earlier ones, so one candidate per stream is enough. Points before the end of
        # this stream, its own ops among them, need no wait.
        end = ends[here]
        latest: dict[int, int] = {}
        for producer in producers[position]:
            there = stream[producer]
            if producer > end[there] and producer > latest.get(there, NEVER):
                latest[there] = producer
        needed = _not_implied(latest, clocks) if len(latest) > 1 else [*latest.values()]
        clock = list(map(max, end, *(clocks[producer] for producer in needed))) if needed else [*end]
        clock[here] = position
        clocks.append(clock)
        ends[here] = clock
        yield needed


def _not_implied(latest: Mapping[int, int], clocks: Sequence[Sequence[int]]) -> Sequence[int]:
    """Those of these points, one per stream, that happen before none of the others, in launch order."""
    return sorted(
        producer
        for there, producer in latest.items()
        if not any(clocks[other][there] >= producer for other in latest.values() if other != producer)
    )
