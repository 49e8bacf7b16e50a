"""Rows as tables: one line for each cell with all its numbers, or one for each row with a ratio for each mode."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tabulate import tabulate

from autostream.cli.changes import Measure, Row, Spread, ratio, spread

FORMATS = {"terminal": "simple", "github": "github", "csv": ""}
"""Name to that of tabulate; CSV has plain numbers, and the interquartile range of a ratio in a column of its own."""


@dataclass(frozen=True, slots=True)
class _Number:
    """A number and its format."""

    value: float
    form: str = ",.1f"


Entry = str | _Number | Spread | None
"""One entry of a table: a spread is one of ratios; ``None`` is empty."""

_HEAD = (
    *("workload", "mode", "µs a call", "IQR", "faster", "device µs", "latency µs", "p99", "host µs", "calls/s"),
    *("MB", "reserved MB", "first s", "error", "streams", "remark"),
)


def cells_table(rows: Sequence[Row], baseline: str, form: str = "terminal", measure: Measure = "call") -> str:
    """All measurements, a line for each cell; ``faster`` is the speedup over the baseline in the same rounds."""
    lines = [line for row in rows for line in _lines(row, baseline, measure)]
    return _table(lines, _HEAD, form, ("faster",))


def ratios_table(rows: Sequence[Row], baseline: str, measure: Measure, form: str = "terminal") -> str:
    """A line for each row: the baseline's µs and the speedup of each mode, ``±`` its interquartile range if noisy."""
    modes = list(dict.fromkeys(mode for row in rows for mode in row["cells"] if mode != baseline))
    head = ("workload", f"{baseline} µs", *modes)
    return _table([_ratios(row, baseline, modes, measure) for row in rows], head, form, modes)


def title(row: Row) -> str:
    """A short name of a row.

    Example:
        >>> title({"workload": "googlenet", "batch": 8, "dtype": "float16"})
        'googlenet ×8'
    """
    batch = f" ×{row['batch']}" if row.get("batch", 1) != 1 else ""
    return " ".join(filter(None, (f"{row['workload']}{batch}", row.get("optimizer"))))


def _table(lines: Sequence[Sequence[Entry]], head: Sequence[str], form: str, ratios: Sequence[str]) -> str:
    """A table; the columns ``ratios`` may hold spreads."""
    if form == "csv":
        return _csv(lines, head, ratios)
    sides = ["left" if name in ("workload", "mode", "remark") else "right" for name in head]
    shown = [[_shown(entry) for entry in line] for line in lines]
    if form == "github":
        shown = [[text.replace("|", r"\|") for text in line] for line in shown]
    return tabulate(shown, head, tablefmt=FORMATS[form], disable_numparse=True, colalign=sides if lines else None)


def _csv(lines: Sequence[Sequence[Entry]], head: Sequence[str], ratios: Sequence[str]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([text for name in head for text in ((name, f"{name} IQR") if name in ratios else (name,))])
    for line in lines:
        writer.writerow([text for name, entry in zip(head, line, strict=True) for text in _bare(entry, name in ratios)])
    return out.getvalue().rstrip("\n")


def _bare(entry: Entry, spread: bool) -> list[str]:
    """An entry in CSV: a column of spreads has a second one for interquartile ranges."""
    match entry:
        case _Number():
            return [f"{entry.value:.9g}"]
        case Spread():
            return [f"{entry.median:.9g}", f"{entry.iqr:.9g}"]
    return [entry or "", ""] if spread else [entry or ""]


def _shown(entry: Entry) -> str:
    match entry:
        case _Number():
            return format(entry.value, entry.form)
        case Spread():
            return f"{entry.median:.2f}×" + (f" ±{entry.iqr:.2f}" if entry.noisy else "")
    return entry or ""


def _ratios(row: Row, baseline: str, modes: Sequence[str], measure: Measure) -> list[Entry]:
    cell = row["cells"].get(baseline, {})
    times = cell.get(f"{measure}_us")
    first = _Number(spread(times).median) if times else row.get("failure") or _status(cell, measure)
    return [title(row), first, *(_ratio(row, mode, baseline, measure) for mode in modes)]


def _ratio(row: Row, mode: str, baseline: str, measure: Measure) -> Entry:
    cell = row["cells"].get(mode, {})
    return ratio(row["cells"], mode, baseline, measure) or _status(cell, measure)


def _status(cell: Mapping[str, Any], measure: Measure) -> str | None:
    """The text in place of a number: a dash where the mode is ok and only this was not measured."""
    status: str | None = cell.get("status")
    return "–" if status == "ok" and not cell.get(f"{measure}_us") else status


def _lines(row: Row, baseline: str, measure: Measure) -> Iterator[list[Entry]]:
    if row.get("failure"):
        yield [title(row), *[None] * (len(_HEAD) - 2), row["failure"]]
    for mode, cell in row["cells"].items():
        times = cell.get("call_us")
        yield [title(row), mode, *(_timed(row, mode, baseline, measure) if times else [None] * 8), *_facts(cell)]


def _timed(row: Row, mode: str, baseline: str, measure: Measure) -> list[Entry]:
    cell = row["cells"][mode]
    call, device = spread(cell["call_us"]), cell.get("device_us")
    return [
        _Number(call.median),
        _Number(call.iqr),
        ratio(row["cells"], mode, baseline, measure),
        _Number(spread(device).median) if device else None,
        _Number(cell["latency_us"]["median"]),
        _Number(cell["latency_us"]["p99"]),
        _Number(cell["host_us"]["median"]),
        _Number(1e6 / call.median, ",.0f"),
    ]


def _facts(cell: Mapping[str, Any]) -> list[Entry]:
    schedule = cell.get("schedule", {})
    remark = cell.get("reason", "") if cell["status"] == "ok" else f"{cell['status']}: {cell.get('reason', '')}"
    return [
        _known(cell, "allocated_bytes", share=1e-6),
        _known(cell, "reserved_bytes", share=1e-6),
        _known(cell, "first_s"),
        _known(cell, "error", ".1e"),
        str(schedule.get("streams", "")),
        " ".join(filter(None, (schedule.get("mode", ""), schedule.get("policy", ""), remark))),
    ]


def _known(cell: Mapping[str, Any], name: str, form: str = ",.1f", share: float = 1.0) -> _Number | None:
    return _Number(cell[name] * share, form) if name in cell else None
