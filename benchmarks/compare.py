"""Whether one result is worse than another: what became slower against the baseline of its own run, or stopped working.

Times of two runs differ with the machine's mood. Ratios to a baseline that took turns with the mode hardly do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from autostream.bench.ratios import Measure, Spread, ratio
from autostream.bench.table import title
from benchmarks.result import Result, ResultError, key


@dataclass(frozen=True, slots=True)
class Change:
    """One cell in two results.

    Attributes:
        row, mode: which.
        before, after: how many times faster than the baseline; ``None`` where there was no time.
        status: the second result's, "missing" where it has no such cell; where only the baseline has no time, that of
            the baseline.
    """

    row: str
    mode: str
    before: Spread | None
    after: Spread | None
    status: str

    @property
    def share(self) -> float | None:
        """How much faster it became: 0.1 is 10 % more speed; ``None`` where it cannot be compared."""
        return self.after.median / self.before.median - 1 if self.before and self.after else None

    @property
    def noisy(self) -> bool:
        """Whether one of the two scatters too far to be compared closely."""
        return any(found.noisy for found in (self.before, self.after) if found)

    def worse(self, by: float) -> bool:
        """Whether it lost more than this share of its speed, in noise more than that beyond it, or all of its time."""
        lost = self.before is not None and self.after is None
        return lost or (self.share is not None and self.share < -(by + self._noise))

    @property
    def _noise(self) -> float:
        return max((side.iqr / side.median for side in (self.before, self.after) if side and side.noisy), default=0.0)


def changes(before: Result, after: Result, modes: str, baseline: str, measure: Measure) -> Iterator[Change]:
    """All cells that the older result has, whether the newer one has them or not.

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
        for mode in old["cells"]:
            if mode.startswith(modes) and mode != baseline:
                was, now = (ratio(row["cells"], mode, baseline, measure) for row in (old, new))
                yield Change(title(old), mode, was, now, _status(new, mode, baseline))


def _status(row: dict[str, Any], mode: str, baseline: str) -> str:
    ours, theirs = (
        str(row["cells"].get(name, {}).get("status") or row.get("failure") or "missing") for name in (mode, baseline)
    )
    return f"without {baseline}: {theirs}" if ours == "ok" != theirs else ours
