"""Rows as tables: three rounds each, numbers that are easy to divide."""

from __future__ import annotations

import csv
from typing import Any

import pytest

from autostream.cli.changes import Measure
from benchmarks.harness.table import FORMATS, cells_table, ratios_table, title

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


def test_people_read_numbers_with_commas_and_units(rows: list[Row]) -> None:
    lines = cells_table(rows, "eager").splitlines()
    eager = lines[2].split()
    assert eager == ["net", "×8", "eager", "2,000.0", "0.0", "1.00×", "2,000.0", "31.0", "41.0", "21.0", "500",
                     "2.5", "0.0", "1.2", "1.0e-03"]  # fmt: skip


def test_a_cell_that_was_not_timed_says_why_and_has_no_numbers(rows: list[Row]) -> None:
    bad = parsed(cells_table(rows, "eager", "csv"))[3]
    assert {name: value for name, value in bad.items() if value} == {
        "workload": "net ×8", "mode": "bad", "remark": "wrong: error inf, 0.1 allowed",
    }  # fmt: skip


def test_a_row_that_failed_has_a_line(rows: list[Row]) -> None:
    lost = parsed(cells_table(rows, "eager", "csv"))[4]
    assert {name: value for name, value in lost.items() if value} == {
        "workload": "lost", "remark": "crashed: exit code 1",
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


def test_ratios_are_of_the_time_that_is_asked_for(rows: list[Row]) -> None:
    rows[0]["cells"]["eager"]["device_us"] = [1500.0] * 3
    net, _ = parsed(ratios_table(rows, "eager", "device", "csv"))
    assert (net["eager µs"], net["fast"], net["noisy"]) == ("1500", "3", "0.75")


def test_what_scatters_is_marked_and_only_that(rows: list[Row]) -> None:
    text = ratios_table(rows, "eager", "call")
    assert "2.00×  1.00× ±1.33  wrong" in text
    assert text.count("±") == 1


def test_another_mode_may_be_the_baseline(rows: list[Row]) -> None:
    net, _ = parsed(ratios_table(rows, "fast", "call", "csv"))
    assert (net["fast µs"], net["eager"]) == ("1000", "0.5")


def test_where_the_baseline_was_not_timed_its_place_says_so(rows: list[Row]) -> None:
    rows[0]["cells"]["eager"] = {"status": "timed out", "reason": "no sign of life for 9 s"}
    net, _ = parsed(ratios_table(rows, "eager", "call", "csv"))
    assert [net[name] for name in ("eager µs", "fast", "noisy", "bad")] == ["timed out", "ok", "ok", "wrong"]


def test_a_mode_that_a_row_lacks_leaves_its_place_empty(rows: list[Row]) -> None:
    rows.append({"workload": "small", "cells": {"eager": cell(1.0), "late": cell(0.5)}})
    net, _, small = parsed(ratios_table(rows, "eager", "call", "csv"))
    names = [name for name in net if not name.endswith("IQR")]
    assert names == ["workload", "eager µs", "fast", "noisy", "bad", "late"]
    assert net["late"] == small["fast"] == ""
    assert small["late"] == "2"


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


def test_csv_quotes_what_has_commas(rows: list[Row]) -> None:
    text = cells_table(rows, "eager", "csv")
    assert '"wrong: error inf, 0.1 allowed"' in text
    assert len(text.splitlines()) == 6
    assert not text.endswith("\n")


def test_github_aligns_text_left_and_numbers_right(rows: list[Row]) -> None:
    head, rule, *lines = ratios_table(rows, "eager", "call", "github").splitlines()
    assert [name.strip() for name in head.strip("|").split("|")] == ["workload", "eager µs", "fast", "noisy", "bad"]
    assert set(rule) == {"|", "-"}
    assert lines[0].startswith("| net ×8     | ")
    assert lines[0].endswith(" 2,000.0 |  2.00× | 1.00× ±1.33 | wrong |")
    assert len(lines) == 2


@pytest.mark.parametrize("form", FORMATS)
def test_a_table_may_be_empty(form: str) -> None:
    assert "workload" in cells_table([], "eager", form)
    assert "eager µs" in ratios_table([], "eager", "call", form)


def test_a_title_has_what_is_not_usual() -> None:
    assert title({"workload": "net"}) == title({"workload": "net", "batch": 1, "optimizer": ""}) == "net"
    assert title({"workload": "net", "batch": 32, "optimizer": "adamw"}) == "net ×32 adamw"
