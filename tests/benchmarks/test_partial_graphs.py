"""Models with ops that cannot be captured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import autostream
from benchmarks import partial_graphs
from benchmarks.partial_graphs import MODELS, inputs, main, row


@pytest.mark.parametrize("name", MODELS)
def test_a_model_computes_what_it_does_when_optimized(name: str) -> None:
    model, args = MODELS[name](), inputs(name, 8, "cpu")
    with torch.no_grad():
        torch.testing.assert_close(autostream.optimize(model)(*args), model(*args))


def test_the_command_writes_and_prints_its_rows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(partial_graphs, "stamp", dict)
    times = {"captured_share": 1.0, "eager_us": 1.0, "autostream_us": 1.0}
    monkeypatch.setattr(partial_graphs, "row", lambda name: {"between": name, **times})
    assert main(["--out", str(tmp_path)]) == 0
    saved = json.loads((tmp_path / "partial_graphs.json").read_text())
    assert [row["between"] for row in saved["rows"]] == [*MODELS]
    assert (tmp_path / "partial_graphs.md").read_text() == capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:TensorFloat32")
def test_on_a_gpu_some_of_a_model_is_captured_but_not_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial_graphs, "interleaved", lambda *_: {})
    measured = row("a number")
    assert 0 < measured["captured_share"] < 1
