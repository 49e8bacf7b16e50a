"""Write the README's results table from the committed result: no number there is typed.

python -m benchmarks.readme            # rewrite
python -m benchmarks.readme --check    # exit 1 if the README is not what the results say
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from tabulate import tabulate

from benchmarks.stamp import RESULTS

README = Path(__file__).parent.parent / "README.md"
RESULT = RESULTS / "h200-torch2.11" / "aten-level.json"
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"


def main(argv: list[str] | None = None) -> int:
    """Rewrite or check the README."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.readme", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if the README is out of date")
    options = parser.parse_args(argv)
    before = README.read_text()
    after = with_results(before, json.loads(RESULT.read_text()))
    if not options.check:
        README.write_text(after)
    return int(options.check and before != after)


def with_results(readme: str, result: dict[str, Any]) -> str:
    """The README with a table of this result between its two marks.

    Example:
        >>> row = {"model": "net", "graph_us": 20.0, "autostream_us": 10.0, "ratio": 2.0, "streams": 3}
        >>> stamp = {"gpu": "G", "torch": "2.11", "date": "today", "commit": "abc"}
        >>> result = {"stamp": stamp, "dtype": "float16", "batch": 1, "rows": [row]}
        >>> print(with_results(f"a {BEGIN} old {END} b", result))
        a <!-- results:begin -->
        | model   |   one stream, µs |   autostream, µs | faster   |   streams |
        |---------|------------------|------------------|----------|-----------|
        | net     |               20 |               10 | 2.00×    |         3 |
        <BLANKLINE>
        Device time of one call on one G, torch 2.11, float16, batch 1, against the same eager code captured in a CUDA
        graph on one stream (today, commit abc).
        <!-- results:end --> b
    """
    head, _, rest = readme.partition(BEGIN)
    _, _, tail = rest.partition(END)
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
    return f"{head}{BEGIN}\n{tabulate(rows, columns, tablefmt='github')}\n\n{note}\n{END}{tail}"


if __name__ == "__main__":
    sys.exit(main())
