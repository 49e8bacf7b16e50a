"""Why each op is on its stream: what the policy says, else what the schedule and its simulated run show.

A policy decides op by op, so its reasons hold for its own schedules only; a search, which changes many at once, has
none for any of them. What can be seen is whether an op is where something that it needs is, and if not, what kept the
stream of what it needs busy meanwhile.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter

from autostream.ir import Candidate, OpGraph, Schedule, Slice, Timeline


def placements(graph: OpGraph, candidate: Candidate, timeline: Timeline | None) -> dict[str, str]:
    """The reason of each op, in launch order; empty where there is one stream.

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
    told = {decision.op: decision.reason for decision in schedule.decisions if decision.op}
    pinned: frozenset[str] = frozenset() if candidate.captured else graph.pinned
    view = _View(graph, schedule, pinned, {piece.op: piece for piece in timeline.slices} if timeline else {})
    return {launch.op: told.get(launch.op) or view.why(launch.op) for launch in schedule.launches}


@dataclass(frozen=True)
class _View:
    """A schedule as it is looked at: the ops that must be on stream 0, and when each op runs."""

    graph: OpGraph
    schedule: Schedule
    pinned: frozenset[str]
    runs: Mapping[str, Slice]

    @cached_property
    def place(self) -> Mapping[str, int]:
        """Op name to its place in launch order."""
        return {launch.op: at for at, launch in enumerate(self.schedule.launches)}

    @cached_property
    def lanes(self) -> Mapping[int, Sequence[Slice]]:
        """What each stream runs, one after the other."""
        found: dict[int, list[Slice]] = {}
        for launch in self.schedule.launches:
            if launch.op in self.runs:
                found.setdefault(launch.stream, []).append(self.runs[launch.op])
        return found

    def why(self, op: str) -> str:
        """What keeps an op on its stream, or kept it from the stream of what it needs."""
        stream, needed = self.schedule.stream_of, [*self.graph.digraph.predecessors(op)]
        here = [other for other in needed if stream[other] == stream[op]]
        if here:
            return f"needs {max(here, key=self.place.__getitem__)}, which is there"
        if op in self.pinned:
            return "must be on the caller's stream"
        if not needed and not stream[op]:
            return "the caller's stream, where nothing need be waited for"
        home = stream[max(needed, key=self.place.__getitem__)] if needed else 0
        other = self.beside(op, home)
        return f"stream {home} is busy with {other}" if other else "its stream is free then"

    def beside(self, op: str, stream: int) -> str:
        """The first op of another stream that runs at the same time as this one, or ``""``."""
        if op not in self.runs:
            return ""
        own, lane = self.runs[op], self.lanes.get(stream, ())
        at = bisect_right(lane, own.start_us, key=attrgetter("end_us"))
        return lane[at].op if at < len(lane) and lane[at].start_us < own.end_us else ""
