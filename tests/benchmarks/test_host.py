"""What a call costs the host: the modes of a workload, their turns, and what is said of them. Only a GPU is timed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autostream.cli import modes
from autostream.runtime.clock import Measured
from benchmarks import host, nets, zoo
from benchmarks.harness import training
from benchmarks.host import PLAIN, ROWS, BusyClock, Pace, main, measured, table
from benchmarks.suites import comparison_of


def quartiles(median: float) -> dict[str, float]:
    return {"q1": median - 1, "median": median, "q3": median + 1}


CELL: dict[str, Any] = {
    "host_us": quartiles(20.0),
    "latency_us": quartiles(50.0),
    "device_us": quartiles(30.0),
    "call_us": quartiles(31.0),
    "queued_calls": 40,
    "rounds": 40,
}


def result(*rows: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {"skipped": [], "rows": [*rows], **others}


def entries(line: str) -> list[str]:
    return [entry.strip() for entry in line.strip("|").split("|")]


class Ticks:
    """In the place of :class:`BusyClock`: the n-th measurement takes n µs, but every fifth one fails."""

    def __init__(self, device: torch.device) -> None:
        self.now = 0

    def pace(self, call: Measured, calls: int) -> Pace | None:
        return Pace(calls, 0.0)

    def host_us(self, call: Measured, pace: Pace) -> float | None:
        self.now += 1
        call()
        return float(self.now) if self.now % 5 else None


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "BusyClock", Ticks)
    monkeypatch.setattr(host, "SECONDS", 0.0)
    monkeypatch.setattr(host, "LATER", {"compile_default": modes.eager})


# The command


def run_main(
    monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: str, rows: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The JSON of a run whose processes take ten seconds each, and come to these rows."""
    clock = [0.0]

    def in_a_process(workload: str, after_compile: bool, start: float, seconds: float) -> dict[str, Any]:
        clock[0] += 10.0
        return {"workload": workload, "after": after_compile, "left": seconds, **(rows or {"modes": {}})}

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(host, "stamp", dict)
    monkeypatch.setattr(host, "_in_a_process", in_a_process)
    monkeypatch.setattr(host.time, "time", lambda: clock[0])
    assert main([*arguments, "--out", str(folder)]) == 0
    saved: dict[str, Any] = json.loads((folder / "host.json").read_text())
    return saved


def test_what_there_is_no_time_for_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    saved = run_main(monkeypatch, tmp_path, "linear", "towers8", "googlenet", "--seconds", "15", "--after-compile")
    assert [(row["workload"], row["left"], row["after"]) for row in saved["rows"]] == [
        ("linear", 15.0, True),
        ("towers8", 5.0, True),
    ]
    assert saved["skipped"] == ["googlenet"]
    assert "- googlenet: no time was left" in (tmp_path / "host.md").read_text()


# Modes


class Wrong(nn.Module):
    """What returns something else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def broken(model: nn.Module, args: Sequence[Any]) -> modes.Call:
    raise RuntimeError("no such luck\nat all")


def test_modes_that_work_are_timed_and_the_others_named(monkeypatch: pytest.MonkeyPatch, ticks: None) -> None:
    monkeypatch.setattr(host, "PLAIN", {"bare_replay": modes.eager, "autostream": PLAIN["autostream"]})
    monkeypatch.setattr(host, "COMPILED", {"wrong": lambda model, args: Wrong(), "broken": broken})
    said: list[str] = []
    row = measured(comparison_of(ROWS["linear"], "cpu")(), True, said.append)
    cells = row["modes"]
    assert {mode for mode, cell in cells.items() if "failed" not in cell} == {"bare_replay", "autostream"}
    assert cells["wrong"]["failed"].startswith("wrong: error ")
    assert cells["broken"]["failed"] == "RuntimeError: no such luck"
    # Alone, the measurements 1 to 15 without 5, 10 and 15; by turns, 16 to 45; at the end, 46 to 60.
    assert row["autostream_before_compile_us"]["median"] == 7.5
    assert row["autostream_after_compile_us"]["median"] == 52.5
    assert sum(cells[mode]["rounds"] for mode in ("bare_replay", "autostream")) == 24
    assert all(cells[mode]["queued_calls"] == host.CALLS for mode in ("bare_replay", "autostream"))
    assert (
        said.index("autostream by itself") < said.index("wrong is prepared") < said.index("compile_default is prepared")
    )
    assert json.loads(json.dumps(row)) == row
    assert "linear, broken: RuntimeError: no such luck" in table(result({"workload": "linear", **row}))


def test_training_steps_are_timed_with_gradients(monkeypatch: pytest.MonkeyPatch, ticks: None) -> None:
    monkeypatch.setattr(host, "TRAINING", {"bare_replay": training.eager})
    monkeypatch.setattr(host, "STEPS", 2)
    monkeypatch.setattr(host, "FEWEST_ROUNDS", 2)
    mlp12 = replace(zoo.TRAINING["train_mlp12"], model=lambda: nets.mlp(1024, 8, 1024))
    monkeypatch.setattr(zoo, "TRAINING", {"train_mlp12": mlp12})
    row = measured(
        comparison_of(replace(ROWS["mlp12_adamw"], batch=2, dtype="float32"), "cpu")(), True, lambda what: None
    )
    assert row["modes"]["bare_replay"]["queued_calls"] == host.STEPS
    assert [*row] == ["modes"], "nothing is compiled there"


# The table


def test_the_table_has_a_line_for_each_mode() -> None:
    row = {
        "workload": "towers8",
        "autostream_before_compile_us": quartiles(78.0),
        "autostream_after_compile_us": quartiles(134.0),
        "modes": {"bare_replay": CELL, "autostream": CELL | {"host_us": quartiles(80.04)}},
    }
    headers, _, bare, ours = table(result(row)).splitlines()
    assert entries(bare) == ["towers8", "bare_replay", "20.0", "19.0 to 21.0", "50.0", "30.0", "31.0", "", ""]
    assert entries(ours) == ["towers8", "autostream", "80.0", "79.0 to 81.0", "50.0", "30.0", "31.0", "78.0", "134.0"]
    assert entries(headers)[-2:] == ["autostream_before_compile_us", "autostream_after_compile_us"]


# On a GPU


@pytest.mark.gpu
def test_the_host_is_timed_while_the_device_sleeps() -> None:
    x = torch.ones(8, device="cuda")
    clock = BusyClock(x.device)
    pace = clock.pace(x.clone, 40)
    assert pace is not None
    assert pace.calls == 40
    assert clock.host_us(x.clone, pace) is not None
    assert clock.pace(x[0].item, 40) is None, "it waits for the device"


@pytest.mark.gpu
def test_calls_of_many_launches_are_timed_in_small_numbers() -> None:
    x = torch.ones(8, device="cuda")

    def call() -> None:
        for _ in range(200):
            x.add_(1)

    pace = BusyClock(x.device).pace(call, 40)
    assert pace is not None
    assert 1 <= pace.calls < 40
