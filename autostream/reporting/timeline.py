"""When each op runs, for a trace viewer: ``autostream trace``, to be opened in Perfetto or ``chrome://tracing``.

process "predicted"   stream 0        ▐── a ──▌     ▐── c ──▌      a lane for each stream;
                      stream 1             ╰─▸▐── b ──▌╯           arrows are waits;
                      critical path   ▐── a ──▌     ▐── c ──▌      what must be in line, at the same times;
                      counters        memory in use, and how much of the device is asked for
process "measured"    the same of a run that a profiler watched, if one did

The format is Chrome's (Duca & Sinclair 2016, "Trace Event Format"): times are µs, names and arguments are data.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autostream.ir import FORK, JOIN, Costs, OpGraph, Schedule, Slice, Timeline
from autostream.scheduling.losses import longest_chain
from autostream.scheduling.overlap import demands
from autostream.scheduling.peak import Footprint

if TYPE_CHECKING:
    from autostream.reporting.report import Report

Event = dict[str, Any]
"""One entry of ``traceEvents``."""

_ARROW_US = 0.003
"""An arrow leaves a slice so long before its end: at the end itself viewers look for the next one, and those that cut
times to whole ns take start and duration for up to 1 ns less each."""

_MARKS = {FORK: "fork", JOIN: "join"}


def render(report: Report) -> str:
    """A report's timelines as a trace file; without events where nothing was scheduled.

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
    """What is in the file: metadata, slices, arrows, marks and counters of each timeline."""
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
    """One timeline.

    Attributes:
        number: 0 or 1, which keeps it and its arrows apart from the other one and its arrows.
        critical: the ops of the longest chain, in order.
    """

    number: int
    graph: OpGraph
    schedule: Schedule
    costs: Costs
    timeline: Timeline
    critical: tuple[str, ...]

    def events(self, name: str) -> Iterator[Event]:
        """All of them, lane by lane; a slice comes before the arrows that start and end in it."""
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
        """Fork and join take no time, so they are no slices; and arrows, which need slices, do not show them."""
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
        # Perfetto takes 0 for the idle process of Linux, and a lane's name for that of all lanes of its number.
        tid = 1 + self.number * (self.schedule.streams + 1) + lane
        return {"ph": phase, "name": name, "pid": self.number + 1, "tid": tid, "ts": round(at_us, 3), **more}


def _dur_us(start_us: float, end_us: float) -> float:
    """How long a slice is drawn, such that no reader sees it end after ``end_us``, where the next one may start.

    Perfetto drops slices that overlap, and some of its versions multiply and cut, which makes 569 ns of 0.57 µs. So
    a slice may have to be 1 ns shorter than it was.

    Args:
        start_us: to three decimals.
        end_us: to three decimals.
    """
    return max(int(end_us * 1000.0) - round(start_us * 1000.0), 0) / 1000.0
