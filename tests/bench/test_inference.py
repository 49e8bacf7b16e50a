"""Modes of inference: what counts as right, and what a subject is made of."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autostream.bench import inference
from autostream.bench.contest import hold
from autostream.bench.inference import Inference, Restarted, Subject, device_of, restarted, subject_of
from autostream.bench.modes import CPU, eager
from autostream.errors import TargetError


class Net(nn.Module):
    """A layer without symmetries."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).relu()


@pytest.fixture
def subject() -> Subject:
    torch.manual_seed(0)
    return subject_of(Net().eval(), (torch.randn(4, 8),))


def contest_with(monkeypatch: pytest.MonkeyPatch, subject: Subject, mode: Callable[..., Any]) -> Inference:
    """A contest with one more mode, ``"cheat"``."""
    monkeypatch.setattr(inference, "modes_of", lambda device: {"eager": eager, "cheat": mode})
    return Inference(subject)


def is_right(contest: Inference, mode: str) -> bool:
    return contest.contender(mode).error() <= contest.allowed_error


# What is right


def test_the_model_itself_is_right(subject: Subject) -> None:
    contest = Inference(subject)
    assert 0 < contest.eager_error < 1e-6
    assert contest.contender("eager").error() == contest.eager_error
    assert contest.allowed_error == pytest.approx(8 * torch.finfo(torch.float32).eps, rel=1.0)
    assert is_right(contest, "eager")


def test_what_is_allowed_is_in_roundings_of_the_models_dtype(subject: Subject) -> None:
    halves = subject_of(subject.model.bfloat16(), (subject.args[0].bfloat16(),))
    assert Inference(halves).allowed_error == 2**-4


def constant(model: nn.Module, args: Any) -> Callable[..., Any]:
    """Ignores new inputs."""
    output = model(*args)
    return lambda *args: output


def sticky(model: nn.Module, args: Any) -> Callable[..., Any]:
    """Notices new inputs, but not that the first ones are back."""
    held = list(args)

    def call(x: Tensor) -> Any:
        if not torch.equal(x, args[0]):
            held[:] = [x]
        return model(*held)

    return call


def overwriting(model: nn.Module, args: Any) -> Callable[..., Any]:
    """Computes the right thing, in its arguments' place."""
    return lambda x: x.copy_(model(x))


def approximate(model: nn.Module, args: Any) -> Callable[..., Any]:
    """Rounds as float16 does."""
    return lambda x: model(x).half().float()


@pytest.mark.parametrize("mode", [constant, sticky, overwriting, approximate])
def test_a_mode_that_cheats_is_wrong(
    monkeypatch: pytest.MonkeyPatch, subject: Subject, mode: Callable[..., Any]
) -> None:
    contest = contest_with(monkeypatch, subject, mode)
    assert is_right(contest, "eager")
    assert not is_right(contest, "cheat")


def test_a_plain_model_that_is_not_finite_lets_nothing_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    class Overflow(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 60000

    subject = subject_of(Overflow(), (torch.tensor([1.0, 2.0]).half(),))
    contest = contest_with(monkeypatch, subject, lambda model, args: torch.zeros_like)
    assert contest.eager_error == float("inf")
    assert not is_right(contest, "eager")
    assert not is_right(contest, "cheat")


class Random(nn.Module):
    """Another output each time."""

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
    """Complex numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.fft(x)


class Sum(nn.Module):
    """In which order its inputs come is all the same."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sum()


@pytest.mark.parametrize("model", [Net(), Spectrum(), Sum()])
def test_what_can_be_checked_passes(model: nn.Module) -> None:
    Inference(subject_of(model.eval(), (torch.rand(4, 8),))).require_checkable()


def test_modes_are_prepared_and_run_without_gradients(monkeypatch: pytest.MonkeyPatch, subject: Subject) -> None:
    grads = []

    def watched(model: nn.Module, args: Any) -> Callable[..., Any]:
        grads.append(torch.is_grad_enabled())
        return lambda *args: grads.append(torch.is_grad_enabled()) or model(*args)  # type: ignore[func-returns-value]

    contender = contest_with(monkeypatch, subject, watched).contender("cheat")
    contender.call()
    contender.error()
    assert grads == [False] * 5
    assert torch.is_grad_enabled()


def test_a_mode_is_prepared_for_and_timed_with_the_subjects_own_arguments(
    monkeypatch: pytest.MonkeyPatch, subject: Subject
) -> None:
    seen: list[Any] = []

    def watched(model: nn.Module, args: Any) -> Callable[..., Any]:
        seen.extend(args)
        return lambda *args: seen.extend(args)

    contest_with(monkeypatch, subject, watched).contender("cheat").call()
    assert [id(x) for x in seen] == [id(subject.args[0])] * 2


def test_autostreams_reports_are_passed_on_and_others_have_none(subject: Subject) -> None:
    contest = Inference(subject)
    assert len(contest.contender("autostream").reports()) == 1
    assert contest.contender("eager").reports() == ()


class Reporting(nn.Module):
    """A model with a graph break, and with something of its own that is called reports."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.reports = nn.Linear(4, 4), ["the model's"]

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        return self.layer(x) if x.sum() < 1e9 else x


@pytest.mark.usefixtures("fresh_dynamo")
def test_reports_are_those_of_after_the_calls_and_not_the_models_own() -> None:
    contest = Inference(subject_of(Reporting().eval(), (torch.randn(2, 4),)))
    contender = contest.contender("autostream")
    contender.call()
    assert [report.mode for report in contender.reports()] == ["graph breaks"]
    assert contest.contender("eager").reports() == ()


@pytest.mark.usefixtures("fresh_dynamo")
def test_every_mode_of_the_cpu_is_right(monkeypatch: pytest.MonkeyPatch, subject: Subject) -> None:
    monkeypatch.setattr("autostream.bench.clock.ROUND_US", 1.0)
    cells = hold(Inference(subject), CPU)
    assert {mode: (cell.status, cell.reason) for mode, cell in cells.items()} == dict.fromkeys(CPU, ("ok", ""))


# Subjects


def test_other_arguments_are_smaller_and_in_reverse_in_all_dimensions() -> None:
    ((other,), nested) = subject_of(nn.Identity(), ([torch.tensor([[1.0, 2.0], [3.0, 4.0]])], 7)).others
    assert other.tolist() == [[3.0, 2.25], [1.5, 0.75]]
    assert nested == 7


def test_indices_stay_unless_there_is_nothing_else() -> None:
    """A table's offsets in reverse are no offsets; tokens in reverse are tokens."""
    values, indices = torch.tensor([1.0, 2.0]), torch.tensor([3, 4])
    assert [x.tolist() for x in subject_of(nn.Identity(), (values, indices)).others] == [[1.5, 0.75], [3, 4]]
    assert [x.tolist() for x in subject_of(nn.Identity(), (indices,)).others] == [[4, 3]]


def test_a_subject_is_where_its_parameters_are_or_else_its_arguments() -> None:
    assert device_of(subject_of(nn.Linear(1, 1, device="meta"), (torch.ones(1),))).type == "meta"
    assert device_of(subject_of(nn.ReLU(), ([torch.ones(1, device="meta")],))).type == "meta"
    assert device_of(subject_of(nn.ReLU(), ())).type == "cpu"


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
    assert (sorted(again.places.values()), again.copied, again.training) == (["calls", "inner.bias"], True, False)
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(map(torch.equal, [model.calls, model.inner.bias, x], [*before, torch.ones(2)]))
    first, second, exact = again(x), again(x), copy.deepcopy(again).to(torch.float64)(x.double())
    assert torch.equal(first, second)
    assert torch.allclose(first.double(), exact)
    assert x.tolist() == [1, 1]


def test_what_changes_nothing_is_run_as_it_is() -> None:
    model = nn.BatchNorm1d(2).eval()
    assert restarted(model, (torch.ones(3, 2),)) is model
