"""Slack: how much later each launch may start without anything that comes after it being late.

    stream 0:  a ───── b ───── c ───── d       x ends long before c needs it: between its earliest and its latest start
    stream 1:  x ······▸ x                     lies its slack

The earliest and the latest starts are those of the critical path method (Kelley & Walker 1959, "Critical-path planning
and scheduling"), over stream order and waits.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from autostream.ir import JOIN, Schedule, Timeline

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
