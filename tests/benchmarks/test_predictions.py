"""Predicted against measured: what counts, what is said, and that a row that ends its process costs only itself."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autostream
from benchmarks.predictions import measured, plot, row_of, summary, table


def line(policy: str, measured_us: float, predicted_us: float, roofline_us: float, *, chosen: bool) -> dict[str, Any]:
    streams = 1 if policy == "sequential" else 3
    times = {"measured_us": measured_us, "predicted_us": predicted_us, "roofline_us": roofline_us}
    return {"policy": policy, "streams": streams, "captured": True, **times, "chosen": chosen}


def row(name: str, *lines: dict[str, Any]) -> dict[str, Any]:
    return {"row": name, "level": "aten", "ops": 7, "costs": ["measured"], "seconds": {}, "candidates": list(lines)}


BRANCHY = row(
    "branchy:1",
    line("sequential", 200.0, 200.0, 150.0, chosen=False),
    line("critical_path", 100.0, 90.0, 150.0, chosen=True),
)
CHAIN = row(
    "chain:1", line("sequential", 50.0, 55.0, 40.0, chosen=True), line("critical_path", 60.0, 60.0, 60.0, chosen=False)
)


def test_errors_are_of_what_was_kept_and_of_all() -> None:
    found = summary([BRANCHY, CHAIN])
    assert found["error"] == pytest.approx((0.1 + 0.1) / 2)
    assert found["error_of_all_schedules"] == pytest.approx((0.0 + 0.1 + 0.1 + 0.0) / 4)
    assert found["roofline_error"] == pytest.approx((0.5 + 0.2) / 2)
    assert found["worst_against_one_stream"] == 1.0


def test_a_row_says_what_was_predicted_of_every_schedule_that_was_measured() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()
    (report,) = autostream.optimize(model, (torch.ones(2, 8),)).reports
    found = row_of("chain:1", report)
    assert found["ops"] == 2
    assert [entry["policy"] for entry in found["candidates"] if entry["chosen"]] == ["sequential"]
    for entry, candidate in zip(found["candidates"], report.candidates, strict=True):
        assert entry["predicted_us"] == pytest.approx(candidate.predicted_us, abs=0.01)
        assert entry["measured_us"] == pytest.approx(candidate.measured_us, abs=0.01)
        assert entry["roofline_us"] == entry["predicted_us"], "on a CPU, costs are those of the roofline"
    unmeasured = replace(report, candidates=(*report.candidates, replace(report.candidates[0], measured_us=None)))
    assert row_of("chain:1", unmeasured)["candidates"] == found["candidates"]


def test_a_row_that_ends_its_process_costs_only_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a, b, c and d the second ends the first process; another one goes on with the third."""
    asked: list[str] = []

    class Process:
        def __init__(self, command: list[str], **_: Any) -> None:
            asked.append(command[-1])
            first = len(asked) == 1
            self.stdout = ["loading\n", *(json.dumps({"row": name}) + "\n" for name in ("a" if first else "cd"))]
            self.returncode = 9 if first else 0

        def __enter__(self) -> Process:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(subprocess, "Popen", Process)
    assert [found["row"] for found in measured(["a", "b", "c", "d"])] == ["a", "c", "d"]
    assert [command.partition("measure(")[2] for command in asked] == ["['a', 'b', 'c', 'd'])", "['c', 'd'])"]
    assert "ended with 9" in capsys.readouterr().err


def test_the_table_has_a_line_for_each_row_and_the_plot_is_always_the_same(tmp_path: Path) -> None:
    rows = [BRANCHY, CHAIN]
    text = table({"rows": rows, "summary": summary(rows)})
    assert "| branchy:1" in text
    assert "-10%" in text
    assert "2.00×" in text
    assert "Mean error of the schedules kept: 10.0% with measured costs, 35.0% with the roofline" in text
    for name in ("a.svg", "b.svg"):
        plot(rows, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
