"""Numbers that are derived from a row's cells: medians, spreads, and ratios taken round by round."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any, Literal

Measure = Literal["call", "device"]
"""Which series of rounds a ratio is of; see :mod:`autostream.bench.clock`."""

NOISY = 0.03
"""A spread above this share of the median is pointed out."""


@dataclass(frozen=True, slots=True)
class Spread:
    """The middle of some numbers, and how far they scatter.

    Attributes:
        median: of all.
        iqr: distance between the quartiles.
        count: how many they are.
    """

    median: float
    iqr: float
    count: int

    @property
    def noisy(self) -> bool:
        """Whether the numbers scatter too far to be told apart within a few per cent."""
        return self.iqr > NOISY * self.median

    @property
    def standard_error(self) -> float:
        """How far the median itself scatters: of normal numbers, √(π/2) times as far as their mean."""
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
        cells: dumped cells of one row, by mode.
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
    ours, theirs = (cells.get(name, {}).get(f"{measure}_us") for name in (mode, baseline))
    if not ours or not theirs:
        return None
    return spread([old / new for new, old in zip(ours, theirs, strict=True)])
