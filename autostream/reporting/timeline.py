"""Timelines as a Chrome trace, for Perfetto or ``chrome://tracing``: ``autostream trace``.

process "predicted"   stream 0        ▐── a ──▌     ▐── c ──▌      a lane for each stream;
                      stream 1             ╰─▸▐── b ──▌╯           arrows are waits;
                      critical path   ▐── a ──▌     ▐── c ──▌      its ops once more;
                      counters        memory in use, and utilization of the device
process "measured"    the same for a profiled run, if there was one

The format is Chrome's (Duca & Sinclair 2016, "Trace Event Format"): times are µs, names and arguments are data.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autostream.ir import FORK, JOIN, Costs, OpGraph, Schedule, Slice, Timeline
from autostream.scheduling.lost_time import longest_chain
from autostream.scheduling.overlap import demands
from autostream.scheduling.peak import Footprint

if TYPE_CHECKING:
    from autostream.reporting.report import Report

Event = dict[str, Any]
"""One entry of ``traceEvents``."""

_ARROW_US = 0.003
"""An arrow starts this long before the end of its slice: at the end itself viewers find the next slice. Viewers that
truncate to whole ns take start and duration up to 1 ns too short each."""

_MARKS = {FORK: "fork", JOIN: "join"}


def render(report: Report) -> str:
    """A report's timelines as a trace file, which has no events where nothing was scheduled.

    Example:
        >>> from autostream.reporting.report import Report
        >>> json.loads(render(Report("Net", "1x8:float32 on cpu, eval, no gradients", "plain")))["traceEvents"]
        []
    """
    device = report.profile.name if report.profile else ""
    about = {"model": report.model, "signature": report.signature, "device": device}
    trace = {"displayTimeUnit": "ns", "otherData": about, "traceEvents": [*events(report)]}
    return json.dumps(trace, allow_nan=False)


def events(report: Report) -> Iterator[Event]:
    """The events of the file: metadata, slices, arrows, marks and counters of each timeline."""
    graph, chosen, profile = report.graph, report.chosen, report.profile
    if graph is None or chosen is None or profile is None:
        return
    path = longest_chain(graph, report.costs, profile).ops
    for process, (name, timeline) in enumerate((("predicted", report.timeline), ("measured", report.measured))):
        if timeline is not None:
            lanes = _Process(process, graph, chosen.schedule, report.costs, timeline, path)
            yield from lanes.events(name)


@dataclass(frozen=True, slots=True)
class _Process:
    """One timeline, as a process of the trace.

    Attributes:
        number: 0 or 1; makes the ids of processes, lanes and arrows unique.
        critical: the ops of the longest chain, in order.
    """

    number: int
    graph: OpGraph
    schedule: Schedule
    costs: Costs
    timeline: Timeline
    critical: tuple[str, ...]

    def events(self, name: str) -> Iterator[Event]:
        """All events; a slice comes before the arrows that start and end in it."""
        path = self.schedule.streams
        yield self._metadata("process_name", 0, name=name)
        yield self._metadata("process_sort_index", 0, sort_index=self.number)
        for lane in range(path + 1):
            yield self._metadata("thread_name", lane, name=f"stream {lane}" if lane < path else "critical path")
            yield self._metadata("thread_sort_index", lane, sort_index=lane)
        slices = {piece.op: piece for piece in self.timeline.slices}
        for piece in slices.values():
            yield self._mark(piece) if piece.op in _MARKS else self._slice(piece, piece.stream, "op")
        yield from (self._slice(slices[op], path, "critical path") for op in self.critical)
        waits = ((before, launch.op) for launch in self.schedule.launches for before in launch.waits)
        for at, (before, after) in enumerate(wait for wait in waits if wait[0] not in _MARKS):
            yield from self._arrow(2 * at + self.number, slices[before], slices[after])
        yield from self._counters()

    def _slice(self, piece: Slice, lane: int, category: str) -> Event:
        start_us, end_us = round(piece.start_us, 3), round(piece.end_us, 3)
        op, cost = self.graph.ops[piece.op], self.costs[piece.op]
        slowdown = (end_us - start_us) / cost.duration_us if cost.duration_us else 1.0
        args = {
            "target": op.target,
            "source": op.source,
            "alone_us": round(cost.duration_us, 3),
            "slowdown": round(slowdown, 3),
        }
        return self._event("X", piece.op, lane, start_us, cat=category, dur=_dur_us(start_us, end_us), args=args)

    def _mark(self, piece: Slice) -> Event:
        """Fork and join as instant events, since they take no time; arrows need slices, so they have none."""
        return self._event("i", _MARKS[piece.op], piece.stream, piece.start_us, cat="mark", s="t", args={})

    def _arrow(self, number: int, before: Slice, after: Slice) -> Iterator[Event]:
        arrow = {"cat": "wait", "id": number, "args": {}}
        start_us, end_us = round(before.start_us, 3), round(before.end_us, 3)
        leaves_us = max(start_us, start_us + _dur_us(start_us, end_us) - _ARROW_US)
        yield self._event("s", "wait", before.stream, leaves_us, **arrow)
        yield self._event("f", "wait", after.stream, after.start_us, bp="e", **arrow)

    def _counters(self) -> Iterator[Event]:
        for at_us, size in Footprint(self.graph).in_use(self.timeline):
            yield self._event("C", "memory in use", 0, at_us, cat="memory", args={"bytes": size})
        for demand in demands(self.timeline, self.costs):
            shares = {"multiprocessors": demand.multiprocessors, "memory bandwidth": demand.bandwidth}
            args = {name: round(share, 3) for name, share in shares.items()}
            yield self._event("C", "shares asked for", 0, demand.at_us, cat="contention", args=args)

    def _metadata(self, kind: str, lane: int, **args: Any) -> Event:
        return self._event("M", kind, lane, 0.0, args=args)

    def _event(self, phase: str, name: str, lane: int, at_us: float, **more: Any) -> Event:
        # Perfetto reads 0 as Linux's idle process, and shares a lane's name among all lanes of one number.
        tid = 1 + self.number * (self.schedule.streams + 1) + lane
        return {"ph": phase, "name": name, "pid": self.number + 1, "tid": tid, "ts": round(at_us, 3), **more}


def _dur_us(start_us: float, end_us: float) -> float:
    """Duration of a slice, such that no viewer sees it overlap with one that starts at ``end_us``.

    Perfetto drops overlapping slices, and some versions truncate 0.57 µs to 569 ns, so a slice may be 1 ns shorter.

    Args:
        start_us: to three decimals.
        end_us: to three decimals.
    """
    return max(int(end_us * 1000.0) - round(start_us * 1000.0), 0) / 1000.0
