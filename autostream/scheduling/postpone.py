"""Launching later: how long each launch can be put off (`delayed`), and the orders that save memory so.

List schedules start an op as soon as a stream is free. That is as good as any later start while time is all that
counts. But copies of weights, which depend on nothing, are then all made in the first microseconds, and all of them lie
in memory until they are used. In the same way, branches that are added up are all computed before the first sum.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from autostream.ir import JOIN, Assignment, OpGraph, Schedule, Timeline
from autostream.scheduling.peak import Footprint

MOST = 0.9
"""The share of its slack that a launch should use up at most: the last bit is left, for no simulation is exact."""


def delayed(schedule: Schedule, timeline: Timeline, edge_us: float, share: float) -> Timeline:
    """When each launch runs if all start later by a share of their slack.

    Nothing starts before what it must come after has ended: that holds for the earliest starts and
    for the latest ones, so also in between. Ops that then run beside others than before are taken to run as long. Takes
    O(V + W) steps for V launches with W waits.

    Args:
        schedule: the launches with their waits.
        timeline: when each of them starts and ends; as early as it can.
        edge_us: what an edge between streams takes, µs.
        share: 0 to 1; with all of it, roundings may start an op a bit before the end of one that it needs.

    Example:
        >>> from autostream.ir import Launch, Slice
        >>> schedule = Schedule("mine", 2, (Launch("a", 0), Launch("x", 1), Launch("b", 0, ("x",))))
        >>> times = {"a": (0, 9), "x": (0, 2), "b": (9, 12)}
        >>> timeline = Timeline(tuple(Slice(n, int(n == "x"), *map(float, t)) for n, t in times.items()))
        >>> [(piece.op, piece.start_us) for piece in delayed(schedule, timeline, edge_us=1.0, share=0.5).slices]
        [('a', 0.0), ('x', 3.0), ('b', 9.0)]
    """
    if not share:
        return timeline
    start, end = timeline.starts, timeline.ends
    behind: dict[str, list[str]] = defaultdict(list)
    last: dict[int, str] = {}
    for launch in schedule.launches:
        for before in (*launch.waits, *([last[launch.stream]] if launch.stream in last else [])):
            behind[before].append(launch.op)
        last[launch.stream] = launch.op
    for before in schedule.join_waits:
        behind[before].append(JOIN)
    over, slack = max(end.values(), default=0.0), dict.fromkeys(start.keys() - schedule.stream_of.keys(), 0.0)
    for launch in reversed(schedule.launches):
        op = launch.op
        gaps = ((after, start[after] - end[op]) for after in behind[op])
        room = (slack[after] + gap - min(gap, edge_us) for after, gap in gaps)
        slack[op] = max(0.0, min(room, default=over - end[op]))
    later = {op: share * us for op, us in slack.items()}
    return replace(
        timeline,
        slices=tuple(
            replace(piece, start_us=piece.start_us + later[piece.op], end_us=piece.end_us + later[piece.op])
            for piece in timeline.slices
        ),
    )


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
