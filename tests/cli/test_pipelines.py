"""``autostream schedule --stages``, as its users meet it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autostream import cli
from tests.cli.calls import error_of

TOWER = """
import torch
from torch import nn

def tower():
    return nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))), (torch.ones(64, 512),)
"""


@pytest.fixture
def tower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tower.py").write_text(TOWER)
    return "tower.py:tower"


def test_a_pipeline_is_planned_without_a_gpu(capsys: pytest.CaptureFixture[str], tower: str) -> None:
    assert cli.main(["schedule", tower, "--stages", "4", "--microbatches", "8", "--device", "h200", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["pipeline"]["device"] == "NVIDIA H200"
    assert [stage["begins"] for stage in data["pipeline"]["stages"]] == ["", "2", "4", "6"]
    asked = {run["schedule"]: run for run in data["runs"] if run["microbatches"] == 8}
    assert [*asked] == ["GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"]
    assert not any(run["refusal"] for run in asked.values())
    assert {run["microbatches"] for run in data["runs"]} == {4, 8, 16, 32, 64, 128}
    assert max(asked["1F1B"]["memory_bytes"]) < max(asked["GPipe"]["memory_bytes"])
    all_rows = {tuple(run["memory_bytes"]) for run in data["runs"] if run["schedule"] == "GPipe"}
    assert len(all_rows) == 1  # GPipe holds the activations of all rows, however many microbatches they are
    best = min(data["runs"], key=lambda run: run["step_us"])
    assert data["best"] == {name: best[name] for name in ("schedule", "microbatches")}


def test_a_page_of_a_pipeline_has_all_schedules(tower: str, tmp_path: Path) -> None:
    assert (
        cli.main(["report", tower, "--stages", "2", "--microbatches", "4", "--device", "h200", "--out", "p.html"]) == 0
    )
    page = (tmp_path / "p.html").read_text()
    assert page.startswith("<!doctype html>")
    for schedule in ("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"):
        assert f"<h3>{schedule}, 4 microbatches" in page


def test_a_slower_interconnect_takes_longer(capsys: pytest.CaptureFixture[str], tower: str) -> None:
    steps = []
    for name in ("nvlink", "infiniband"):
        command = ["schedule", tower, "--stages", "2", "--device", "h200", "--interconnect", name, "--json"]
        assert cli.main(command) == 0
        data = json.loads(capsys.readouterr().out)
        assert data["interconnect"] == name
        assert data["pipeline"]["microbatches"] == 8
        steps.append(data["pipeline"]["step_us"])
    assert steps[0] < steps[1]


def test_too_many_stages_for_two_on_each_device_leave_the_others(
    capsys: pytest.CaptureFixture[str], tower: str
) -> None:
    assert cli.main(["schedule", tower, "--stages", "8", "--device", "h200", "--out", "pipeline.txt"]) == 0
    assert capsys.readouterr().out == ""
    text = Path("pipeline.txt").read_text()
    assert "refused  Interleaved1F1B: stages=16 is not allowed: the model has 7 cut points" in text
    assert "1F1B, 32 microbatches: a character is" in text


def test_no_schedule_is_offered_that_pytorch_refuses(capsys: pytest.CaptureFixture[str], tower: str) -> None:
    assert cli.main(["schedule", tower, "--stages", "4", "--microbatches", "3", "--device", "h200"]) == 0
    text = capsys.readouterr().out
    said = "microbatches=3 is not allowed: 1F1B takes at least one for each stage; use 4 or more"
    assert f"refused  1F1B: {said}" in text
    assert "GPipe, 3 microbatches: a character is" in text
    assert "1F1B, 3 microbatches: a character is" not in text.replace("Interleaved1F1B", "")


def test_what_cannot_be_planned_is_said(capsys: pytest.CaptureFixture[str], tower: str) -> None:
    """Wrong values are those of ``autostream.split`` (tests/test_splitting.py)."""
    said = error_of(capsys, "schedule", tower, "--device", "h200", "--microbatches", "8")
    assert said == "--microbatches is of a pipeline: say over how many devices, as in --stages 4"
    planned = ("schedule", tower, "--device", "h200", "--stages")
    assert error_of(capsys, *planned, "1").startswith("stages=1 is not allowed")
    assert error_of(capsys, *planned, "2", "--costs", "guessed").startswith("costs='guessed' is not allowed")
    assert "needs the device itself" in error_of(capsys, *planned, "2", "--costs", "measured")
    for option, value in (("--policy", "search"), ("--streams", "2"), ("--memory-budget", "2"), ("--seed", "1")):
        assert error_of(capsys, *planned, "2", option, value).startswith(f"{option} is of streams on one device")


def test_a_pipeline_is_planned_by_measured_times(capsys: pytest.CaptureFixture[str], tower: str) -> None:
    steps = []
    for costs in ("roofline", "measured"):
        assert cli.main(["schedule", tower, "--stages", "2", "--costs", costs, "--json"]) == 0
        steps.append(json.loads(capsys.readouterr().out)["pipeline"]["step_us"])
    assert steps[0] != steps[1]
