"""Changes between two results, row by row; :mod:`autostream.cli.changes` defines which are worse."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from autostream.cli.changes import Change, Measure, row_changes
from benchmarks.harness.table import title
from benchmarks.result import Result, ResultError, key


def changes(before: Result, after: Result, modes: str, baseline: str, measure: Measure) -> Iterator[Change]:
    """Changes of all cells of the older result, except those that neither has timed.

    Args:
        before: the older result.
        after: the newer one.
        modes: of the modes whose names start with this.
        baseline: the mode to compare with.
        measure: of which time.

    Raises:
        ResultError: they are of different suites.
    """
    if before["suite"] != after["suite"]:
        raise ResultError(f"results of {before['suite']} and {after['suite']} do not compare: they are two suites")
    rows_after = {key(row): row for row in after["rows"]}
    for old in before["rows"]:
        new: dict[str, Any] = rows_after.get(key(old), {"cells": {}})
        yield from row_changes(old, new, modes, baseline, measure, title(old))
