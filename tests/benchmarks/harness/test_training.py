"""Modes of training: what a step must do to count as right."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.harness import training
from benchmarks.harness.comparison import compare_modes
from benchmarks.harness.training import CUDA, Training, TrainingSubject, eager

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


def mean_square(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().mean()


def subject(optimizer: str = "sgd", device: str = "cpu", dtype: torch.dtype = torch.float32) -> TrainingSubject:
    """A small net with buffers that steps change. A bias before the norm would have noise for its gradient."""
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4))
    data = torch.randn(32, 8, generator=generator), torch.randn(32, 4, generator=generator)
    model = model.to(device, dtype).train()
    x, y = (values.to(device, dtype) for values in data)
    return TrainingSubject(model, OPTIMIZERS[optimizer](model.parameters()), (x, y), mean_square)


def is_right(comparison: Training, mode: str) -> bool:
    return comparison.prepare(mode).error() <= comparison.allowed_error


def comparison_with(monkeypatch: pytest.MonkeyPatch, mode: Callable[..., Any], optimizer: str = "sgd") -> Training:
    monkeypatch.setattr(training, "training_modes_of", lambda device: {"eager": eager, "cheat": mode})
    return comparison_of(optimizer)


def comparison_of(optimizer: str = "sgd", device: str = "cpu", dtype: torch.dtype = torch.float32) -> Training:
    return Training(partial(subject, optimizer, device), dtype)


# Modes


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(("mode", "optimizer"), [("compile_default", "sgd"), ("autostream", "adamw")])
def test_a_mode_of_the_cpu_is_right(mode: str, optimizer: str) -> None:
    comparison = comparison_of(optimizer)
    assert comparison.eager_error < 1e-4
    prepared = comparison.prepare(mode)
    assert prepared.error() <= comparison.allowed_error
    assert len(prepared.reports()) == (mode == "autostream")


@pytest.mark.gpu
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.filterwarnings("ignore:TensorFloat32", "ignore:The CUDA Graph is empty")  # Inductor's own
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("mode", CUDA)
def test_a_mode_of_the_gpu_is_right(mode: str, optimizer: str) -> None:
    assert is_right(comparison_of(optimizer, "cuda"), mode)


def test_a_step_is_forward_backward_optimizer_and_zero_grad() -> None:
    ours, theirs = subject(), subject()
    loss = eager(ours)(*ours.data)
    expected = mean_square(theirs.model, *theirs.data)
    expected.backward()
    theirs.optimizer.step()
    assert loss.item() == expected.item()
    assert not loss.requires_grad
    torch.testing.assert_close(ours.model.state_dict(), theirs.model.state_dict(), rtol=0, atol=0)
    assert [parameter.grad for parameter in ours.model.parameters()] == [None] * 5


# What is right


def test_modes_are_checked_in_float32_and_timed_as_pytorch_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convolutions of cuDNN compute in TF32 by default, in some layouts."""
    allowed: list[bool] = []

    def noting(subject: TrainingSubject) -> training.Step:
        step = eager(subject)

        def call(*data: Tensor) -> Tensor:
            allowed.append(torch.backends.cudnn.allow_tf32)
            return step(*data)

        return call

    prepared = comparison_with(monkeypatch, noting).prepare("cheat")
    prepared.error()
    prepared.call()
    assert set(allowed[: training.STEPS]) == {False}
    assert allowed[-1]


def without_momentum(subject: TrainingSubject) -> training.Step:
    subject.optimizer.param_groups[0]["momentum"] = 0.0
    return eager(subject)


def forgetful(subject: TrainingSubject) -> training.Step:
    """Right in all but the last parameter's momentum, which it forgets after each step."""
    step = eager(subject)

    def call(*data: Tensor) -> Tensor:
        loss = step(*data)
        *_, last = subject.model.parameters()
        subject.optimizer.state[last]["momentum_buffer"].zero_()
        return loss

    return call


@pytest.mark.parametrize("mode", [without_momentum, forgetful])
def test_a_step_that_leaves_something_out_is_wrong(
    monkeypatch: pytest.MonkeyPatch, mode: Callable[[TrainingSubject], training.Step]
) -> None:
    comparison = comparison_with(monkeypatch, mode)
    assert is_right(comparison, "eager")
    assert not is_right(comparison, "cheat")


def zeroing(names: str) -> Callable[[TrainingSubject], training.Step]:
    """A mode in which the gradients of some parameters are lost on their way to the optimizer."""

    def mode(subject: TrainingSubject) -> training.Step:
        for name, parameter in subject.model.named_parameters():
            if re.search(names, name):
                parameter.register_hook(torch.zeros_like)
        return eager(subject)

    return mode


def frozen(subject: TrainingSubject) -> training.Step:
    """Parameters never move, though everything else is as it must be."""
    step, parameters = eager(subject), list(subject.model.parameters())

    def call(*data: Tensor) -> Tensor:
        before = [parameter.detach().clone() for parameter in parameters]
        loss = step(*data)
        with torch.no_grad():
            for parameter, value in zip(parameters, before, strict=True):
                parameter.copy_(value)
        return loss

    return call


@pytest.mark.parametrize("mode", [zeroing("bias"), zeroing("0.weight"), frozen])
def test_what_hides_in_the_roundings_of_half_precision_is_seen(
    monkeypatch: pytest.MonkeyPatch, mode: Callable[[TrainingSubject], training.Step]
) -> None:
    monkeypatch.setattr(training, "training_modes_of", lambda device: {"eager": eager, "cheat": mode})
    comparison = comparison_of("adamw", dtype=torch.bfloat16)
    assert is_right(comparison, "eager")
    assert not is_right(comparison, "cheat")


def test_what_goes_wrong_in_the_timed_dtype_alone_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def halves(subject: TrainingSubject) -> training.Step:
        step = eager(subject)
        factor = 1 if subject.data[0].dtype is torch.float32 else 3
        return lambda *data: step(*data) * factor

    comparison = comparison_with(monkeypatch, halves)
    assert is_right(comparison, "cheat")
    assert not is_right(Training(partial(subject, "sgd", "cpu"), torch.bfloat16), "cheat")


def test_a_tensor_that_plain_steps_miss_tells_nothing() -> None:
    """The gradient of a bias before a norm is rounding alone, and AdamW makes it a step like any other."""

    def biased(dtype: torch.dtype) -> TrainingSubject:
        made = subject("adamw", dtype=dtype)
        model = nn.Sequential(nn.Linear(8, 16), *list(made.model)[1:]).to(dtype)  # type: ignore[call-overload]
        with torch.no_grad():
            model[0].weight.copy_(made.model[0].weight)  # type: ignore[index]
            model[0].bias.zero_()
        return TrainingSubject(model, OPTIMIZERS["adamw"](model.parameters()), made.data, made.loss)

    comparison = Training(biased, torch.float32)
    assert comparison.eager_error < 0.01
    assert is_right(comparison, "eager")


class Balanced(nn.Module):
    """A weight whose gradient is almost zero, so that rounding decides its sign, and one that has far to go."""

    def __init__(self) -> None:
        super().__init__()
        self.near, self.far = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.near - (1 - 2**-22), self.far - 3]) * x


def test_a_tensor_that_rounding_decides_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain step that happens to find the sign is no proof that any other would."""

    def balanced(dtype: torch.dtype) -> TrainingSubject:
        model, data = Balanced().to(dtype), (torch.ones(2, dtype=dtype), torch.zeros(2, dtype=dtype))
        return TrainingSubject(model, OPTIMIZERS["adamw"](model.parameters()), data, mean_square)

    def rounding(subject: TrainingSubject) -> training.Step:
        """As kernels might that compute the weight with another rounding."""
        step = eager(subject)
        values = dict(subject.model.named_parameters())

        def call(*data: Tensor) -> Tensor:
            with torch.no_grad():
                values["near"].sub_(2**-21 * (values["near"] == 1))
            return step(*data)

        return call

    monkeypatch.setattr(training, "training_modes_of", lambda device: {"eager": eager, "cheat": rounding})
    comparison = Training(balanced, torch.float32)
    assert is_right(comparison, "eager")
    assert is_right(comparison, "cheat")


# Before and after


@pytest.mark.gpu
def test_no_mode_pays_for_the_products_of_those_who_looked_at_its_subject() -> None:
    """The step has none itself; cuBLAS takes a workspace of 8 MiB at least for any product."""

    def make(dtype: torch.dtype) -> TrainingSubject:
        made = subject(device="cuda:0", dtype=dtype)
        x, _ = made.data
        x @ x.T
        model = nn.BatchNorm1d(8).to("cuda:0", dtype).train()
        return TrainingSubject(model, OPTIMIZERS["sgd"](model.parameters()), (x, x.flip(0)), mean_square)

    cell = compare_modes(Training(make, torch.float32), ["cuda_graph"])["cuda_graph"]
    assert cell.status == "ok", cell.reason
    assert cell.allocated_bytes is not None
    assert cell.allocated_bytes < 2**20
