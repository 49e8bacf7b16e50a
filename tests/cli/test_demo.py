"""``autostream demo``: its check of the outputs, its answers and its exit code."""

from __future__ import annotations

import json
import re
from math import isnan
from pathlib import Path

import pytest
import torch
from torch import nn

from autostream import cli
from autostream.cli import demo
from tests.cli.calls import error_of
from tests.reporting.reports import REPORT


class Scaled(nn.Module):
    """Stands for an optimized model, right or wrong by a factor."""

    def __init__(self, inner: nn.Module, factor: float) -> None:
        super().__init__()
        self.inner, self.factor, self.reports = inner, factor, (REPORT,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.factor


@pytest.fixture(autouse=True)
def small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "prepare", lambda target, *_: (nn.Linear(8, 8).eval(), (torch.ones(1, 8),)))


@pytest.mark.parametrize(("factor", "code"), [(1.0, 0), (1.00001, 0), (1.001, 1), (float("nan"), 1)])
def test_outputs_are_checked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, factor: float, code: int
) -> None:
    monkeypatch.setattr(demo, "optimize", lambda model: Scaled(model, factor))
    assert cli.main(["demo", "--device", "cpu"]) == code
    out, err = capsys.readouterr()
    assert re.search("runs as +CUDA graph over 2 streams", out)
    assert "\nBeside the plain model, in turns\n  largest difference: " in out
    assert re.search(r"plain model [\d.]+ ms, optimized [\d.]+ ms: [\d.]+× the speed", out)
    assert err == ("autostream: the outputs differ\n" if code else "")
    assert cli.main(["demo", "--device", "cpu", "--json", "--out", f"{tmp_path / 'demo.json'}"]) == code
    answer = json.loads((tmp_path / "demo.json").read_text())
    assert answer["report"]["model"] == REPORT.model
    assert min(answer["plain_us"], answer["optimized_us"]) > 0
    assert (answer["error"] is None) == isnan(factor), "JSON has no NaN"
    assert answer["error"] is None or (answer["error"] > answer["allowed"]) == bool(code)


def test_it_refuses_where_nothing_is_scheduled(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOSTREAM_DISABLE", "1")
    said = error_of(capsys, "demo", "--device", "cpu")
    assert said.startswith("nothing is scheduled while AUTOSTREAM_DISABLE is set")
