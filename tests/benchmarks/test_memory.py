"""Memory as a table: only of rows that say all of it."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.memory import CHOSEN, COMPILED, ONE_STREAM, memory_table
from tests.benchmarks.results import cell, row


def planned(size: int, reserved: int) -> dict[str, Any]:
    schedule = {"mode": "cuda graph", "planned_bytes": size, "given_bytes": 5_000_000}
    return cell(1.0, reserved_bytes=reserved, schedule=schedule)


CELLS = {
    COMPILED: cell(1.0, reserved_bytes=20_000_000),
    ONE_STREAM: planned(5_000_000, 10_000_000),
    CHOSEN: planned(15_000_000, 45_000_000),
}


def entries(text: str) -> list[list[str]]:
    return [[entry.strip() for entry in line.strip("|").split("|")] for line in text.splitlines()[2:]]


def test_each_row_has_both_ratios_without_and_with_what_is_given() -> None:
    """Planned 15 against 5 MB, and 20 against 10 with weights; reserved 45 against 20 MB, and 50 against 25."""
    assert entries(memory_table([row("net", 8, **CELLS)])) == [
        ["net ×8", "5.0", "5.0", "15.0", "3.00×", "2.00×", "20.0", "10.0", "45.0", "2.25×", "2.00×"]
    ]


def test_what_is_reserved_for_training_has_what_is_given() -> None:
    """Reserved 45 against 20 MB, and no weights besides: each mode has made its own."""
    ((*_, ratio, whole),) = entries(memory_table([row("net", 8, **CELLS) | {"optimizer": "sgd"}]))
    assert (ratio, whole) == ("2.25×", "2.25×")


@pytest.mark.parametrize("mode", CELLS)
def test_a_row_that_lacks_a_mode_or_what_it_takes_is_left_out(mode: str) -> None:
    unknown = {name: value for name, value in CELLS[mode].items() if name not in ("reserved_bytes", "schedule")}
    without = {name: value for name, value in CELLS.items() if name != mode}
    rows = [row("net", **CELLS), row("without", **without), row("unknown", **{**CELLS, mode: unknown})]
    assert [line[0] for line in entries(memory_table(rows))] == ["net"]
