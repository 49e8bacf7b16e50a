"""Models with so many calls left find every one of them there, however often they are run to be timed."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch

import autostream
from benchmarks.harness.contest import hold
from benchmarks.harness.inference import Inference, subject_of
from tests.captures import Captures
from tests.wearing import WEARING, batch, check_calls, check_given, plain_step, steps, worn

OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "critical path": {"policy": "critical_path", "streams": 2},
    "path cover": {"policy": "path_cover"},
    "measured": {"costs": "measured"},
}


@pytest.mark.parametrize("left", [1, 3])
@pytest.mark.parametrize("name", WEARING)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@torch.no_grad()
def test_every_call_that_is_left_is_the_callers(name: str, left: int, options: Mapping[str, Any]) -> None:
    check_calls(partial(autostream.optimize, strict=True, **options), worn(name, left), left)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@torch.no_grad()
def test_so_it_is_where_what_is_written_is_the_callers(options: Mapping[str, Any]) -> None:
    check_given(partial(autostream.optimize, strict=True, **options))


@pytest.mark.parametrize("name", ["ring", "counter"])
@pytest.mark.parametrize("left", [1, 3])
def test_so_it_is_with_gradients(name: str, left: int) -> None:
    check_calls(partial(autostream.optimize, strict=True, policy="critical_path", streams=2), worn(name, left), left)


@pytest.mark.parametrize("name", ["ring", "counter"])
def test_so_it_is_in_training(name: str) -> None:
    """The first step makes the optimizer's state, the second is scheduled."""
    ours = partial(autostream.train_step, policy="critical_path", streams=2)
    check_calls(partial(steps, step_of=ours), worn(name, 4), 4, partial(steps, step_of=plain_step), tolerance=1e-6)


@pytest.mark.parametrize("name", ["ring", "counter"])
@torch.no_grad()
def test_so_it_is_where_graphs_are_captured_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As make-believe graphs, in the pool of others, and where weights have moved at the last call."""
    captures, model = Captures(monkeypatch), worn(name, 2)
    fast = autostream.optimize(model, strict=True)

    def moving(x: torch.Tensor) -> torch.Tensor:
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
        return fast(x)

    check_calls(lambda model: moving, model, 2)
    assert captures.count == 2


@pytest.mark.parametrize("name", WEARING)
def test_modes_are_timed_on_the_state_that_there_was(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is one call left, and there is after the contest."""
    monkeypatch.setattr("autostream.runtime.clock.ROUNDS", 9)
    monkeypatch.setattr("autostream.runtime.clock.ROUND_US", 1.0)
    model = worn(name, 1).eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    contest = Inference(subject_of(model, (batch(0),)))
    contest.require_checkable()
    cells = hold(contest, ["eager", "autostream"])
    assert [(cell.status, cell.reason) for cell in cells.values()] == [("ok", "")] * 2
    model.load_state_dict(before)
    with torch.no_grad():
        model(batch(0))
