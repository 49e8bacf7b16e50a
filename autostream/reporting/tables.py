"""Formatting of numbers, names and tables in text output."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tabulate import tabulate

_SOURCE_WIDTH = 60


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], right: str = "") -> str:
    """A table under its title; columns whose first word is among ``right`` are aligned to the right.

    Example:
        >>> print(table("Fruit", ("name", "µs"), [("1e5", "7")], right="µs"))
        Fruit
        name      µs
        ------  ----
        1e5        7
    """
    # Names such as "1e5" must stay what they are.
    return f"{title}\n" + tabulate(rows, head, tablefmt="simple", disable_numparse=True, colalign=_sides(head, right))


def _sides(head: Sequence[str], right: str) -> list[str]:
    return ["right" if name.split(" ")[0] in right.split() else "left" for name in head]


@dataclass(frozen=True, slots=True)
class Table:
    """A table that is drawn as text or as HTML.

    Attributes:
        title: above it.
        head: the names of its columns.
        rows: their cells.
        right: first words of the columns that are aligned to the right.

    Example:
        >>> "<fig>" in Table("Fruit", ["name"], [["<fig>"]]).html()
        False
    """

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: str = ""

    def text(self) -> str:
        """The table under its title."""
        return table(self.title, self.head, self.rows, self.right)

    def html(self) -> str:
        """The table, without its title."""
        sides = _sides(self.head, self.right)
        return tabulate(self.rows, self.head, tablefmt="html", disable_numparse=True, colalign=sides)


def pairs(lines: Iterable[tuple[str, str]]) -> str:
    """Keys and values, one pair a line; a key is not repeated on consecutive lines.

    Example:
        >>> print(pairs([("bound", "one"), ("bound", "two")]))
        bound  one
               two
    """
    return tabulate(_repeat_no_keys(lines), tablefmt="plain", disable_numparse=True)


def us(time_us: float) -> str:
    """A time in µs.

    Example:
        >>> us(1234.56)
        '1,234.6 µs'
    """
    return f"{time_us:,.1f} µs"


def size(memory_bytes: float) -> str:
    """A number of bytes, in the largest unit that fits.

    Example:
        >>> size(13_100_000), size(4096), size(512)
        ('13.1 MB', '4.1 kB', '512 B')
    """
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if memory_bytes >= factor:
            return f"{memory_bytes / factor:,.1f} {unit}"
    return f"{memory_bytes:.0f} B"


def count(number: int, noun: str) -> str:
    """A number with its noun.

    Example:
        >>> count(1, "op"), count(2, "op")
        ('1 op', '2 ops')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def few(names: Sequence[str], most: int = 3) -> str:
    """The first names, and the number of the others.

    Example:
        >>> few("abcde")
        'a, b, c +2'
    """
    more = f" +{len(names) - most}" if len(names) > most else ""
    return line(", ".join(names[:most]) + more)


def line(text: str) -> str:
    r"""Text on one line without control characters, which names and source lines of a model may contain.

    Example:
        >>> line("a\r\n  b")
        'a b'
    """
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def source(text: str) -> str:
    """A source line without the directories of its file, truncated to fit into a table.

    Example:
        >>> source("/home/me/net.py:3: y = f(x)")
        'net.py:3: y = f(x)'
    """
    whole = line(text)
    if place := re.match(r"(.*?)(:\d+: .*)", whole):
        whole = re.split(r"[/\\]", place[1])[-1] + place[2]
    return whole if len(whole) <= _SOURCE_WIDTH else whole[: _SOURCE_WIDTH - 1] + "…"


def _repeat_no_keys(lines: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    last = ""
    for key, value in lines:
        yield ("" if key == last else key), value
        last = key
