"""Runs that time schedules or warm up captures are undone: models with a limited number of calls keep all of them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch

import autostream
from benchmarks.harness.comparison import compare_modes
from benchmarks.harness.inference import Inference, subject_of
from tests.captures import Captures
from tests.wearing import WEARING, batch, check_calls, check_given, plain_step, steps, worn

OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "critical path": {"policy": "critical_path", "streams": 2},
    "measured": {"costs": "measured"},
}


@pytest.mark.parametrize("name", WEARING)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_calls_that_are_left_can_all_be_made(name: str, options: Mapping[str, Any]) -> None:
    """Without gradients and, where the model has them, with gradients; and with state that is an input."""
    make = partial(autostream.optimize, strict=True, **options)
    with torch.no_grad():
        check_calls(make, worn(name, 2), 2)
        check_given(make)
    if "policy" in options and name != "mask":
        check_calls(make, worn(name, 2), 2)


@pytest.mark.parametrize("name", ["ring", "counter"])
def test_training_steps_that_are_left_can_all_be_made(name: str) -> None:
    """The first step makes the optimizer's state, the second is scheduled."""
    ours = partial(autostream.train_step, policy="critical_path", streams=2)
    check_calls(partial(steps, step_of=ours), worn(name, 4), 4, partial(steps, step_of=plain_step), tolerance=1e-6)


@pytest.mark.parametrize("name", ["ring", "counter"])
@torch.no_grad()
def test_captures_for_moved_weights_are_undone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captures are fake (``tests/captures.py``). Weights move before each call."""
    captures, model = Captures(monkeypatch), worn(name, 2)
    fast = autostream.optimize(model, strict=True)

    def moving(x: torch.Tensor) -> torch.Tensor:
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
        return fast(x)

    check_calls(lambda model: moving, model, 2)
    assert captures.count == 2


@pytest.mark.parametrize("name", WEARING)
def test_benchmarks_restore_the_models_state(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is one call left, also afterwards."""
    monkeypatch.setattr("autostream.runtime.clock.ROUNDS", 9)
    monkeypatch.setattr("autostream.runtime.clock.ROUND_US", 1.0)
    model = worn(name, 1).eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    comparison = Inference(subject_of(model, (batch(0),)))
    comparison.require_checkable()
    cells = compare_modes(comparison, ["eager", "autostream"])
    assert [(cell.status, cell.reason) for cell in cells.values()] == [("ok", "")] * 2
    model.load_state_dict(before)
    with torch.no_grad():
        model(batch(0))
