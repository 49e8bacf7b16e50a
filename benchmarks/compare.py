"""Whether one result is worse than another: what became slower against the baseline of its own run, or stopped working.

Times of two runs differ with the machine's mood. Ratios to a baseline that took turns with the mode hardly do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from autostream.bench.ratios import Measure, Spread, ratio
from autostream.bench.table import title
from benchmarks.result import Result, key


@dataclass(frozen=True, slots=True)
class Change:
    """One cell in two results.

    Attributes:
        row, mode: which.
        before, after: how many times faster than the baseline; ``None`` where there was no time.
        status: the second result's; where only the baseline has no time, that of the baseline.
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
        """Whether it lost more than this share of its speed, or its time altogether."""
        lost = self.before is not None and self.after is None
        return lost or (self.share is not None and self.share < -by)


def changes(before: Result, after: Result, modes: str, baseline: str, measure: Measure) -> Iterator[Change]:
    """All cells that both results have.

    Args:
        before: the older result.
        after: the newer one.
        modes: of the modes whose names start with this.
        baseline: the mode to compare with.
        measure: of which time.
    """
    olds = {key(row): row for row in before["rows"]}
    for new in after["rows"]:
        old: dict[str, Any] = olds.get(key(new), {"cells": {}})
        for mode in old["cells"]:
            if mode.startswith(modes) and mode != baseline:
                was, now = (ratio(row["cells"], mode, baseline, measure) for row in (old, new))
                yield Change(title(new), mode, was, now, _status(new, mode, baseline))


def _status(row: dict[str, Any], mode: str, baseline: str) -> str:
    ours, theirs = (
        str(row["cells"].get(name, {}).get("status") or row.get("failure") or "missing") for name in (mode, baseline)
    )
    return f"without {baseline}: {theirs}" if ours == "ok" != theirs else ours
