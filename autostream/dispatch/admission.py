"""Which signatures are worth compiling: those that come again, and others as far as calls have paid for them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Entry = TypeVar("Entry")

FREE = 4
"""Compilations at first. A model that meets new sizes in call after call would never get its time back."""

SERVED = 16
"""Calls that are served, for each of which many there may be one compilation more; or calls of one signature that had
none, after which it may have one."""

WAITING = 64
"""Signatures of which the calls without an entry are counted: the latest."""

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
        >>> admission.refusal("1x3")
        ''
        >>> admission.add("1x3", "schedule")
        >>> admission.refusal("2x3")
        'as many signatures as max_signatures allows are compiled'
    """

    def __init__(self, most: int) -> None:
        self._most, self._credit, self._calls = most, FREE * SERVED, 0
        self.entries: OrderedDict[Hashable, Entry] = OrderedDict()
        self._used: dict[Hashable, int] = {}
        self._waiting: OrderedDict[Hashable, int] = OrderedDict()

    def served(self, key: Hashable, calls: int = 1) -> None:
        """An entry has served so many calls."""
        if key in self.entries:
            self._calls += calls
            self._used[key] = self._calls
            self._credit = min(self._credit + calls, FREE * SERVED)
            self.entries.move_to_end(key)

    def unserved(self, key: Hashable) -> None:
        """A call had no entry, or none that its guards let it have."""
        self._calls += 1
        self._waiting[key] = self._waiting.pop(key, 0) + 1
        if len(self._waiting) > WAITING:
            self._waiting.popitem(last=False)

    def has_waited(self, key: Hashable) -> bool:
        """Whether so many calls of this key have had no entry that one more is worth it, whatever was spent before.

        Where there are entries for it whose guards fail, they may fail in call after call.
        """
        return self._waiting.get(key, 0) >= (IDLE if key in self.entries else SERVED)

    def refusal(self, key: Hashable) -> str:
        """Why no entry is to be made for this key now, or ``""``."""
        if self._credit < SERVED and not self.has_waited(key):
            return "one call after the other is of a new kind"
        if len(self.entries) >= self._most and self._idle() is None:
            return "as many signatures as max_signatures allows are compiled"
        return ""

    def add(self, key: Hashable, entry: Entry) -> None:
        """An entry has been made; it takes the place of one that nobody uses, where there are too many."""
        if len(self.entries) >= self._most and (idle := self._idle()) is not None:
            del self.entries[idle], self._used[idle]
        if not self.has_waited(key):
            self._credit -= SERVED
        self._waiting.pop(key, None)
        self.entries[key] = entry
        self._used[key] = self._calls

    def drop(self, key: Hashable) -> None:
        """An entry is of no use any more; what was spent on it may be spent again."""
        del self.entries[key], self._used[key]
        self._credit += SERVED

    def _idle(self) -> Hashable | None:
        oldest = next(iter(self.entries), None)
        return oldest if oldest is not None and self._calls - self._used[oldest] > IDLE else None
