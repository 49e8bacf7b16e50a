"""The benchmarks' workloads: complete, alike each time, and such that a wrong result shows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from benchmarks.harness.inference import Subject
from benchmarks.harness.training import TrainingSubject
from benchmarks.nets import Guided
from benchmarks.zoo import (
    DIFFUSION,
    INFERENCE,
    OPTIMIZERS,
    TRAINING,
    TrainingWorkload,
    Workload,
    prepare,
    prepare_training,
)

CPU = torch.device("cpu")
HEAVY = ("inception_v4", "nasnetalarge", "pnasnet5large", "mask_rcnn_backbone", "mm_large")


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 3)
        self.norm = nn.BatchNorm1d(3)
        self.dropout = nn.Dropout(0.5)

    def forward(self, words: Tensor, dense: Tensor) -> Tensor:
        return self.dropout(self.norm(self.embedding(words)) + dense)


def reader_inputs(batch: int) -> tuple[Tensor, ...]:
    return torch.randint(10, (batch,)), torch.randn(batch, 3)


def reader_data(batch: int) -> tuple[Tensor, ...]:
    return *reader_inputs(batch), torch.randn(batch, 3)


def squares(model: nn.Module, words: Tensor, dense: Tensor, target: Tensor) -> Tensor:
    return (model(words, dense) - target).square().mean()


READER = Workload("reader", Reader, reader_inputs)
TRAIN_READER = TrainingWorkload("train_reader", Reader, reader_data, squares)


class Function(nn.Module):
    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.scale, x)


def two_numbers(batch: int) -> tuple[Tensor, ...]:
    return (torch.randn(batch, 2),)


def all_tensors(subject: Subject | TrainingSubject) -> list[Tensor]:
    inputs = (*subject.args, *subject.others) if isinstance(subject, Subject) else subject.data
    return [*subject.model.state_dict().values(), *inputs]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in HEAVY else ()) for name in INFERENCE]
)
def test_an_inference_workload_passes_its_own_checks(name: str) -> None:
    subject = prepare(INFERENCE[name], 1, CPU, torch.float32)
    assert not subject.model.training
    assert {tensor.device for tensor in all_tensors(subject)} == {CPU}


@pytest.mark.slow
@pytest.mark.parametrize("name", DIFFUSION)
def test_a_denoising_step_passes_its_own_checks(name: str) -> None:
    prepare(DIFFUSION[name], 1, CPU, torch.float32)


def test_guidance_is_the_same_in_one_batch_and_side_by_side() -> None:
    class Denoiser(nn.Module):
        def forward(self, latents: Tensor, time: Tensor, prompt: Tensor) -> Tensor:
            return latents * time[:, None] + prompt

    args = torch.randn(3, 5), torch.randn(3), torch.randn(3, 2, 5)
    one, two = (Guided(Denoiser(), one_batch=one_batch)(*args) for one_batch in (True, False))
    torch.testing.assert_close(one, two)


@pytest.mark.parametrize("name", TRAINING)
def test_a_training_workload_passes_its_own_checks_and_its_loss_is_no_matter_of_chance(name: str) -> None:
    subject = prepare_training(TRAINING[name], 2, "sgd", CPU, torch.float32)
    assert subject.model.training
    losses = [subject.loss(subject.model, *subject.data) for _ in range(2)]
    assert losses[0].dtype == torch.float32
    assert torch.equal(*losses)
    assert all(parameter.grad is None for parameter in subject.model.parameters())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_optimizer_lowers_the_loss(optimizer: str) -> None:
    subject = prepare_training(TRAINING["train_mlp12"], 64, optimizer, CPU, torch.float32)
    losses = []
    for _ in range(3):
        loss = subject.loss(subject.model, *subject.data)
        subject.optimizer.zero_grad()
        loss.backward()
        subject.optimizer.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
    assert losses[2] < losses[0]


@pytest.mark.parametrize(
    "make",
    [
        lambda: prepare(READER, 5, CPU, torch.float32),
        lambda: prepare_training(TRAIN_READER, 4, "sgd", CPU, torch.float32),
    ],
)
def test_weights_and_inputs_are_the_same_each_time_and_the_random_state_stays(
    make: Callable[[], Subject | TrainingSubject],
) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = make()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert all(map(torch.equal, all_tensors(first), all_tensors(make())))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda scale, x: x / 0, "output 0 has values that are not finite"),
        (lambda scale, x: scale.expand_as(x), "output 0 hardly depends on the inputs"),
        (lambda scale, x: 1e3 + x, "output 0 hardly depends on the inputs"),
        (lambda scale, x: (x, torch.zeros_like(x)), "output 1 hardly depends on the inputs"),
    ],
)
def test_outputs_in_which_errors_would_not_show_are_refused(
    function: Callable[[Tensor, Tensor], Tensor], message: str
) -> None:
    workload = Workload("broken", lambda: Function(function), two_numbers)
    with pytest.raises(ValueError, match=f"^broken in torch.float64: {message}"):
        prepare(workload, 1, CPU, torch.float64)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda scale, x: scale * x / 0, "the loss has values that are not finite"),
        (lambda scale, x: (scale - 1).sqrt(), "the gradient of scale has values that are not finite"),
        (lambda scale, x: x.clone().requires_grad_(), "the loss does not depend on scale"),
    ],
)
def test_losses_that_teach_nothing_are_refused(function: Callable[[Tensor, Tensor], Tensor], message: str) -> None:
    workload = TrainingWorkload(
        "broken", lambda: Function(function), two_numbers, lambda model, x: model(x).square().sum() + model(x).sum()
    )
    with pytest.raises(ValueError, match=f"^broken in torch.float32: {message}"):
        prepare_training(workload, 4, "sgd", CPU, torch.float32)
