"""Rows as tables: one line for each cell with all its numbers, or one for each row with a ratio for each mode."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tabulate import tabulate

from autostream.bench.ratios import Measure, Spread, ratio, spread

Row = Mapping[str, Any]
"""As in the JSON: what was run, and ``cells`` by mode."""

FORMATS = {"terminal": "simple", "github": "github", "csv": "csv"}
"""Name to the one that tabulate has for it; CSV is the reader's to parse, so it has no units."""

_HEAD = (
    *("workload", "mode", "µs a call", "IQR", "faster", "device µs", "latency µs", "p99", "host µs", "calls/s"),
    *("MB", "reserved MB", "first s", "error", "streams", "remark"),
)


def cells_table(rows: Sequence[Row], baseline: str, form: str = "terminal") -> str:
    """All that was measured, a line for each cell; ``faster`` is against the baseline in the same rounds."""
    lines = [line for row in rows for line in _lines(row, baseline)]
    return _table(lines, _HEAD, form)


def ratios_table(rows: Sequence[Row], baseline: str, measure: Measure, form: str = "terminal") -> str:
    """A line for each row: the baseline's µs, and how many times faster each mode is, ``±`` its interquartile range
    where that is more than a few per cent.
    """
    modes = list(dict.fromkeys(mode for row in rows for mode in row["cells"] if mode != baseline))
    head = ("workload", f"{baseline} µs", *modes)
    return _table([_ratios(row, baseline, modes, measure) for row in rows], head, form)


def title(row: Row) -> str:
    """What was run, in a few words.

    Example:
        >>> title({"workload": "googlenet", "batch": 8, "dtype": "float16"})
        'googlenet ×8'
    """
    batch = f" ×{row['batch']}" if row.get("batch", 1) != 1 else ""
    return " ".join(filter(None, (f"{row['workload']}{batch}", row.get("optimizer"))))


def _table(lines: Sequence[Sequence[str]], head: Sequence[str], form: str) -> str:
    if form == "csv":
        import csv
        import io

        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows([head, *lines])
        return out.getvalue().rstrip("\n")
    sides = ["left" if name in ("workload", "mode", "remark") else "right" for name in head]
    return tabulate(lines, head, tablefmt=FORMATS[form], disable_numparse=True, colalign=sides if lines else None)


def _ratios(row: Row, baseline: str, modes: Sequence[str], measure: Measure) -> list[str]:
    times = row["cells"].get(baseline, {}).get(f"{measure}_us")
    shown = [_ratio(row, mode, baseline, measure) for mode in modes]
    return [title(row), _number(spread(times).median) if times else row.get("failure", ""), *shown]


def _ratio(row: Row, mode: str, baseline: str, measure: Measure) -> str:
    cell = row["cells"].get(mode)
    if cell is None:
        return ""
    found = ratio(row["cells"], mode, baseline, measure)
    return _faster(found) if found else str(cell["status"])


def _lines(row: Row, baseline: str) -> Iterator[list[str]]:
    if row.get("failure"):
        yield [title(row), "", *[""] * (len(_HEAD) - 3), row["failure"]]
    for mode, cell in row["cells"].items():
        times = cell.get("call_us")
        yield [title(row), mode, *(_timed(row, mode, cell, baseline) if times else [""] * 8), *_facts(cell)]


def _timed(row: Row, mode: str, cell: Mapping[str, Any], baseline: str) -> list[str]:
    call, faster = spread(cell["call_us"]), ratio(row["cells"], mode, baseline)
    return [
        _number(call.median),
        _number(call.iqr),
        _faster(faster) if faster else "",
        _number(spread(cell["device_us"]).median),
        _number(cell["latency_us"]["median"]),
        _number(cell["latency_us"]["p99"]),
        _number(cell["host_us"]["median"]),
        f"{1e6 / call.median:,.0f}",
    ]


def _facts(cell: Mapping[str, Any]) -> list[str]:
    error, schedule = cell.get("error"), cell.get("schedule", {})
    remark = cell.get("reason", "") if cell["status"] == "ok" else f"{cell['status']}: {cell.get('reason', '')}"
    return [
        _megabytes(cell.get("allocated_bytes")),
        _megabytes(cell.get("reserved_bytes")),
        "" if cell.get("first_s") is None else f"{cell['first_s']:.1f}",
        "" if error is None else f"{error:.1e}",
        str(schedule.get("streams", "")),
        " ".join(filter(None, (schedule.get("mode", ""), schedule.get("policy", ""), remark))),
    ]


def _faster(found: Spread) -> str:
    return f"{found.median:.2f}×" + (f" ±{found.iqr:.2f}" if found.noisy else "")


def _number(us: float) -> str:
    return f"{us:,.1f}"


def _megabytes(count: int | None) -> str:
    return "" if count is None else f"{count / 1e6:,.1f}"
