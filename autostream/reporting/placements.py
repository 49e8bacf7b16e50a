"""Why each op is on its stream: the policy's reason, else one derived from the schedule and its simulated run.

The search policy has no reasons for single ops. For these, the reason is a predecessor on the same stream, or the op
that kept the predecessor's stream busy.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter

from autostream.ir import Candidate, OpGraph, Schedule, Slice, Timeline


def placements(graph: OpGraph, candidate: Candidate, timeline: Timeline | None) -> dict[str, str]:
    """The reason for each op's stream, in launch order; empty for one stream.

    Args:
        graph: the ops.
        candidate: a schedule of them.
        timeline: its simulated run, if there is one.

    Example:
        >>> from autostream.ir import FORK, Launch, Op
        >>> ops = {name: Op(name, "f", (name,), frozenset(), frozenset({name})) for name in "ab"}
        >>> beside = Schedule("search", 2, (Launch("a", 0), Launch("b", 1, waits=(FORK,))), join_waits=("b",))
        >>> run = Timeline((Slice("a", 0, 0.0, 9.0), Slice("b", 1, 1.0, 10.0)))
        >>> placements(OpGraph(ops, (), {}, (), "cuda:0"), Candidate(beside, True, 10.0), run)["b"]
        'stream 0 is busy with a'
    """
    schedule = candidate.schedule
    if schedule.streams == 1:
        return {}
    reasons = {decision.op: decision.reason for decision in schedule.decisions if decision.op}
    pinned: frozenset[str] = frozenset() if candidate.captured else graph.pinned
    view = _View(graph, schedule, pinned, {piece.op: piece for piece in timeline.slices} if timeline else {})
    return {launch.op: reasons.get(launch.op) or view.why(launch.op) for launch in schedule.launches}


@dataclass(frozen=True)
class _View:
    """A schedule, the ops that must be on stream 0, and the slice of each op."""

    graph: OpGraph
    schedule: Schedule
    pinned: frozenset[str]
    runs: Mapping[str, Slice]

    @cached_property
    def position(self) -> Mapping[str, int]:
        """Op name to its position in launch order."""
        return {launch.op: at for at, launch in enumerate(self.schedule.launches)}

    @cached_property
    def lanes(self) -> Mapping[int, Sequence[Slice]]:
        """The slices of each stream, in order."""
        lanes: dict[int, list[Slice]] = {}
        for launch in self.schedule.launches:
            if launch.op in self.runs:
                lanes.setdefault(launch.stream, []).append(self.runs[launch.op])
        return lanes

    def why(self, op: str) -> str:
        """The reason for an op's stream."""
        stream, needed = self.schedule.stream_of, [*self.graph.digraph.predecessors(op)]
        here = [other for other in needed if stream[other] == stream[op]]
        if here:
            return f"needs {max(here, key=self.position.__getitem__)}, which is there"
        if op in self.pinned:
            return "must be on the caller's stream"
        if not needed and not stream[op]:
            return "the caller's stream, where nothing need be waited for"
        home = stream[max(needed, key=self.position.__getitem__)] if needed else 0
        other = self.beside(op, home)
        return f"stream {home} is busy with {other}" if other else "its stream is free then"

    def beside(self, op: str, stream: int) -> str:
        """The first op of a stream that runs at the same time as this one, or ``""``."""
        if op not in self.runs:
            return ""
        run, lane = self.runs[op], self.lanes.get(stream, ())
        at = bisect_right(lane, run.start_us, key=attrgetter("end_us"))
        return lane[at].op if at < len(lane) and lane[at].start_us < run.end_us else ""
