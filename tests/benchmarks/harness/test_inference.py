"""Modes of inference: what counts as right, and what a subject is made of."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autostream.cli.restarted import Restarted, restarted
from autostream.errors import TargetError
from benchmarks.harness import inference
from benchmarks.harness.inference import Inference, Subject, subject_of
from benchmarks.harness.modes import eager
from tests.cli.test_bench import constant, sticky


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).relu()


@pytest.fixture
def subject() -> Subject:
    torch.manual_seed(0)
    return subject_of(Net().eval(), (torch.randn(4, 8),))


def comparison_with(monkeypatch: pytest.MonkeyPatch, subject: Subject, mode: Callable[..., Any]) -> Inference:
    monkeypatch.setattr(inference, "modes_of", lambda device: {"eager": eager, "cheat": mode})
    return Inference(subject)


def is_right(comparison: Inference, mode: str) -> bool:
    return comparison.prepare(mode).error() <= comparison.allowed_error


# What is right


def overwriting(model: nn.Module, args: Any) -> Callable[..., Any]:
    """Computes the right thing, in its arguments' place."""
    return lambda x: x.copy_(model(x))


@pytest.mark.parametrize("mode", [constant, sticky, overwriting])
def test_a_mode_that_cheats_is_wrong(
    monkeypatch: pytest.MonkeyPatch, subject: Subject, mode: Callable[..., Any]
) -> None:
    comparison = comparison_with(monkeypatch, subject, mode)
    assert is_right(comparison, "eager")
    assert not is_right(comparison, "cheat")


class Random(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)


class Zero(nn.Module):
    """Zeros, as a last layer of zeros yields."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 0


class Underflow(nn.Module):
    """In fp16 nothing is left of its values."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 1e-9


@pytest.mark.parametrize(
    ("model", "dtype", "reason"),
    [
        (Random(), torch.float32, "the plain model misses its own reference"),
        (Underflow(), torch.float16, "the plain model misses its own reference"),
        (Zero(), torch.float32, "other inputs change an output by 0.0e\\+00"),
    ],
)
def test_what_cannot_be_checked_is_refused(model: nn.Module, dtype: torch.dtype, reason: str) -> None:
    with pytest.raises(TargetError, match=f"results cannot be checked: {reason}"):
        Inference(subject_of(model, (torch.rand(4, 8).to(dtype),))).require_checkable()


class Spectrum(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.fft(x)


@pytest.mark.parametrize("model", [Net(), Spectrum()])
def test_what_can_be_checked_passes(model: nn.Module) -> None:
    Inference(subject_of(model.eval(), (torch.rand(4, 8),))).require_checkable()


# Subjects


class Forgetful(nn.Module):
    """Writes a buffer, a parameter and what it is given, and draws."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("idle", torch.zeros(2).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.inner.bias.add_(1)
        return x.add_(self.calls + self.inner.bias + 0 * torch.rand(2))


@torch.no_grad()
def test_what_changes_its_tensors_begins_each_call_with_those_of_the_first() -> None:
    """Making it so changes nothing, and in whatever dtype a copy is."""
    model, x = Forgetful().eval(), torch.ones(2)
    before, generator = [model.calls.clone(), model.inner.bias.clone()], torch.get_rng_state()
    again = restarted(model, (x,))
    assert isinstance(again, Restarted)
    assert (sorted(again.saved.values()), again.copied, again.training) == (["calls", "inner.bias"], True, False)
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(map(torch.equal, [model.calls, model.inner.bias, x], [*before, torch.ones(2)]))
    first, second, exact = again(x), again(x), copy.deepcopy(again).to(torch.float64)(x.double())
    assert torch.equal(first, second)
    assert torch.allclose(first.double(), exact)
    assert x.tolist() == [1, 1]
