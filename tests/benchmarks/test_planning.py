"""The planning benchmark: its models have the ops that they promise, and its arithmetic is right."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch

from autostream.costs.device import profile_named
from benchmarks import planning
from benchmarks.planning import STAGES, chained, exponent, main, planned, scheduled, scheduled_alone

BOUNDED = ["sequential", "critical_path", "path_cover"]
"""Policies that take no time that they are given."""


@pytest.mark.parametrize("ops", [135, 136])
def test_a_model_has_the_ops_that_are_asked_for_or_up_to_one_joint_more(ops: int) -> None:
    """Between two sums, eight chains have 16 ops each; a sum takes seven."""
    seconds = planned(*chained(ops), profile_named("h200"))
    joint = 8 * 16 + 7
    assert seconds["ops"] % joint == 0
    assert ops <= seconds["ops"] < ops + joint
    assert seconds["total"] == sum(seconds[stage] for stage in STAGES)


def test_the_exponent_is_that_of_the_growth_from_first_to_last() -> None:
    rows = [{"ops": 100.0, "trace": 3.0}, {"ops": 200.0, "trace": 99.0}, {"ops": 400.0, "trace": 48.0}]
    assert exponent(rows, "trace") == pytest.approx(2.0)
    assert math.isnan(exponent(rows[:1], "trace"))


def test_results_are_written_as_json_and_as_tables(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(planning, "import_seconds", lambda: {"torch": 1.0, "autostream": 1.25})
    monkeypatch.setattr(planning, "command_seconds", lambda: 6.0)
    monkeypatch.setattr(planning, "scheduled_alone", scheduled)
    sizes = ["1", "200", "--rounds", "1", "--graphs", "300"]
    assert main([*sizes, "--models", "towers8", "--out", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "planning.json").read_text())
    assert [row["ops"] for row in result["rows"]] == [135, 270]
    (towers,) = result["models"]
    assert (towers["model"], towers["ops"]) == ("towers8", 41)
    assert set(result["exponents"]) == {*STAGES, "total", "export"}
    assert result["import_ratio"] == 1.25
    assert result["profile"] == "NVIDIA H200"
    assert result["stamp"]["torch"] == str(torch.__version__)
    assert [(row["shape"], row["ops"]) for row in result["scheduling"]] == [
        ("chains", 405),
        ("layers", 300),
        ("towers", 300),
    ]
    assert all(set(row) == {*BOUNDED, "shape", "ops", "peak_mb"} for row in result["scheduling"])
    table = (tmp_path / "planning.md").read_text()
    assert table.strip() in capsys.readouterr().out
    assert "ratio 1.25" in table
    assert "autostream inspect googlenet --input 1x3x224x224: 6.0 s from the shell" in table
    assert re.search(r"\| +\| 270 +\|", table)
    assert re.search(rf"\| towers8 +\| 41 .* {100 * towers['verify'] / towers['total']:.3g} +\|", table)


def test_scheduling_is_measured_in_a_process_of_its_own() -> None:
    """Its peak is not that of this one, which has held a gigabyte more."""
    held_mb = len(bytearray(b"x") * (1 << 30)) >> 20
    row = scheduled_alone("layers", 50, profile_named("h200"))
    assert 50 < row["peak_mb"] < held_mb < planning.peak_mb()
    assert all(row[policy] > 0 for policy in BOUNDED)
