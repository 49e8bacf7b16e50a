"""Models that no CUDA graph can compare_modes whole: what stands in their table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import autostream
from benchmarks import partial_graphs
from benchmarks.partial_graphs import COPIES, MODELS, WIDTH, inputs, main, row, table


@pytest.mark.parametrize("name", MODELS)
def test_a_model_computes_what_it_does_when_optimized(name: str) -> None:
    model, args = MODELS[name](), inputs(name, 8, "cpu")
    with torch.no_grad():
        torch.testing.assert_close(autostream.optimize(model)(*args), model(*args))


def test_a_batch_that_the_model_copies_changes_what_it_computes() -> None:
    model, (x, batch) = MODELS[COPIES](), inputs(COPIES, 8, "cpu")
    with torch.no_grad():
        (there, host), (other, same) = model(x, batch), model(x, batch + 1)
    assert not torch.equal(there, other)
    assert torch.equal(host, same)
    assert there.shape == host.shape == (32, WIDTH)


def test_the_table_says_what_is_captured() -> None:
    measured = {"between": "a number", "captured_share": 0.876, "eager_us": 250.04, "autostream_us": 130.06}
    *_, line = table([measured]).splitlines()
    assert [entry.strip() for entry in line.strip("|").split("|")] == ["a number", "88%", "250.0", "130.1"]


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


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        main([])
    assert "there is no CUDA device here" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:TensorFloat32")
def test_on_a_gpu_some_of_a_model_is_captured_but_not_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial_graphs, "interleaved", lambda *_: {})
    measured = row("a number")
    assert 0 < measured["captured_share"] < 1
