"""Write the README's tables from the committed results: no number there is typed.

python -m benchmarks.readme            # rewrite
python -m benchmarks.readme --check    # exit 1 if the README is not what the results say

A table stands between ``<!-- NAME:begin -->`` and ``<!-- NAME:end -->``, NAME being that of a result file.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tabulate import tabulate

from autostream.bench.table import ratios_table
from benchmarks.stamp import RESULTS
from benchmarks.suites import SUITES

README = Path(__file__).parent.parent / "README.md"
FOLDER = RESULTS / "h200-torch2.11"
NAMES = ("aten-level", "quick")


def main(argv: list[str] | None = None) -> int:
    """Rewrite or check the README."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.readme", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if the README is out of date")
    options = parser.parse_args(argv)
    before = README.read_text()
    after = with_results(before, {name: json.loads((FOLDER / f"{name}.json").read_text()) for name in NAMES})
    if not options.check:
        README.write_text(after)
    return int(options.check and before != after)


def with_results(readme: str, results: Mapping[str, Any]) -> str:
    """The README with the tables of these results, by name, between their marks.

    Example:
        >>> cells = {"cuda_graph": {"status": "ok", "call_us": [4.0] * 3, "device_us": [2.0] * 3}}
        >>> rows = [{"workload": "net", "batch": 1, "cells": cells}]
        >>> stamp = {"gpu": "G", "torch": "2.11", "date": "today", "commit": "abc"}
        >>> print(with_results("a <!-- quick:begin --> old <!-- quick:end --> b", {"quick": {
        ...     "suite": "quick", "stamps": [stamp], "rows": rows}}))  # doctest: +ELLIPSIS
        a <!-- quick:begin -->
        Back to back, host included:
        <BLANKLINE>
        | workload   |   cuda_graph µs |
        |------------|-----------------|
        | net        |             4.0 |
        <BLANKLINE>
        The device alone:
        ...
        On one G with torch 2.11, fp16 (today, commit abc).
        <!-- quick:end --> b
    """
    for name, result in results.items():
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        head, _, rest = readme.partition(begin)
        _, _, tail = rest.partition(end)
        table = _suite(result) if "suite" in result else _aten_level(result)
        readme = f"{head}{begin}\n{table}\n{end}{tail}"
    return readme


def _suite(result: Any) -> str:
    baseline = SUITES[result["suite"]].baseline
    call, device = (ratios_table(result["rows"], baseline, measure, "github") for measure in ("call", "device"))
    stamps = "; ".join(f"{stamp['date']}, commit {stamp['commit']}" for stamp in result["stamps"])
    where = f"On one {result['stamps'][0]['gpu']} with torch {result['stamps'][0]['torch']}, fp16 ({stamps})."
    return f"Back to back, host included:\n\n{call}\n\nThe device alone:\n\n{device}\n\n{where}"


def _aten_level(result: Any) -> str:
    columns = ["model", "one stream, µs", "autostream, µs", "faster", "streams"]
    rows = [
        [row["model"], row["graph_us"], row["autostream_us"], f"{row['ratio']:.2f}×", row["streams"]]
        for row in result["rows"]
        if "ratio" in row
    ]
    stamp = result["stamp"]
    note = (
        f"Device time of one call on one {stamp['gpu']}, torch {stamp['torch']}, {result['dtype']}, batch "
        f"{result['batch']}, against the same eager code captured in a CUDA\ngraph on one stream "
        f"({stamp['date']}, commit {stamp['commit']})."
    )
    return f"{tabulate(rows, columns, tablefmt='github')}\n\n{note}"


if __name__ == "__main__":
    sys.exit(main())
