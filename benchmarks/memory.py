"""Table of device memory: on one stream, over several streams, and of ``torch.compile``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tabulate import tabulate

from autostream.cli.changes import Row
from benchmarks.harness.table import title

CHOSEN, ONE_STREAM, COMPILED = "autostream", "autostream_inductor_sequential", "compile_reduce_overhead"
"""The modes to compare: autostream's choice, the same kernels on one stream, and ``torch.compile``."""

_HEADS = (
    *("workload", "given MB", "one stream", "chosen", "ratio", "incl. given"),
    *(f"{name} reserved" for name in ("torch.compile", "one stream", "chosen")),
    *("ratio", "incl. given"),
)


def memory_table(rows: Iterable[Row]) -> str:
    """A line for each row that was run in all three modes, or ``""``; MB, without weights and inputs.

    First planned bytes of one stream and of the chosen schedule, and their ratio, without and with weights and inputs
    (*given*). Then bytes that the caching allocator reserves in each mode, including workspaces of libraries, and the
    ratio to ``torch.compile``. In training, reserved bytes include weights and optimizer state.

    Example:
        >>> planned = {"planned_bytes": 3_000_000, "given_bytes": 7_000_000}
        >>> cells = {
        ...     COMPILED: {"reserved_bytes": 13_000_000},
        ...     ONE_STREAM: {"reserved_bytes": 12_000_000, "schedule": {**planned, "planned_bytes": 2_000_000}},
        ...     CHOSEN: {"reserved_bytes": 15_000_000, "schedule": planned},
        ... }
        >>> line = memory_table([{"workload": "net", "cells": cells}]).splitlines()[-1]
        >>> [entry.strip() for entry in line.strip("|").split("|")]
        ['net', '7.0', '2.0', '3.0', '1.50×', '1.11×', '13.0', '12.0', '15.0', '1.15×', '1.10×']
    """
    lines = [_line(row) for row in rows if _known(row["cells"])]
    sides = ["left", *["right"] * (len(_HEADS) - 1)]
    return tabulate(lines, _HEADS, tablefmt="github", disable_numparse=True, colalign=sides) if lines else ""


def _known(cells: Mapping[str, Any]) -> bool:
    reserved = all("reserved_bytes" in cells.get(mode, {}) for mode in (CHOSEN, ONE_STREAM, COMPILED))
    return reserved and all("planned_bytes" in cells[mode].get("schedule", {}) for mode in (CHOSEN, ONE_STREAM))


def _line(row: Row) -> Sequence[str]:
    cells = row["cells"]
    given = cells[CHOSEN]["schedule"]["given_bytes"]
    one, chosen = (cells[mode]["schedule"]["planned_bytes"] for mode in (ONE_STREAM, CHOSEN))
    theirs, ones, ours = (cells[mode]["reserved_bytes"] for mode in (COMPILED, ONE_STREAM, CHOSEN))
    besides = 0 if row.get("optimizer") else given
    return (
        title(row),
        *map(_mb, (given, one, chosen)),
        *(_times(chosen, one), _times(given + chosen, given + one)),
        *map(_mb, (theirs, ones, ours)),
        *(_times(ours, theirs), _times(besides + ours, besides + theirs)),
    )


def _mb(size: int) -> str:
    return f"{size / 1e6:,.1f}"


def _times(size: int, other: int) -> str:
    return f"{size / other:.2f}×" if other > 0 else "–"
