"""How text for people looks; the examples of the functions say the rest."""

from __future__ import annotations

import pytest

from autostream.reporting.tables import size, source, table


def test_columns_are_aligned_by_the_first_word_of_their_heads() -> None:
    *_, row = table("T", ("op", "cost µs", "why"), [("a", "1", "b")], right="cost").splitlines()
    assert row == "a             1  b"


def test_no_amount_of_memory_is_too_small_or_too_large() -> None:
    assert [size(amount) for amount in (0, 999, 1000, 5e9, 4e12)] == ["0 B", "999 B", "1.0 kB", "5.0 GB", "4,000.0 GB"]


@pytest.mark.parametrize("directory", ["/usr/lib/", "../", r"C:\models" "\\", ""])
def test_source_lines_are_without_directories(directory: str) -> None:
    assert source(f"{directory}net.py:3: y = a / b  # a/b:1: c") == "net.py:3: y = a / b # a/b:1: c"


def test_long_source_lines_are_cut() -> None:
    assert source("net.py:1: " + "#" * 100) == "net.py:1: " + "#" * 49 + "…"
    assert source("no place at all") == "no place at all"
