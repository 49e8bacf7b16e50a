"""Whether one measurement is worse than another: what became slower against the baseline of its own run, or stopped
working.

Times of two runs differ with the machine's mood. Ratios to a baseline that took turns with the mode hardly do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from autostream.bench.ratios import Measure, Spread, ratio
from autostream.bench.table import Row, title

_ERRORS = 3
"""Standard errors that a loss has to be beyond the limit; of two equal medians, one pair in 700 is so far apart."""

_MOST = 5
"""Times the limit: a loss beyond this is one, however much the rounds scatter."""


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
        """Whether it lost more than this share of its speed, or all of its time.

        What the medians of the rounds may differ by chance is allowed above that: three standard errors, of both
        together. It is their errors and not the spread of the rounds, since a loss in a part of the rounds widens that,
        and would excuse itself. For the same reason no more than five times the share is allowed in all.
        """
        if self.before is None or self.after is None:
            return self.before is not None
        error = math.hypot(self.before.standard_error, self.after.standard_error) / self.before.median
        return 1 - self.after.median / self.before.median > min(by + _ERRORS * error, _MOST * by)


def row_changes(old: Row, new: Row, modes: str, baseline: str, measure: Measure) -> Iterator[Change]:
    """The cells of one row that its older form has, whether the newer one has them or not; but not what neither timed.

    Args:
        old: the older one.
        new: the newer one.
        modes: of the modes whose names start with this.
        baseline: the mode to compare with.
        measure: of which time.

    Example:
        >>> def row(us):
        ...     return {"workload": "net", "cells": {"eager": {"call_us": [8.0] * 3}, "autostream": {"call_us": us}}}
        >>> (change,) = row_changes(row([4.0] * 3), row([5.0] * 3), "autostream", "eager", "call")
        >>> round(change.share, 3), change.worse(by=0.03)
        (-0.2, True)
    """
    for mode in old["cells"]:
        if mode.startswith(modes) and mode != baseline:
            was, now = (ratio(row["cells"], mode, baseline, measure) for row in (old, new))
            if was or now:
                yield Change(title(old), mode, was, now, _status(new, mode, baseline))


def _status(row: Row, mode: str, baseline: str) -> str:
    ours, theirs = (
        str(row["cells"].get(name, {}).get("status") or row.get("failure") or "missing") for name in (mode, baseline)
    )
    return f"without {baseline}: {theirs}" if ours == "ok" != theirs else ours
