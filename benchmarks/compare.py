"""What changed between two results, row by row; :mod:`autostream.cli.changes` says what is worse."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from autostream.cli.changes import Change, Measure, row_changes
from benchmarks.harness.table import title
from benchmarks.result import Result, ResultError, key


def changes(before: Result, after: Result, modes: str, baseline: str, measure: Measure) -> Iterator[Change]:
    """All cells that the older result has, whether the newer one has them or not; but those that neither has timed.

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
    news = {key(row): row for row in after["rows"]}
    for old in before["rows"]:
        new: dict[str, Any] = news.get(key(old), {"cells": {}})
        yield from row_changes(old, new, modes, baseline, measure, title(old))
