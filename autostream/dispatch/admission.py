"""Which signatures are compiled: those that recur, and new ones as long as enough calls hit the cache."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Any, Generic, TypeVar

from autostream.frontend.tree import Structure, without_integers

Entry = TypeVar("Entry")

FREE_COMPILATIONS = 4
"""Compilations before the first cache hit. A model whose sizes change in each call would never win back more."""

HITS_PER_COMPILATION = 16
"""Cache hits that pay for one more compilation; also misses of one new signature after which it is compiled."""

MISSED_SIGNATURES = 64
"""How many signatures have their misses counted, the latest ones."""

COMPILATION_CALLS = 1000
"""Compiling takes as long as about this many calls. An entry that was not used for longer may be evicted; a signature
whose guards fail is compiled again after this many misses: 16 would not do, as such guards often fail in each call."""


class Admission(Generic[Entry]):
    """A cache of compiled entries by signature, which decides whether another one may be compiled.

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
        self._most, self._credit, self._calls = most, FREE_COMPILATIONS * HITS_PER_COMPILATION, 0
        self.entries: OrderedDict[Hashable, Entry] = OrderedDict()
        self._used: dict[Hashable, int] = {}
        self._misses: OrderedDict[Hashable, int] = OrderedDict()

    def hit(self, key: Hashable, calls: int = 1) -> None:
        """Count calls that the entry of this key has run."""
        if key in self.entries:
            self._calls += calls
            self._used[key] = self._calls
            self._credit = min(self._credit + calls, FREE_COMPILATIONS * HITS_PER_COMPILATION)
            self.entries.move_to_end(key)

    def miss(self, key: Hashable) -> None:
        """Count a call that no entry was compiled for, or only entries whose guards fail."""
        self._calls += 1
        self._misses[key] = self._misses.pop(key, 0) + 1
        if len(self._misses) > MISSED_SIGNATURES:
            self._misses.popitem(last=False)

    def recurs(self, key: Hashable) -> bool:
        """Whether this key was missed so often that it is worth a compilation, however many there were."""
        return self._misses.get(key, 0) >= (COMPILATION_CALLS if key in self.entries else HITS_PER_COMPILATION)

    def refusal(self, key: Hashable) -> str:
        """Why no entry may be compiled for this key now, or ``""``."""
        if self._credit < HITS_PER_COMPILATION and not self.recurs(key):
            return "one call after the other is of a new kind"
        if len(self.entries) >= self._most and self._evictable() is None:
            return "as many signatures as max_signatures allows are compiled"
        return ""

    def alike(self, key: Hashable) -> list[tuple[Hashable, Entry]]:
        """What was compiled for signatures that differ in integers alone: it may not read them.

        A signature that is a tuple has the structure of the arguments first.
        """
        return [(other, entry) for other, entry in [*self.entries.items()] if _are_alike(key, other)]

    def add(self, key: Hashable, entry: Entry) -> None:
        """Add a compiled entry; evict the least recently used one if the cache is full and that one is idle."""
        if len(self.entries) >= self._most and (evicted := self._evictable()) is not None:
            del self.entries[evicted], self._used[evicted]
        if not self.recurs(key):
            self._credit -= HITS_PER_COMPILATION
        self._misses.pop(key, None)
        self.entries[key] = entry
        self._used[key] = self._calls

    def drop(self, key: Hashable) -> None:
        """Remove an entry, and refund its compilation."""
        del self.entries[key], self._used[key]
        self._credit += HITS_PER_COMPILATION

    def _evictable(self) -> Hashable | None:
        oldest = next(iter(self.entries), None)
        return oldest if oldest is not None and self._calls - self._used[oldest] > COMPILATION_CALLS else None


def _are_alike(key: Any, other: Any) -> bool:
    known = all(isinstance(each[0], Structure) for each in (key, other))
    return known and key[1:] == other[1:] and without_integers(key[0]) == without_integers(other[0])
