"""Writes the tables of the committed results into their Markdown files and the README.

python -m benchmarks.readme            # rewrite
python -m benchmarks.readme --check    # exit 1 if a table is out of date

The tables of ``NAME.json`` are in ``NAME.md`` beside it. The README has a part of the inference suite, between
``<!-- inference:begin -->`` and ``<!-- inference:end -->``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from tabulate import tabulate

from autostream.cli.changes import Measure
from benchmarks import (
    data_parallel,
    generation,
    losses,
    partial_graphs,
    predictions,
    prefetching,
    random_search,
    two_devices,
)
from benchmarks.compare import changes
from benchmarks.harness.table import ratios_table
from benchmarks.memory import memory_table
from benchmarks.stamp import RESULTS
from benchmarks.suites import SUITES

README = Path(__file__).parent.parent / "README.md"
FOLDER = RESULTS / "h200-torch2.11"
LATEST = RESULTS / "h100-torch2.11" / "inference.json"
STEPS = RESULTS / "h100-torch2.11" / "steps.json"
"""The results in the README."""

SHOWN = {"sac": "a SAC step", "dcgan": "a DCGAN step"}
"""The steps in the README, by workload."""

MODES = {
    "cuda_graph": "eager, captured by hand",
    "compile_reduce_overhead": "`torch.compile`, reduce-overhead",
    "compile_captured": "`torch.compile`, captured by hand",
    "autostream": "autostream",
}
"""The modes in the README."""

_MEASURES: dict[Measure, str] = {"call": "Back to back, host included:", "device": "The device alone:"}


_TABLES: dict[str, Callable[[Any], str]] = {
    **{
        f"data_parallel-{which}": lambda result: data_parallel.table(result["rows"])
        for which in (
            *("1", "2", "2-copied", "2-planned", "2-priority"),
            *("2-resnet50", "2-resnet50-planned", "2-resnet50-priority"),
        )
    },
    **dict.fromkeys(("generation", "generation-dense"), lambda result: generation.table(result["rows"])),
    "losses": lambda result: losses.table(result["rows"]),
    "partial_graphs": lambda result: partial_graphs.table(result["rows"]),
    "predictions": predictions.table,
    "prefetching": lambda result: prefetching.table(result["rows"]),
    "random_search": lambda result: random_search.table(result["rows"]),
    **dict.fromkeys(("two_devices", "two_devices-fused"), lambda result: two_devices.table(result["rows"])),
}
"""Tables of other results than suites, by file name."""


def main(argv: list[str] | None = None) -> int:
    """Rewrite or check."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.readme", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a table is out of date")
    options = parser.parse_args(argv)
    stale = False
    for path, written in _files().items():
        before = path.read_text() if path.exists() else ""
        after = written(before)
        stale |= before != after
        if not options.check:
            path.write_text(after)
    return int(options.check and stale)


def _files() -> dict[Path, Callable[[str], str]]:
    results = {path: json.loads(path.read_text()) for path in (*FOLDER.glob("*.json"), LATEST, STEPS)}
    files: dict[Path, Callable[[str], str]] = {
        path.with_suffix(".md"): lambda before, path=path, result=result: f"{_TABLES.get(path.stem, tables)(result)}\n"  # type: ignore[misc]
        for path, result in results.items()
    }
    quick, rerun = (results[FOLDER / f"{name}.json"] for name in ("quick", "quick-rerun"))
    files[FOLDER / "quick-changes.md"] = lambda before: f"{rerun_table(quick, rerun)}\n"
    return files | {README: lambda before: with_result(before, results[LATEST], results[STEPS])}


def with_result(readme: str, models: Any, steps: Any) -> str:
    """The README with a table between its marks: the inference suite at batch 1, and some steps.

    Example:
        >>> def row(name, batch, *times):
        ...     cells = {mode: {"status": "ok", "call_us": [us] * 3} for mode, us in zip(reversed(MODES), times)}
        ...     return {"workload": name, "batch": batch, "cells": cells}
        >>> stamp = {"gpu": "G", "torch": "2.11", "date": "today", "commit": "abc"}
        >>> models = {"stamps": [stamp], "rows": [row("net", batch, 2.0, 4.0, 4.0, 8.0) for batch in (1, 8)]}
        >>> steps = {"stamps": [stamp], "rows": [row("sac", 256, 3.0, 5.0, 9.0)]}
        >>> print(with_result("a <!-- inference:begin --> old <!-- inference:end --> b", models, steps))
        ... # doctest: +ELLIPSIS
        a <!-- inference:begin -->
        | µs a call ...
        | net ... 8.0 | ... 4.0 | ... 4.0 | ... 2.0 | ... 2.00× |
        | a SAC step ... – | ... 9.0 | ... 5.0 | ... 3.0 | ... 3.00× |
        <BLANKLINE>
        On one G with torch 2.11 (today, commit abc); steps: today, commit abc.
        <!-- inference:end --> b
    """
    begin, end = "<!-- inference:begin -->", "<!-- inference:end -->"
    head, _, rest = readme.partition(begin)
    _, _, tail = rest.partition(end)
    lines = [_line(row["workload"], row["cells"]) for row in models["rows"] if row["batch"] == 1]
    trained = [row for row in steps["rows"] if row["workload"] in SHOWN]
    lines += [_line(SHOWN[row["workload"]], row["cells"]) for row in trained]
    headers = ["µs a call", *MODES.values(), "over reduce-overhead"]
    aligned = ("left", *["right"] * (len(MODES) + 1))
    table = tabulate(lines, headers, tablefmt="github", colalign=aligned, disable_numparse=True)
    measured = f"{_measured(models)[:-1]}; steps: {_when(steps, trained)}."
    return f"{head}{begin}\n{table}\n\n{measured}\n{end}{tail}"


def _line(name: str, cells: Any) -> list[str]:
    """The medians of a row in each mode; – for one in which it was not measured."""
    times = [median(cells[mode]["call_us"]) if mode in cells else None for mode in MODES]
    compiled, ours = times[1], times[-1]
    assert compiled is not None
    assert ours is not None
    return [name, *("–" if us is None else f"{us:,.1f}" for us in times), f"{compiled / ours:.2f}×"]


def rerun_table(first: Any, second: Any) -> str:
    """What a second run of a suite gave: each ratio to the baseline, by how much it differs, and what scatters."""
    baseline = SUITES[first["suite"]].baseline
    rows = [
        [change.row, change.mode, measure, change.before.median, change.after.median, f"{change.share:+.1%}", noisy]
        for measure in _MEASURES
        for change in changes(first, second, "", baseline, measure)
        if change.before and change.after and change.share is not None
        for noisy in ["noisy" if change.noisy else ""]
    ]
    headers = ["workload", "mode", "measure", "first", "again", "change", ""]
    return tabulate(rows, headers, tablefmt="github", floatfmt=".2f")


def tables(result: Any) -> str:
    """All rows and modes of a result, as times the speed of the suite's baseline, and where that was measured."""
    baseline = SUITES[result["suite"]].baseline
    parts = [
        f"{text}\n\n{ratios_table(result['rows'], baseline, measure, 'github')}" for measure, text in _MEASURES.items()
    ]
    if memory := memory_table(result["rows"]):
        trained = any(row["optimizer"] for row in result["rows"])
        but = " (in training, what is reserved has these too)" if trained else ""
        parts.append(f"Memory, MB on top of the weights and inputs that are given{but}:\n\n{memory}")
    return "\n\n".join([*parts, _measured(result)])


def _measured(result: Any) -> str:
    """Where, when and at which commit."""
    first = result["stamps"][0]
    return f"On one {first['gpu']} with torch {first['torch']} ({_when(result, result['rows'])})."


def _when(result: Any, rows: Any) -> str:
    stamps = [result["stamps"][number] for number in sorted({row.get("stamp", 0) for row in rows})]
    return "; ".join(dict.fromkeys(f"{stamp['date']}, commit {stamp['commit']}" for stamp in stamps))


if __name__ == "__main__":
    sys.exit(main())
