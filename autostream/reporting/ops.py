"""The table of a report's ops: selection, folding of similar ops into one row, sorting and columns.

launches ──stream, critical path, costliest──▶ ops shown ──fold similar ones──▶ rows ──sort──▶ columns
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from autostream.errors import OptionError
from autostream.ir import Launch, Schedule
from autostream.reporting.summary import Summary
from autostream.reporting.tables import few, line, source, table

if TYPE_CHECKING:
    from autostream.reporting.report import Report

FOLDED = 40
"""More ops than this do not fit on a screen: similar ones share a row, unless a number of ops is asked for."""


@dataclass(frozen=True, slots=True)
class Row:
    """One op, or several similar ones: the same target, source line, cost and utilization.

    Attributes:
        launch: position of the first in launch order.
        ops: their names, in launch order.
        target: of the call.
        streams: theirs.
        start: simulated start of the first, µs; ``None`` without a simulation.
        cost: of each alone, µs.
        share: of the multiprocessors that each uses.
        waits: the ops on other streams that they wait for.
        slack: the least of theirs, µs.
        flops: floating-point operations of each.
        bytes: read and written by each.
        source: the user's line.
    """

    launch: int
    ops: tuple[str, ...]
    target: str
    streams: tuple[int, ...]
    start: float | None
    cost: float
    share: float
    waits: tuple[str, ...]
    slack: float
    flops: int
    bytes: int
    source: str


@dataclass(frozen=True, slots=True)
class _Column:
    """A column: heading, text, sort key, whether it holds numbers, and whether it sorts in descending order."""

    head: str
    said: Callable[[Row], str]
    key: Callable[[Row], Any]
    number: bool = True
    falling: bool = False


COLUMNS: Mapping[str, _Column] = {
    "launch": _Column("#", lambda row: str(row.launch), attrgetter("launch")),
    "op": _Column("op", lambda row: few(row.ops, most=1), attrgetter("ops"), number=False),
    "target": _Column("target", lambda row: line(row.target), attrgetter("target"), number=False),
    "stream": _Column("stream", lambda row: few([*map(str, row.streams)]), attrgetter("streams")),
    "start": _Column("start µs", lambda row: _us(row.start), lambda row: row.start or 0.0),
    "cost": _Column("cost µs", lambda row: _us(row.cost), attrgetter("cost"), falling=True),
    "share": _Column("SMs", lambda row: f"{row.share:.0%}", attrgetter("share"), falling=True),
    "waits": _Column("waits", lambda row: few(row.waits), lambda row: len(row.waits), number=False, falling=True),
    "slack": _Column("slack µs", lambda row: _us(row.slack), attrgetter("slack")),
    "flops": _Column("MFLOP", lambda row: f"{row.flops / 1e6:,.1f}", attrgetter("flops"), falling=True),
    "bytes": _Column("kB", lambda row: f"{row.bytes / 1e3:,.1f}", attrgetter("bytes"), falling=True),
    "source": _Column("source", lambda row: source(row.source), attrgetter("source"), number=False),
}
"""By the name on the command line."""

USUAL = tuple(name for name in COLUMNS if name not in ("flops", "bytes"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which ops are shown, and how.

    Attributes:
        ops: show this many, the longest; ``None`` shows all, similar ones in one row if they are many.
        stream: only those on this stream.
        critical: only those of the critical path.
        sort: the column to sort by: costs and shares descending, others ascending.
        columns: from left to right.

    Raises:
        OptionError: there is no such column.

    Example:
        >>> Selection(sort="price")
        Traceback (most recent call last):
        ...
        autostream.errors.OptionError: there is no column 'price': use launch, op, target, stream, start, cost, share, \
waits, slack, flops, bytes or source
    """

    ops: int | None = None
    stream: int | None = None
    critical: bool = False
    sort: str = "launch"
    columns: tuple[str, ...] = USUAL

    def __post_init__(self) -> None:
        for name in (self.sort, *self.columns):
            if name not in COLUMNS:
                *others, last = COLUMNS
                near = difflib.get_close_matches(name, COLUMNS, n=1)
                hint = f" (did you mean {near[0]!r}?)" if near else ""
                raise OptionError(f"there is no column {name!r}{hint}: use {', '.join(others)} or {last}")


EVERYTHING = Selection()
"""All ops, in launch order."""


def selected(report: Report, numbers: Summary | None, selection: Selection) -> frozenset[str]:
    """The names of the ops to show; of equally costly ones, the first in program order.

    Raises:
        OptionError: the schedule has no such stream.
    """
    if report.graph is None or report.chosen is None or numbers is None:
        return frozenset()
    schedule = report.chosen.schedule
    if selection.stream is not None and selection.stream >= schedule.streams:
        last = f" to {schedule.streams - 1}" if schedule.streams > 1 else " alone"
        raise OptionError(f"there is no stream {selection.stream}: the schedule has 0{last}")
    critical = frozenset(numbers.critical_path.ops)
    names = [
        name
        for name in report.graph.ops
        if selection.stream in (None, schedule.stream_of[name]) and (not selection.critical or name in critical)
    ]
    if selection.ops is not None:
        names = sorted(names, key=lambda name: -report.costs[name].duration_us)[: max(selection.ops, 0)]
    return frozenset(names)


def ops_table(report: Report, numbers: Summary | None, selection: Selection) -> str:
    """The table of the selected ops; ``""`` if there are none.

    Raises:
        OptionError: the schedule has no such stream.
    """
    shown = selected(report, numbers, selection)
    if not shown or numbers is None or report.chosen is None:
        return ""
    rows = [*_rows(report, numbers, report.chosen.schedule, shown)]
    if selection.ops is None and len(rows) > FOLDED:
        rows = _folded(rows)
    by = COLUMNS[selection.sort]
    # A stable sort: equal ones stay in launch order.
    rows.sort(key=by.key, reverse=by.falling)
    columns = [COLUMNS[name] for name in selection.columns]
    right = " ".join(column.head.split()[0] for column in columns if column.number)
    body = [[column.said(row) for column in columns] for row in rows]
    return table(_title(report, selection, len(shown), len(rows)), [column.head for column in columns], body, right)


def _title(report: Report, selection: Selection, shown: int, rows: int) -> str:
    assert report.graph is not None
    total, parts = len(report.graph.ops), []
    if shown < total:
        which = [
            *([f"on stream {selection.stream}"] if selection.stream is not None else []),
            *(["on the critical path"] if selection.critical else []),
        ]
        costliest = " costliest" if selection.ops == shown else ""
        parts.append(" ".join([f"the {shown}{costliest} of {total}", *which]))
    if rows < shown:
        parts.append(f"alike ones in one of {rows} rows, with the cost of each")
    order = "launch order" if selection.sort == "launch" else f"the order of {COLUMNS[selection.sort].head}"
    return f"{', '.join([f'Ops in {order}', *parts])}; starts are predicted"


def _rows(report: Report, numbers: Summary, schedule: Schedule, shown: frozenset[str]) -> Iterator[Row]:
    starts = report.timeline.starts if report.timeline else {}
    for at, launch in enumerate(schedule.launches):
        if launch.op in shown:
            yield _row(report, numbers, at, launch, starts.get(launch.op))


def _row(report: Report, numbers: Summary, at: int, launch: Launch, start_us: float | None) -> Row:
    assert report.graph is not None
    op, cost = report.graph.ops[launch.op], report.costs[launch.op]
    return Row(
        launch=at,
        ops=(op.name,),
        target=op.target,
        streams=(launch.stream,),
        start=start_us,
        cost=cost.duration_us,
        share=cost.sm_share,
        waits=launch.waits,
        slack=numbers.slack_us[op.name],
        flops=op.flops,
        bytes=op.bytes_read + op.bytes_written,
        source=op.source,
    )


def _folded(rows: Sequence[Row]) -> list[Row]:
    """One row for all similar ops, at the position of the first."""
    kinds: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        key = (row.target, row.source, f"{row.cost:.1f}", f"{row.share:.0%}", row.flops, row.bytes)
        kinds.setdefault(key, []).append(row)
    return [_merged(similar) for similar in kinds.values()]


def _merged(rows: Sequence[Row]) -> Row:
    return replace(
        rows[0],
        ops=tuple(op for row in rows for op in row.ops),
        streams=tuple(sorted({stream for row in rows for stream in row.streams})),
        waits=tuple(dict.fromkeys(wait for row in rows for wait in row.waits)),
        slack=min(row.slack for row in rows),
    )


def _us(time_us: float | None) -> str:
    return "" if time_us is None else f"{time_us:,.1f}"
