"""Just in time: what takes memory is launched when its result is needed, not when a stream happens to be free.

    stream 0:  a ─── b ─── c ─── d         needs w at c, x at d             stream 0:  a ─── b ─── c ─── d
    stream 1:  w ─ x ─ y ─ z               before: all there from the start  stream 1:       w ──── x ── y …

List schedules start an op as soon as a stream is free. That is as good as any later start while time is all that
counts; but copies of weights, which depend on nothing, are then all made in the first microseconds, and all of them lie
in memory until they are used. Branches that are added up are all computed before the first sum, in the same way: in the
order of the program, each is used as soon as it is there.
"""

from __future__ import annotations

from autostream.ir import Assignment, OpGraph, Schedule, Timeline
from autostream.scheduling.footprint import Footprint

LEAD = 3
"""Edges between streams that lie between the end of an op and the start of the first that needs it: no start is known
to the microsecond."""


def postponed(graph: OpGraph, schedule: Schedule, timeline: Timeline, edge_us: float) -> Assignment:
    """The same streams, where each op that takes more memory than it frees is launched as late as is safe.

    All others keep their time, and what is postponed never passes an op that needs it. So the run takes about as long,
    as far as the ops that come later have their stream to themselves then: the simulator has to tell. O(V log V + E)
    steps for V ops and E dependencies.

    Args:
        graph: the ops with their accesses, and the storages.
        schedule: the launches.
        timeline: when each of them starts and ends.
        edge_us: what an edge between streams takes, µs.

    Example:
        ``w`` is a copy of a weight that ``b`` needs.

        >>> from autostream.ir import Dependency, Hazard, Launch, Op, Role, Slice, Storage
        >>> reads = {"w": "weight", "x": "a", "a": "input", "b": "w"}
        >>> ops = {n: Op(n, "f", (n,), frozenset({r}), frozenset({n}), frozenset({n})) for n, r in reads.items()}
        >>> storages = {n: Storage(n, Role.INTERMEDIATE, 512, (n,)) for n in ops}
        >>> after = tuple(Dependency(u, v, Hazard.RAW, u) for u, v in ("ax", "xb", "wb"))
        >>> graph = OpGraph(ops, after, storages, (), "cuda:0")
        >>> launches = (Launch("w", 1), Launch("a", 0), Launch("x", 0), Launch("b", 0))
        >>> times = {"w": (0, 2), "a": (0, 9), "x": (9, 20), "b": (20, 30)}
        >>> timeline = Timeline(tuple(Slice(n, int(n == "w"), *map(float, t)) for n, t in times.items()))
        >>> postponed(graph, Schedule("mine", 2, launches), timeline, edge_us=1.0).order
        ('a', 'x', 'w', 'b')
    """
    start, end = timeline.starts, timeline.ends
    footprint = Footprint(graph)
    freed = footprint.freed(timeline)
    order = [launch.op for launch in schedule.launches]
    moment: dict[str, float] = {}
    for op in reversed(order):
        moment[op] = start[op]
        needed = min((moment[after] for after in graph.digraph.successors(op)), default=None)
        if needed is not None and footprint.taken[op] > freed[op]:
            moment[op] = max(start[op], needed - LEAD * edge_us - (end[op] - start[op]))
    late = tuple(sorted(order, key=moment.__getitem__))  # at one moment, as they were launched
    return Assignment(schedule.policy, schedule.streams, late, dict(schedule.stream_of), schedule.decisions)


def in_program_order(graph: OpGraph, schedule: Schedule) -> Assignment:
    """The same streams, launched as one stream would be: what lies in memory meanwhile is about as much for each.

    Args:
        graph: the ops.
        schedule: the launches.

    Example:
        >>> from autostream.ir import Launch, Op
        >>> ops = {name: Op(name, "f", (name,), frozenset(), frozenset(), frozenset()) for name in "axby"}
        >>> launches = (Launch("a", 0), Launch("b", 1), Launch("x", 0), Launch("y", 1))
        >>> in_program_order(OpGraph(ops, (), {}, (), "cuda:0"), Schedule("mine", 2, launches)).order
        ('a', 'x', 'b', 'y')
    """
    return Assignment(schedule.policy, schedule.streams, tuple(graph.ops), schedule.stream_of, schedule.decisions)
