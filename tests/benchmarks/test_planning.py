"""The planning benchmark: its models have the ops that they promise, and its arithmetic is right."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from autostream.costs.device import profile_named
from autostream.reporting.report import Report
from autostream.scheduling.structure import width
from benchmarks import planning
from benchmarks.planning import (
    SHAPES,
    STAGES,
    Chains,
    chained,
    exponent,
    graph_of,
    main,
    planned,
    scheduled,
    scheduled_alone,
)

BOUNDED = ["sequential", "critical_path", "path_cover"]
"""Policies that take no time that they are given."""


@pytest.mark.parametrize("ops", [1, 135, 136, 1000])
def test_a_model_has_the_ops_that_are_asked_for_or_up_to_one_joint_more(ops: int) -> None:
    """Between two sums, eight chains have 16 ops each; a sum takes seven."""
    seconds = planned(*chained(ops), profile_named("h200"))
    joint = 8 * 16 + 7
    assert seconds["ops"] % joint == 0
    assert ops <= seconds["ops"] < ops + joint
    assert seconds["total"] == sum(seconds[stage] for stage in STAGES)


def test_chains_may_run_side_by_side_between_joints(monkeypatch: pytest.MonkeyPatch) -> None:
    reports: list[Report] = []
    plan = planning.pipeline.plan
    monkeypatch.setattr(planning.pipeline, "plan", lambda *args: reports.append(plan(*args)) or reports[-1])  # type: ignore[func-returns-value]
    planned(*chained(135), profile_named("h200"))
    (report,) = reports
    assert max(candidate.schedule.streams for candidate in report.candidates) == 8
    assert {candidate.captured for candidate in report.candidates} == {True}


def test_a_model_computes_something() -> None:
    torch.manual_seed(0)
    assert Chains(1000)(torch.randn(planning.WIDTH, planning.WIDTH)).isfinite().all()


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


def test_shapes_are_as_wide_as_they_say() -> None:
    """Chains are joined by sums, which eight chains come before; towers never meet."""
    assert width(graph_of(planning.chains(270))) == 8
    assert width(graph_of(planning.towers(3_000))) == 1000
    assert planning.layers(100) == planning.layers(100)
    assert all(max(row) < at for shape in SHAPES.values() for at, row in enumerate(shape(2_000)) if row)


def test_scheduling_is_measured_in_a_process_of_its_own() -> None:
    """Its peak is not that of this one, which has held a gigabyte more."""
    held_mb = len(bytearray(b"x") * (1 << 30)) >> 20
    row = scheduled_alone("layers", 50, profile_named("h200"))
    assert 50 < row["peak_mb"] < held_mb < planning.peak_mb()
    assert all(row[policy] > 0 for policy in BOUNDED)


def test_what_takes_next_to_no_time_is_not_zero() -> None:
    """The exponent divides by it."""
    assert planning._median_row([{"price": 4e-5}]) == {"price": 4e-5}


def test_importing_is_timed_in_new_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "IMPORTS", 1)
    seconds = planning.import_seconds()
    assert list(seconds) == ["torch", "autostream"]
    assert all(value > 0.05 for value in seconds.values())


def test_a_command_is_timed_in_a_new_process_that_finds_nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "COMMANDS", 2)
    monkeypatch.setattr(planning, "COMMAND", ("env",))
    folders: list[str] = []
    run = planning.subprocess.run

    def noted(command: list[str], **options: Any) -> Any:
        folders.append(options["env"]["AUTOSTREAM_CACHE_DIR"])
        assert not list(Path(folders[-1]).iterdir())
        return run(command, **options)

    monkeypatch.setattr(planning.subprocess, "run", noted)
    assert planning.command_seconds() > 0.05
    assert len(set(folders)) == 2


def test_a_command_that_fails_is_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "COMMAND", ("no-such-command",))
    with pytest.raises(planning.subprocess.CalledProcessError):
        planning.command_seconds()
