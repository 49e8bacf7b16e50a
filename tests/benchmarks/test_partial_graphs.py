"""Models with ops that cannot be captured."""

from __future__ import annotations

import pytest
import torch

import autostream
from benchmarks import partial_graphs
from benchmarks.partial_graphs import MODELS, inputs, row


@pytest.mark.parametrize("name", MODELS)
def test_a_model_computes_what_it_does_when_optimized(name: str) -> None:
    model, args = MODELS[name](), inputs(name, 8, "cpu")
    with torch.no_grad():
        torch.testing.assert_close(autostream.optimize(model)(*args), model(*args))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:TensorFloat32")
def test_on_a_gpu_some_of_a_model_is_captured_but_not_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial_graphs, "interleaved", lambda *_: {})
    measured = row("a number")
    assert 0 < measured["captured_share"] < 1
