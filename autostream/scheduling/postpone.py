"""Launching ops later to save memory: the slack of each launch (:func:`delayed`), and launch orders that use it.

List schedules start an op as soon as a stream is free. No later start makes the run faster. But copies of weights,
which depend on nothing, are then all made in the first microseconds and stay in memory until they are used. In the same
way, branches that are added up are all computed before the first sum.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from autostream.ir import JOIN, Assignment, OpGraph, Schedule, Timeline
from autostream.scheduling.peak import Footprint

MAX_SLACK_SHARE = 0.9
"""The share of its slack that a launch should use up at most: simulations are not exact."""


def delayed(schedule: Schedule, timeline: Timeline, edge_us: float, share: float) -> Timeline:
    """When each launch runs if all start later by a share of their slack.

        stream 0:  a ───── b ───── c ───── d       x ends long before c needs it: its slack is the time between
        stream 1:  x ······▸ x                     its earliest and its latest start

    The earliest and the latest starts are those of the critical path method (Kelley & Walker 1959, "Critical-path
    planning and scheduling"), over stream order and waits. Both respect every dependency, and so do all starts between.
    Durations are taken to stay the same, although other ops may now run at the same time. Takes O(V + W) steps for V
    launches with W waits.

    Args:
        schedule: the launches with their waits.
        timeline: the earliest start and end of each.
        edge_us: what an edge between streams takes, µs.
        share: 0 to 1; with 1, rounding errors may start an op slightly before the end of one that it depends on.

    Example:
        >>> from autostream.ir import Launch, Slice
        >>> schedule = Schedule("mine", 2, (Launch("a", 0), Launch("x", 1), Launch("b", 0, ("x",))))
        >>> times = {"a": (0, 9), "x": (0, 2), "b": (9, 12)}
        >>> timeline = Timeline(tuple(Slice(n, int(n == "x"), *map(float, t)) for n, t in times.items()))
        >>> [(s.op, s.start_us) for s in delayed(schedule, timeline, edge_us=1.0, share=0.5).slices]
        [('a', 0.0), ('x', 3.0), ('b', 9.0)]
    """
    if not share:
        return timeline
    start, end = timeline.starts, timeline.ends
    successors: dict[str, list[str]] = defaultdict(list)
    last: dict[int, str] = {}
    for launch in schedule.launches:
        for before in (*launch.waits, *([last[launch.stream]] if launch.stream in last else [])):
            successors[before].append(launch.op)
        last[launch.stream] = launch.op
    for before in schedule.join_waits:
        successors[before].append(JOIN)
    last_end, slack = max(end.values(), default=0.0), dict.fromkeys(start.keys() - schedule.stream_of.keys(), 0.0)
    for launch in reversed(schedule.launches):
        op = launch.op
        gaps = ((after, start[after] - end[op]) for after in successors[op])
        slacks = (slack[after] + gap - min(gap, edge_us) for after, gap in gaps)
        slack[op] = max(0.0, min(slacks, default=last_end - end[op]))
    delay = {op: share * us for op, us in slack.items()}
    return replace(
        timeline,
        slices=tuple(
            replace(s, start_us=s.start_us + delay[s.op], end_us=s.end_us + delay[s.op]) for s in timeline.slices
        ),
    )


LEAD = 3
"""Margin between the end of a postponed op and the start of the first op that needs it, in edges between streams: no
start is known to the microsecond."""


def postponed(graph: OpGraph, schedule: Schedule, timeline: Timeline, edge_us: float) -> Assignment:
    """The same streams, with each op that allocates more memory than it frees launched just before it is needed.

        stream 0:  a ─── b ─── c ─── d         needs w at c, x at d             stream 0:  a ─── b ─── c ─── d
        stream 1:  w ─ x ─ y ─ z               before: all made at the start    stream 1:       w ──── x ── y …

    All others keep their time, and a postponed op stays before those that need it. The run takes about as long unless
    postponed ops delay others on their streams; only a simulation can say. O(V log V + E) steps for V ops and E
    dependencies.

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
    freed = footprint.freed_bytes(timeline)
    order = [launch.op for launch in schedule.launches]
    moment: dict[str, float] = {}
    for op in reversed(order):
        moment[op] = start[op]
        needed = min((moment[after] for after in graph.digraph.successors(op)), default=None)
        if needed is not None and footprint.allocated_bytes[op] > freed[op]:
            moment[op] = max(start[op], needed - LEAD * edge_us - (end[op] - start[op]))
    late = tuple(sorted(order, key=moment.__getitem__))  # at one moment, in the order of launches
    return Assignment(schedule.policy, schedule.streams, late, dict(schedule.stream_of), schedule.decisions)


def in_program_order(graph: OpGraph, schedule: Schedule) -> Assignment:
    """The same streams with the launch order of a single stream, which takes about as much memory.

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
