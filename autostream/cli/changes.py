"""Speedups over a baseline, and whether a second measurement is slower than a first.

Times of two runs differ with clocks and temperature. Ratios to a baseline that was timed in the same rounds hardly do,
so they are what is compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any, Literal

Measure = Literal["call", "device"]
"""Which times a ratio is of; see :mod:`autostream.runtime.clock`."""

Row = Mapping[str, Any]
"""One workload as in the JSON: ``workload``, and ``cells`` by mode."""

NOISY = 0.03
"""An interquartile range above this share of the median is reported as noise."""

_STANDARD_ERRORS = 3
"""A loss must exceed the limit by so many standard errors; of two equal medians, one pair in 700 is so far apart."""

_MOST = 5
"""A loss beyond this many times the limit counts, however noisy the rounds are."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and scatter of some numbers.

    Attributes:
        median: of all.
        iqr: interquartile range.
        count: of the numbers.
    """

    median: float
    iqr: float
    count: int

    @property
    def noisy(self) -> bool:
        """Whether the numbers scatter too much to be compared within a few per cent."""
        return self.iqr > NOISY * self.median

    @property
    def standard_error(self) -> float:
        """Standard error of the median of normal numbers: √(π/2) times that of their mean."""
        return _ERROR * self.iqr / math.sqrt(self.count)


_ERROR = math.sqrt(math.pi / 2) / 1.349
"""The interquartile range of normal numbers is 1.349 standard deviations."""


def spread(values: Sequence[float]) -> Spread:
    """The median and the interquartile range.

    Example:
        >>> spread([1.0, 2.0, 3.0, 4.0, 5.0])
        Spread(median=3.0, iqr=3.0, count=5)
    """
    low, _, high = quantiles(values, n=4)
    return Spread(median(values), high - low, len(values))


def ratio(cells: Mapping[str, Any], mode: str, baseline: str, measure: Measure = "call") -> Spread | None:
    """How many times faster a mode is than the baseline, from the ratio in each round.

    Args:
        cells: of one row, by mode, as in the JSON.
        mode: in the denominator.
        baseline: in the numerator.
        measure: of which time.

    Returns:
        ``None`` where one of the two was not timed.

    Example:
        >>> cells = {"old": {"call_us": [4.0, 8.0, 6.0]}, "new": {"call_us": [2.0, 4.0, 3.0]}}
        >>> ratio(cells, "new", "old")
        Spread(median=2.0, iqr=0.0, count=3)
    """
    mode_us, baseline_us = (cells.get(name, {}).get(f"{measure}_us") for name in (mode, baseline))
    if not mode_us or not baseline_us:
        return None
    return spread([old / new for new, old in zip(mode_us, baseline_us, strict=True)])


@dataclass(frozen=True, slots=True)
class Change:
    """One mode of one workload in two results.

    Attributes:
        row: the workload.
        mode: the mode.
        before, after: speedup over the baseline; ``None`` where there was no time.
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
        """How much faster it became: 0.1 is 10 % more speed; ``None`` where one of the two has no time."""
        return self.after.median / self.before.median - 1 if self.before and self.after else None

    @property
    def noisy(self) -> bool:
        """Whether one of the two is noisy."""
        return any(speedup.noisy for speedup in (self.before, self.after) if speedup)

    def worse(self, by: float) -> bool:
        """Whether it lost more than this share of its speed, or all of its time.

        Three standard errors of both medians are allowed on top. The spread of the rounds is not: a loss in a part of
        the rounds widens it, and would excuse itself. For the same reason at most five times the share is allowed.
        """
        if self.before is None or self.after is None:
            return self.before is not None
        error = math.hypot(self.before.standard_error, self.after.standard_error) / self.before.median
        return 1 - self.after.median / self.before.median > min(by + _STANDARD_ERRORS * error, _MOST * by)


def row_changes(
    old: Row, new: Row, modes: str, baseline: str, measure: Measure = "call", title: str = ""
) -> Iterator[Change]:
    """The changes of one row: each cell of the older one, but for those that neither has timed.

    Args:
        old: the older one.
        new: the newer one.
        modes: of the modes whose names start with this.
        baseline: the mode to compare with.
        measure: of which time.
        title: of the row; by default its workload.

    Example:
        >>> def row(us):
        ...     return {"workload": "net", "cells": {"eager": {"call_us": [8.0] * 3}, "autostream": {"call_us": us}}}
        >>> (change,) = row_changes(row([4.0] * 3), row([5.0] * 3), "autostream", "eager")
        >>> round(change.share, 3), change.worse(by=0.03)
        (-0.2, True)
    """
    for mode in old["cells"]:
        if mode.startswith(modes) and mode != baseline:
            before, after = (ratio(row["cells"], mode, baseline, measure) for row in (old, new))
            if before or after:
                yield Change(title or old["workload"], mode, before, after, _status(new, mode, baseline))


def _status(row: Row, mode: str, baseline: str) -> str:
    ours, theirs = (
        str(row["cells"].get(name, {}).get("status") or row.get("failure") or "missing") for name in (mode, baseline)
    )
    return f"without {baseline}: {theirs}" if ours == "ok" != theirs else ours
