"""Which signatures are worth compiling: one more is earned by calls that what is compiled already has served."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Entry = TypeVar("Entry")

FREE = 4
"""Compilations at first. A model that meets new sizes in call after call would never get its time back."""

SERVED = 16
"""Calls that are served, for each of which many there may be one compilation more."""

IDLE = 1000
"""Calls without one of an entry, after which it may go for another. Compiling takes as long as a thousand calls."""


class Admission(Generic[Entry]):
    """The entries of a model, by key, and how many more may be made.

    Args:
        most: how many entries there may be.

    Attributes:
        entries: the least recently used first.

    Example:
        >>> admission = Admission[str](most=1)
        >>> admission.refusal()
        ''
        >>> admission.add("1x3", "schedule")
        >>> admission.refusal()
        'as many signatures as max_signatures allows are compiled'
    """

    def __init__(self, most: int) -> None:
        self._most, self._credit, self._calls = most, FREE * SERVED, 0
        self.entries: OrderedDict[Hashable, Entry] = OrderedDict()
        self._used: dict[Hashable, int] = {}

    def served(self, key: Hashable, calls: int = 1) -> None:
        """An entry has served so many calls."""
        if key in self.entries:
            self._calls += calls
            self._used[key] = self._calls
            self._credit = min(self._credit + calls, FREE * SERVED)
            self.entries.move_to_end(key)

    def unserved(self) -> None:
        """A call had no entry."""
        self._calls += 1

    def refusal(self) -> str:
        """Why no entry is to be made now, or ``""``."""
        if self._credit < SERVED:
            return "one call after the other is of a new kind, and none comes again"
        if len(self.entries) >= self._most and self._idle() is None:
            return "as many signatures as max_signatures allows are compiled"
        return ""

    def add(self, key: Hashable, entry: Entry) -> None:
        """An entry has been made; it takes the place of one that nobody uses, where there are too many."""
        if len(self.entries) >= self._most and (idle := self._idle()) is not None:
            del self.entries[idle], self._used[idle]
        self._credit -= SERVED
        self.entries[key] = entry
        self._used[key] = self._calls

    def _idle(self) -> Hashable | None:
        oldest = next(iter(self.entries), None)
        return oldest if oldest is not None and self._calls - self._used[oldest] > IDLE else None
