"""Rows as tables: three rounds each, numbers that are easy to divide."""

from __future__ import annotations

import csv
from typing import Any

import pytest

from autostream.cli.changes import Measure
from benchmarks.harness.table import cells_table, ratios_table

Row = dict[str, Any]


def cell(us: float, *, scatter: float = 0.0, device: float | None = None, **facts: Any) -> dict[str, Any]:
    return {
        "status": "ok",
        "call_us": [us - scatter, us, us + scatter],
        "device_us": [us if device is None else device] * 3,
        "host_us": {"q1": 1.0, "median": 21.0, "q3": 3.0},
        "latency_us": {"q1": 1.0, "median": 31.0, "q3": 3.0, "p99": 41.0},
        **facts,
    }


@pytest.fixture
def rows() -> list[Row]:
    """One row in order, with a mode that is noisy and one that is wrong; one without a comparison."""
    facts = {"allocated_bytes": 2_500_000, "reserved_bytes": 0, "first_s": 1.25, "error": 1e-3}
    schedule = {"mode": "cuda graph", "policy": "path_cover", "streams": 4}
    cells = {
        "eager": cell(2000.0, **facts),
        "fast": cell(1000.0, device=500.0, schedule=schedule),
        "noisy": cell(2000.0, scatter=1000.0),
        "bad": {"status": "wrong", "reason": "error inf, 0.1 allowed"},
    }
    return [
        {"workload": "net", "batch": 8, "cells": cells},
        {"workload": "lost", "batch": 1, "failure": "crashed: exit code 1", "cells": {}},
    ]


def parsed(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(text.splitlines()))


# A line for each cell


def test_a_cell_has_all_its_numbers(rows: list[Row]) -> None:
    eager, fast, *_ = parsed(cells_table(rows, "eager", "csv"))
    assert eager == {
        "workload": "net ×8", "mode": "eager", "µs a call": "2000", "IQR": "0", "faster": "1", "faster IQR": "0",
        "device µs": "2000",
        "latency µs": "31", "p99": "41", "host µs": "21", "calls/s": "500", "MB": "2.5", "reserved MB": "0",
        "first s": "1.25", "error": "0.001", "streams": "", "remark": "",
    }  # fmt: skip
    assert [fast[name] for name in ("faster", "device µs", "calls/s")] == ["2", "500", "1000"]
    assert [fast[name] for name in ("MB", "reserved MB", "first s", "error")] == [""] * 4
    assert [fast["streams"], fast["remark"]] == ["4", "cuda graph path_cover"]


def test_a_cell_that_was_not_timed_says_why_and_has_no_numbers(rows: list[Row]) -> None:
    bad = parsed(cells_table(rows, "eager", "csv"))[3]
    assert {name: value for name, value in bad.items() if value} == {
        "workload": "net ×8", "mode": "bad", "remark": "wrong: error inf, 0.1 allowed",
    }  # fmt: skip


# A line for each row


def test_a_row_has_the_baselines_time_and_the_others_ratios(rows: list[Row]) -> None:
    net, lost = parsed(ratios_table(rows, "eager", "call", "csv"))
    # The rounds' ratios of the noisy mode are 2, 1 and 2/3.
    assert {name: value for name, value in net.items() if not name.endswith("IQR")} == {
        "workload": "net ×8", "eager µs": "2000", "fast": "2", "noisy": "1", "bad": "wrong",
    }  # fmt: skip
    assert {name: value for name, value in lost.items() if value} == {
        "workload": "lost", "eager µs": "crashed: exit code 1",
    }  # fmt: skip


def test_programs_read_how_far_ratios_scatter(rows: list[Row]) -> None:
    """Beside each ratio, noisy or not; a cell that has none has no spread."""
    net, lost = parsed(ratios_table(rows, "eager", "call", "csv"))
    assert list(net) == ["workload", "eager µs", "fast", "fast IQR", "noisy", "noisy IQR", "bad", "bad IQR"]
    assert [net["fast IQR"], net["noisy IQR"], net["bad IQR"]] == ["0", "1.33333333", ""]
    assert [lost["fast IQR"], lost["noisy IQR"], lost["bad IQR"]] == ["", "", ""]
    eager, _, noisy, bad, _ = parsed(cells_table(rows, "eager", "csv"))
    assert [line["faster IQR"] for line in (eager, noisy, bad)] == ["0", "1.33333333", ""]
    assert list(eager)[4:7] == ["faster", "faster IQR", "device µs"]


def test_a_time_that_was_not_taken_is_a_dash(rows: list[Row]) -> None:
    """Not the cell's status: that it is ok is no number. Where the baseline alone lacks times, the mode's is."""
    for mode in ("eager", "fast"):
        del rows[0]["cells"][mode]["device_us"]
    net, _ = parsed(ratios_table(rows, "eager", "device", "csv"))
    assert [net[name] for name in ("eager µs", "fast", "noisy", "bad")] == ["–", "–", "ok", "wrong"]
    net, _ = parsed(ratios_table(rows, "eager", "call", "csv"))
    assert net["fast"] == "2"
    _, fast, *_ = parsed(cells_table(rows, "eager", "csv"))
    assert (fast["µs a call"], fast["faster"], fast["device µs"], fast["latency µs"]) == ("1000", "2", "", "31")


@pytest.mark.parametrize(("measure", "faster"), [("call", "2"), ("device", "4")])
def test_faster_is_by_either_time(rows: list[Row], measure: Measure, faster: str) -> None:
    _, fast, *_ = parsed(cells_table(rows, "eager", "csv", measure))
    assert (fast["faster"], fast["µs a call"], fast["device µs"]) == (faster, "1000", "500")


# Formats


def test_bars_do_not_end_the_columns_of_github(rows: list[Row]) -> None:
    rows[0]["cells"]["bad"]["reason"] = rows[1]["failure"] = "a|b"
    text = cells_table(rows, "eager", "github")
    assert (text.count(r"wrong: a\|b"), text.count(r"| a\|b"), text.count("a|b")) == (1, 1, 0)
    assert r" a\|b |" in ratios_table(rows, "eager", "call", "github")
    for form in ("terminal", "csv"):
        assert cells_table(rows, "eager", form).count("a|b") == 2
