"""The comparison of runs of many steps with the spread of eager ones, which ``gpu/test_steps.py`` makes on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import autostream
from benchmarks.harness.steps import StepSubject
from tests.spread import EAGER_RUNS, End, excess, trained

Run = Callable[[StepSubject], Callable[..., Any]]


def ours(subject: StepSubject) -> Callable[..., Any]:
    return autostream.step(optimizers=subject.optimizers, kernels="eager", strict=True)(subject.update)


def with_another_rate(subject: StepSubject) -> Callable[..., Any]:
    """A step that is wrong by little: one of its rates is 2 % lower."""
    for group in subject.optimizers[-1].param_groups:
        group["lr"] *= 0.98
    return subject.update


def without_the_last_average(subject: StepSubject) -> Callable[..., Any]:
    """A step that leaves one bias of the targets as it was."""

    def update(*batch: Any) -> Any:
        bias = subject.modules.get_parameter("targets.1.4.bias")
        before = bias.detach().clone()
        result = subject.update(*batch)
        with torch.no_grad():
            bias.copy_(before)
        return result

    return update


def end(run: Run, seed: int) -> End:
    return trained("sac", run, seed, torch.device("cpu"), batch=8, count=12)


def test_our_step_is_within_the_spread_of_eager_runs_and_wrong_ones_are_not() -> None:
    eager = [end(lambda subject: subject.update, seed) for seed in range(EAGER_RUNS)]
    assert excess(end(ours, EAGER_RUNS), eager) <= 1
    for wrong in (with_another_rate, without_the_last_average):
        assert excess(end(wrong, EAGER_RUNS), eager) > 1


def test_runs_like_the_others_are_seldom_outside() -> None:
    """Of 400 sets of runs drawn alike, in two dimensions and in many, fewer than one in six, and none in many."""
    generator = torch.Generator().manual_seed(0)
    for dimensions, most in ((2, 400 // 6), (1000, 2)):
        outside = 0
        for _ in range(400):
            ends = [{"weight": torch.randn(dimensions, generator=generator)} for _ in range(EAGER_RUNS + 1)]
            outside += excess(ends[0], ends[1:]) > 1
        assert outside <= most


def test_what_all_eager_runs_count_alike_has_to_be_the_same() -> None:
    ends = [{"weight": torch.tensor(value), "count": torch.tensor(3.0)} for value in (1.0, 2.0, 3.0)]
    assert excess(ends[0], ends[1:]) == 1
    with pytest.raises(AssertionError):
        excess({"weight": torch.tensor(2.0), "count": torch.tensor(4.0)}, ends)
