"""Training steps beside those that users write, from the same state, with the same seeds: all comes out the same.

model, optimizer ──┬─▶ zero_grad, loss, backward, clip, step, zero_grad ──▶ parameters, buffers, state, loss, generator
                   └─▶ train_step ────────────────────────────────────────▶ the same, to 1e-10 in float64
"""

from __future__ import annotations

import copy
import gc
import logging
import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial, wraps
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint

import autostream
from autostream.dispatch import scheduled_program as scheduling
from autostream.dispatch import step_graphs
from autostream.dispatch.step_graphs import Graphs
from autostream.errors import OptionError, TargetError, TraceError
from autostream.reporting.report import Report
from autostream.runtime.addresses import storages_alive
from autostream.training import TrainStep, train_step
from tests.alone import alone
from tests.semantics import force_streams

Make = Callable[..., Any]
Between = Callable[[int, Any, Any], None]


@pytest.fixture(params=["one stream", "threads"])
def options(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Ways to schedule: one after the other, and with a change of stream at every op."""
    return {"policy": "sequential"} if request.param == "one stream" else force_streams(monkeypatch)


def t(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def mse(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


ROWS = ((t(8, 6), t(8, 4)), (t(8, 6) + 1, t(8, 4) - 1))
IMAGES = (
    (t(8, 3, 4, 4), torch.arange(8) % 4),
    (t(8, 3, 4, 4) * 2, torch.arange(8) // 2),
)
TOKENS = ((torch.arange(8) % 5, t(8, 4)), (torch.arange(8) // 2, t(8, 4)))


@dataclass(frozen=True)
class Scene:
    """What is trained, and how.

    Attributes:
        model: makes it.
        optimizer: makes one of its parameters.
        loss: of the model and a batch.
        batches: that take turns.
        steps: how many.
        between: is called after each step, with its number, the model and the optimizer.
        kwargs: of ``train_step``.
    """

    model: Make
    optimizer: Make = field(default=partial(SGD, lr=0.05, momentum=0.9))
    loss: Make = mse
    batches: Sequence[tuple[Any, ...]] = ROWS
    steps: int = 5
    between: Between = lambda number, model, optimizer: None
    kwargs: dict[str, Any] = field(default_factory=dict)


def eager(model: nn.Module, optimizer: Optimizer, loss_fn: Make, batch: tuple[Any, ...], **kwargs: Any) -> Any:
    """The step as users write it."""
    count, norm = kwargs.get("microbatches", 1), kwargs.get("max_norm")
    optimizer.zero_grad()
    results = []
    for part in zip(*(tensor.chunk(count) for tensor in batch), strict=True):
        result = criterion(model(part[0]), part[1]) if loss_fn is criterion else loss_fn(model, *part)
        loss = (result[0] if isinstance(result, tuple) else result) / count
        loss.backward()
        results.append(loss.detach() if count > 1 else result)
    if norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), norm)
    optimizer.step()
    optimizer.zero_grad()
    return sum(results) if count > 1 else results[0]


def assert_trains_alike(scene: Scene, **options: Any) -> TrainStep:
    """Train twins, one as users do; after each step all that can be seen of them is the same."""
    torch.manual_seed(0)
    model = scene.model().double()
    optimizer = scene.optimizer(model.parameters())
    ours, theirs = (model, optimizer), copy.deepcopy((model, optimizer))
    step = train_step(*ours, scene.loss, **scene.kwargs, **options)
    for number in range(scene.steps):
        batch = scene.batches[number % len(scene.batches)]
        torch.manual_seed(number)
        found, generator = step(*batch), torch.get_rng_state()
        torch.manual_seed(number)
        expected = eager(*theirs, scene.loss, batch, **scene.kwargs)
        close(found, expected)
        assert torch.equal(generator, torch.get_rng_state())
        close(dict(ours[0].state_dict()), dict(theirs[0].state_dict()))
        close(ours[1].state_dict(), theirs[1].state_dict())
        assert [parameter.grad for parameter in ours[0].parameters()] == [None] * len(list(ours[0].parameters()))
        for twin in (ours, theirs):
            scene.between(number, *twin)
    return step


def close(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs)
    if isinstance(ours, Tensor):
        assert not ours.requires_grad or isinstance(ours, nn.Parameter)
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-10, atol=1e-10, equal_nan=True)
    elif isinstance(ours, dict):
        assert list(ours) == list(theirs)
        close(list(ours.values()), list(theirs.values()))
    elif isinstance(ours, (list, tuple)):
        assert len(ours) == len(theirs)
        for mine, other in zip(ours, theirs, strict=True):
            close(mine, other)
    elif isinstance(ours, float):
        assert ours == pytest.approx(theirs, rel=1e-10)
    else:
        assert ours == theirs


def modes(step: TrainStep) -> list[str]:
    return [report.mode for report in step.reports]


def reasons(step: TrainStep) -> str:
    return "; ".join(refusal.reason for report in step.reports for refusal in report.refusals)


# Every optimizer


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 4))


class ConvNet(nn.Module):
    """Norms with statistics, in-place ops, pooling and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
            *(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()),
        )
        self.head = nn.Sequential(nn.Dropout(0.3), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).flatten(1))


OPTIMIZERS: dict[str, Make] = {
    "sgd": partial(SGD, lr=0.05),
    "momentum": partial(SGD, lr=0.05, momentum=0.9, dampening=0.2, weight_decay=0.01),
    "nesterov": partial(SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "maximize": partial(SGD, lr=0.001, momentum=0.9, maximize=True),
    "adam": partial(Adam, lr=0.01, weight_decay=0.01),
    "amsgrad": partial(Adam, lr=0.01, amsgrad=True),
    "adamw": partial(AdamW, lr=0.01),
    "rmsprop": partial(RMSprop, lr=0.01),
    "centered": partial(RMSprop, lr=0.01, momentum=0.9, centered=True),
    "adagrad": partial(Adagrad, lr=0.05, lr_decay=0.1),
    "rate is a tensor": lambda parameters: SGD(parameters, lr=torch.tensor(0.05, dtype=torch.float64), momentum=0.9),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_parameters_after_20_steps(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(normed, OPTIMIZERS[optimizer], steps=20)
    step = assert_trains_alike(scene, **force_streams(monkeypatch))
    assert modes(step) == ["threads"]
    assert reasons(step) == ""


# What is trained


class Tied(nn.Module):
    """Two layers of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        self.second.weight = self.first.weight
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x).tanh()))


class TwoBiases(nn.Module):
    """Gradients of the biases are one tensor, which optimizers write to."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(t(6, 4))
        self.first, self.second = nn.Parameter(t(8, 4)), nn.Parameter(t(8, 4) * 2)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.first + self.second


class Partial(nn.Module):
    """Has a layer that it does not use, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.used, self.unused = nn.Linear(6, 6), nn.Linear(6, 4), nn.Linear(2, 2)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(self.frozen(x).tanh())


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 8)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(x)[None]))[0]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.LSTM(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x[:, None])[0][:, 0])


class Checkpointed(nn.Module):
    """Computes a part of itself once more in the backward."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 6)
        self.body = nn.Sequential(nn.Linear(6, 6), nn.Dropout(p), nn.Tanh())
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.body, self.stem(x), use_reentrant=False))


class OwnBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * x.cos() * 1.5


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return OwnBackward.apply(self.layer(x))  # type: ignore[no-any-return, no-untyped-call]


def by_layer(parameters: Any) -> Optimizer:
    first, second, *others = parameters
    groups = [{"params": [first], "lr": 0.1}, {"params": [second, *others], "weight_decay": 0.3}]
    return AdamW(groups, lr=0.01)


def head_only(parameters: Any) -> Optimizer:
    return SGD(list(parameters)[2:], lr=0.05, momentum=0.9)


criterion = nn.CrossEntropyLoss(weight=torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64))


class Gained(nn.Module):
    """Some of its tensors have an attribute that a user gave them, which those of a trace have not."""

    def __init__(self, ask: Callable[[Any, Tensor], float]) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)
        self.linear.weight.gain = 2.0
        self.ask = ask

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.ask(self.linear.weight, x)


GAINS = {
    "of a weight": lambda weight, x: getattr(weight, "gain", 1.0),
    "whether a weight has it": lambda weight, x: 3.0 if hasattr(weight, "gain") else 1.0,
    "of an input": lambda weight, x: getattr(x, "gain", 1.0),
}


def weighted(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return criterion(model(x), y)  # type: ignore[no-any-return]


def with_outputs(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    outputs = model(x)
    return F.mse_loss(outputs, y), outputs, {"largest": outputs.amax(1)}


class Losing(nn.Module):
    """A loss that learns."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(model(x), y) * self.scale.exp()


TRAINED = {
    "convolutions": Scene(ConvNet, partial(AdamW, lr=0.01), cross_entropy, IMAGES),
    "frozen and unused": Scene(Partial),
    "frozen and unused, adam": Scene(Partial, partial(Adam, lr=0.01)),
    "tied": Scene(Tied),
    "two biases": Scene(TwoBiases, OPTIMIZERS["nesterov"]),
    "two biases, clipped": Scene(TwoBiases, OPTIMIZERS["maximize"], kwargs={"max_norm": 0.1}),
    "attention": Scene(Attention, partial(SGD, lr=0.01), batches=TOKENS),
    "recurrent": Scene(Recurrent),
    "checkpointed": Scene(partial(Checkpointed, 0.0)),
    "checkpointed, with random numbers": Scene(partial(Checkpointed, 0.5)),
    "an autograd function": Scene(Own),
    "groups": Scene(mlp, by_layer),
    "a loss with weights": Scene(ConvNet, loss=weighted, batches=IMAGES),
    "a loss with outputs": Scene(mlp, loss=with_outputs),
    "a loss that is a module": Scene(mlp, loss=Losing()),
    "a loss of PyTorch's": Scene(ConvNet, loss=criterion, batches=IMAGES),
    "clipped": Scene(mlp, kwargs={"max_norm": 0.1}),
    "microbatches": Scene(ConvNet, loss=cross_entropy, batches=IMAGES, kwargs={"microbatches": 4, "max_norm": 0.5}),
    "a compiled model": Scene(lambda: torch.compile(normed(), backend="eager")),
    "a compiled loss": Scene(mlp, loss=torch.compile(mse, backend="eager")),
    "not a number": Scene(mlp, batches=[(t(8, 6) * float("nan"), t(8, 4))]),
}


@pytest.mark.parametrize("name", TRAINED)
def test_it_trains_as_eager_steps_do(name: str, options: dict[str, Any]) -> None:
    step = assert_trains_alike(TRAINED[name], **options)
    assert modes(step) == ["one stream" if options["policy"] == "sequential" else "threads"]


@pytest.mark.parametrize("optimizer", [SGD, AdamW])
def test_no_gradient_is_left_of_what_was_done_by_hand(optimizer: Make) -> None:
    """Else the next one by hand would be added to it, and so on for ever."""
    model = mlp().double()
    theirs = copy.deepcopy(model)
    ours, its = optimizer(model.parameters(), lr=0.05), optimizer(theirs.parameters(), lr=0.05)
    step = train_step(model, ours, mse, policy="sequential")
    for number in range(5):
        x, y = ROWS[number % 2]
        for trained in (model, theirs):
            mse(trained, 2 * x, y).backward()
        step(x, y)
        assert all(parameter.grad is None for parameter in model.parameters())
        eager(theirs, its, mse, (x, y))
        for trained, whose in ((model, ours), (theirs, its)):
            mse(trained, 3 * x, y).backward()
            whose.step()
        close(dict(model.state_dict()), dict(theirs.state_dict()))
        its.zero_grad()
        ours.zero_grad()
    assert modes(step) == ["one stream"]


def test_the_gradients_of_what_others_train_are_let_alone() -> None:
    model = mlp().double()
    x, y = ROWS[0]
    mse(model, x, y).backward()
    first, *_ = model.parameters()
    before = first.grad
    step = train_step(model, head_only(model.parameters()), mse, policy="sequential")
    weights = first.detach().clone()
    for _ in range(3):
        step(x, y)
    assert first.grad is before
    assert torch.equal(first, weights)
    assert [parameter.grad for parameter in list(model.parameters())[2:]] == [None, None]


@pytest.mark.parametrize("optimizer", [OPTIMIZERS["adamw"], torch.optim.Adamax], ids=["whole", "in two parts"])
def test_an_average_follows_the_model(optimizer: Make, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = normed().double()
    average, expected = copy.deepcopy(model), copy.deepcopy(model)
    step = train_step(model, optimizer(model.parameters()), mse, average=average, decay=0.8, **options)
    for number in range(5):
        step(*ROWS[number % 2])
        with torch.no_grad():
            for mine, its in zip(expected.parameters(), model.parameters(), strict=True):
                mine.mul_(0.8).add_(its, alpha=0.2)
        close([*average.parameters()], [*expected.parameters()])
        close([*average.buffers()], [*model.buffers()])
    assert modes(step) == ["one stream" if options["policy"] == "sequential" else "threads"]


class Seeing(nn.Module):
    """Has a buffer that begins as none, and takes the shape of what comes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.register_buffer("seen", None)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x.detach().mean(1)
        return self.layer(x)  # type: ignore[no-any-return]


def test_a_buffer_that_comes_to_be_there_does_so_in_the_average() -> None:
    model = Seeing().double()
    average = copy.deepcopy(model)
    step = train_step(model, SGD(model.parameters(), lr=0.1), mse, average=average, policy="sequential")
    for rows in (8, 8, 4, 8):
        step(*(tensor[:rows] for tensor in ROWS[0]))
        close(average.seen, ROWS[0][0][:rows].mean(1))


@pytest.mark.parametrize("optimizer", [SGD, torch.optim.Adamax, torch.optim.LBFGS])
@pytest.mark.parametrize("steps", [0, 3])
def test_an_average_of_a_model_that_grows_is_refused_before_anything_is_trained(optimizer: Make, steps: int) -> None:
    model = normed().double()
    step = train_step(model, optimizer(model.parameters(), lr=0.1), mse, average=copy.deepcopy(model))
    for _ in range(steps):
        step(*ROWS[0])
    model.append(nn.Linear(4, 4).double())  # type: ignore[operator]
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(TargetError, match=r"differ in 5\.weight, 5\.bias: .* make a new one"):
        step(*ROWS[0])
    close(dict(model.state_dict()), dict(before))


def test_so_is_that_of_one_whose_graph_stays() -> None:
    """Nobody looks whether PyTorch's layers have got a parameter that they do not use."""
    model = mlp().double()
    step = train_step(model, torch.optim.Adamax(model.parameters()), mse, average=copy.deepcopy(model))
    for _ in range(3):
        step(*ROWS[0])
    model[0].register_parameter("extra", nn.Parameter(t(2)))  # type: ignore[operator]
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(TargetError, match=r"differ in 0\.extra"):
        step(*ROWS[0])
    close(dict(model.state_dict()), dict(before))


class Scaled(nn.Module):
    """Has a scale that may be none."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.register_buffer("scale", None)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        return x if self.scale is None else x * self.scale


def test_a_buffer_that_comes_between_steps_is_made_by_no_graph() -> None:
    model = Scaled().double()
    average = copy.deepcopy(model)
    step = train_step(model, SGD(model.parameters(), lr=0.1), mse, average=average, policy="sequential")
    for number in range(5):
        if number == 3:
            model.scale = t(4)
        step(*ROWS[0])
    close(average.scale, t(4))
    assert "the average has no buffer scale as the model has it" in reasons(step)


# What happens between steps


def schedule_rate(number: int, model: Any, optimizer: Any) -> None:
    for group in optimizer.param_groups:
        group["lr"] *= 0.5


def evaluate(number: int, model: Any, optimizer: Any) -> None:
    model.eval()
    with torch.no_grad():
        model(t(2, 3, 4, 4))
    model.train()


def unfreeze(number: int, model: Any, optimizer: Any) -> None:
    if number == 2:
        model.frozen.requires_grad_(True)
    if number == 4:
        model.used.bias.requires_grad_(False)


def load_model(number: int, model: Any, optimizer: Any) -> None:
    if number in (1, 2):
        model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()}, assign=number == 5)


def load_optimizer(number: int, model: Any, optimizer: Any) -> None:
    if number in (1, 2):
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def forget_optimizer(number: int, model: Any, optimizer: Any) -> None:
    if number == 2:
        optimizer.load_state_dict(type(optimizer)(model.parameters()).state_dict())


def clear_optimizer(number: int, model: Any, optimizer: Any) -> None:
    if number == 2:
        optimizer.state.clear()


def move_weight(number: int, model: Any, optimizer: Any) -> None:
    if number == 2:
        model[0].weight.data = model[0].weight.data.clone()


def add_group(number: int, model: Any, optimizer: Any) -> None:
    if number == 2:
        optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.1})


def in_two_groups(parameters: Any) -> Optimizer:
    first, second, *others = parameters
    return Adam([{"params": [first, second], "lr": 0.1}, {"params": others, "lr": 0.0}])


def weights_only(parameters: Any) -> Optimizer:
    return SGD([parameter for parameter in parameters if parameter.dim() == 2], lr=0.05, momentum=0.9)


def exchange_groups(number: int, model: Any, optimizer: Any) -> None:
    if number == 2:
        first, second = optimizer.param_groups
        first["params"], second["params"] = second["params"], first["params"]


def move_between_groups(number: int, model: Any, optimizer: Any) -> None:
    if number == 2:
        first, second = optimizer.param_groups
        second["params"].insert(0, first["params"].pop())


def reverse_group(number: int, model: Any, optimizer: Any) -> None:
    if number == 2:
        optimizer.param_groups[0]["params"].reverse()


def exchange_layers(number: int, model: Any, optimizer: Any) -> None:
    """Layers first, so that names lead to others; then groups, so that each name is in the group that it was in."""
    if number == 2:
        model[0], model[1] = model[1], model[0]
    if number == 4:
        exchange_groups(2, model, optimizer)


class Alike(nn.Sequential):
    """Two layers that might be taken for each other."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 6), nn.Linear(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:, :4]  # type: ignore[no-any-return]


def train_by_hand(number: int, model: Any, optimizer: Any) -> None:
    if number == 2:
        eager(model, optimizer, mse, ROWS[0])


BETWEEN = {
    "another rate": Scene(mlp, between=schedule_rate),
    "evaluation": Scene(ConvNet, loss=cross_entropy, batches=IMAGES, between=evaluate),
    "another model state": Scene(mlp, partial(AdamW, lr=0.01), between=load_model),
    "another optimizer state": Scene(mlp, partial(AdamW, lr=0.01), between=load_optimizer),
    "another momentum": Scene(mlp, between=load_optimizer),
    "a weight that moves": Scene(mlp, between=move_weight),
    "an eager step": Scene(mlp, partial(Adam, lr=0.01), between=train_by_hand),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_what_happens_between_steps_takes_effect_and_needs_no_other_schedule(
    name: str, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    step = assert_trains_alike(BETWEEN[name], **options)
    assert len(modes(step)) == 1
    assert "plain" not in modes(step)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def load_and_schedule(number: int, model: Any, optimizer: Any) -> None:
    """What is loaded is other tensors, and a rate that is a number again."""
    load_optimizer(2, model, optimizer)
    schedule_rate(number, model, optimizer)


def freeze_in_turn(number: int, model: Any, optimizer: Any) -> None:
    schedule_rate(number, model, optimizer)
    model[0].requires_grad_(number % 2 == 0)


def another_rate_tensor(number: int, model: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] = torch.tensor(0.05 / (number + 2), dtype=torch.float64)


def a_rate_of_zero(number: int, model: Any, optimizer: Any) -> None:
    load_optimizer(2, model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.01 * (number % 2)


AGAIN: dict[str, tuple[Between, int]] = {
    "state is loaded": (load_and_schedule, 1),
    "a layer is frozen in every second step": (freeze_in_turn, 2),
    "the rate is another tensor": (another_rate_tensor, 1),
    "the rate is zero in every second step": (a_rate_of_zero, 1),
}


@pytest.mark.parametrize("name", AGAIN)
def test_what_happens_again_and_again_is_traced_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[object] = []
    original = scheduling.tune
    monkeypatch.setattr(scheduling, "tune", lambda *args: (traced.append(args), original(*args))[1])
    between, count = AGAIN[name]
    step = assert_trains_alike(Scene(mlp, partial(Adam, lr=0.01), between=between, steps=8), policy="sequential")
    assert len(traced) == count
    assert set(modes(step)) == {"one stream"}


class InTurn(nn.Module):
    """Trains one of two layers, and is trained on with the other from the second call on."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.calls = nn.ModuleList([nn.Linear(6, 4), nn.Linear(6, 4)]), 0

    def forward(self, x: Tensor) -> Tensor:
        for at, layer in enumerate(self.layers):
            layer.requires_grad_(at == self.calls % 2)
        self.calls += 1
        return sum(layer(x) for layer in self.layers)  # type: ignore[return-value]


class Growing(nn.Module):
    """Makes a layer in the first call, and has the optimizer train it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.optimizers = nn.Linear(6, 4), list[Optimizer]()

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "second"):
            self.second = nn.Linear(4, 4).double()
            self.optimizers[0].add_param_group({"params": [*self.second.parameters()]})
        return self.second(self.first(x))  # type: ignore[no-any-return]


TWO_RULES = [partial(SGD, lr=0.05, momentum=0.9), partial(Adam, lr=0.01)]


@pytest.mark.parametrize("optimizer", TWO_RULES)
def test_a_forward_may_change_what_is_trained(optimizer: Make) -> None:
    assert_trains_alike(Scene(InTurn, optimizer, steps=8), policy="sequential")


def growing(optimizer: Make) -> tuple[Any, Optimizer]:
    """A model that gives the optimizer parameters."""
    model = Growing().double()
    model.optimizers.append(made := optimizer(model.parameters()))
    return model, made


def half(optimizer: Make) -> tuple[Any, Optimizer]:
    """A model of which half is trained."""
    model = mlp().double()
    return model, optimizer(model[0].parameters())


def train_all(model: Any, optimizer: Optimizer) -> None:
    def grow(*step: Any) -> None:
        if len(optimizer.param_groups) == 1:
            optimizer.add_param_group({"params": [*model[2].parameters()]})

    optimizer.register_step_post_hook(grow)


def nothing(model: Any, optimizer: Optimizer) -> None:
    pass


@pytest.mark.parametrize("optimizer", TWO_RULES)
@pytest.mark.parametrize(("make", "afterwards"), [(growing, nothing), (half, train_all)])
def test_the_optimizer_may_get_parameters_in_a_step(
    make: Make, afterwards: Callable[[Any, Optimizer], None], optimizer: Make
) -> None:
    """By the forward, or by a hook of its own that came later than the step."""
    twins = []
    for _ in range(2):
        torch.manual_seed(0)
        twins.append(make(optimizer))
    (ours, theirs), step = twins, train_step(*twins[0], mse, policy="sequential")
    for twin in twins:
        afterwards(*twin)
    for number in range(5):
        results = []
        for run in (step, lambda *batch: eager(*theirs, mse, batch)):
            torch.manual_seed(number)
            results.append(run(*ROWS[0]))
        close(*results)
        close(dict(ours[0].state_dict()), dict(theirs[0].state_dict()))


def test_steps_take_the_short_way_whatever_their_batch_and_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    long: list[object] = []
    original = Graphs.__call__
    monkeypatch.setattr(Graphs, "__call__", lambda *args: (long.append(args), original(*args))[1])
    step = assert_trains_alike(Scene(normed, partial(Adam, lr=0.01), between=schedule_rate), policy="sequential")
    assert modes(step) == ["one stream"]
    assert len(long) == 1, "the second step is the first that is scheduled"


def test_batches_of_two_shapes_in_turn_are_traced_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[object] = []
    original = scheduling.tune
    monkeypatch.setattr(scheduling, "tune", lambda *args: (traced.append(args), original(*args))[1])
    batches = [(t(rows, 6), t(rows, 4)) for rows in (8, 4)]
    assert_trains_alike(Scene(mlp, batches=batches, steps=7), policy="sequential")
    assert len(traced) == 2


def test_betas_in_a_list_may_be_written_to() -> None:
    def write(number: int, model: Any, optimizer: Any) -> None:
        if number == 0:
            optimizer.param_groups[0]["betas"] = [0.9, 0.99]
        if number == 2:
            optimizer.param_groups[0]["betas"][0] = 0.5

    step = assert_trains_alike(Scene(mlp, partial(Adam, lr=0.01), between=write), policy="sequential")
    assert modes(step) == ["one stream", "one stream"]


@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_a_batch_that_asks_for_gradients_gets_them_from_all_its_parts(microbatches: int) -> None:
    model, optimizer = small()
    theirs = copy.deepcopy(model)
    x, y = ROWS[0][0].clone().requires_grad_(), ROWS[0][1]
    (expected,) = torch.autograd.grad(mse(theirs, x, y), x)
    train_step(model, optimizer, mse, microbatches=microbatches, policy="sequential")(x, y)
    close(x.grad, expected)


def test_a_batch_that_asks_for_gradients_is_no_part_of_a_graph() -> None:
    model, optimizer = small()
    step = train_step(model, optimizer, mse, policy="sequential")
    for _ in range(3):
        step(*ROWS[0])
    x = ROWS[0][0].clone().requires_grad_()
    step(x, ROWS[0][1])
    assert x.grad is not None
    assert "requires gradients" in reasons(step)


RETRACED = {
    "other parameters": Scene(Partial, partial(Adam, lr=0.01), steps=8, between=unfreeze),
    "no optimizer state": Scene(mlp, between=forget_optimizer),
    "an optimizer state that is emptied": Scene(Partial, partial(Adam, lr=0.01), between=clear_optimizer),
    "another group": Scene(mlp, head_only, between=add_group),
    "groups exchanged": Scene(Alike, in_two_groups, between=exchange_groups),
    "a parameter in another group": Scene(Alike, in_two_groups, between=move_between_groups),
    "parameters in another order": Scene(Alike, weights_only, between=reverse_group),
    "layers exchanged, then groups": Scene(Alike, in_two_groups, steps=7, between=exchange_layers),
}


@pytest.mark.parametrize("name", RETRACED)
def test_what_needs_another_schedule_gets_it(name: str) -> None:
    step = assert_trains_alike(RETRACED[name], policy="sequential", strict=True)
    assert set(modes(step)) == {"one stream"}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("optimizer", ["momentum", "adamw", "adagrad"])
def test_schedulers_of_the_rate_see_steps_and_their_rates_are_used(optimizer: str) -> None:
    torch.manual_seed(0)
    model = mlp().double()
    twins = [(model, OPTIMIZERS[optimizer](model.parameters()))]
    twins.append(copy.deepcopy(twins[0]))
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7) for _, optimizer in twins]
    step = train_step(*twins[0], mse, policy="sequential")
    for _ in range(6):
        found, expected = step(*ROWS[0]), eager(*twins[1], mse, ROWS[0])
        close(found, expected)
        for scheduler in schedulers:
            scheduler.step()
    close(dict(twins[0][0].state_dict()), dict(twins[1][0].state_dict()))
    assert modes(step) == ["one stream"]


CYCLED = {
    "momentum": partial(SGD, lr=0.05, momentum=0.9, nesterov=True),
    "adamw": partial(AdamW, lr=0.01),
    "rmsprop": partial(RMSprop, lr=0.01, momentum=0.9, centered=True),
    "groups": lambda parameters: Adam([{"params": [p], "weight_decay": 0.1 * at} for at, p in enumerate(parameters)]),
}


@pytest.mark.parametrize("optimizer", CYCLED)
def test_hyperparameters_that_schedulers_change_need_no_other_schedule(optimizer: str, options: dict[str, Any]) -> None:
    schedulers: dict[int, Any] = {}

    def cycle(number: int, model: Any, optimizer: Any) -> None:
        if number == 0:
            schedulers[id(optimizer)] = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=20)
        else:
            schedulers[id(optimizer)].step()

    step = assert_trains_alike(Scene(mlp, CYCLED[optimizer], steps=20, between=cycle), **options)
    assert modes(step) == ["one stream" if options["policy"] == "sequential" else "threads"]
    assert reasons(step) == ""


def test_a_hyperparameter_becomes_an_input_when_it_is_seen_to_change(caplog: pytest.LogCaptureFixture) -> None:
    """Constant at first; then another, which is the last graph; but for zero, with which another rule goes on."""

    def change(number: int, model: Any, optimizer: Any) -> None:
        optimizer.param_groups[0]["weight_decay"] = [0.1, 0.1, 0.2, 0.3, 0.4, 0.0, 0.5, 0.6][number]

    scene = Scene(mlp, partial(AdamW, lr=0.01, weight_decay=0.1), steps=8, between=change)
    step = assert_trains_alike(scene, policy="sequential", max_signatures=3)
    assert modes(step) == ["one stream"] * 3
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_state_dict_taken_between_steps_continues_elsewhere() -> None:
    """Saved after three steps; the copies go on, one eagerly, as the original does."""
    torch.manual_seed(0)
    model = ConvNet().double()
    optimizer = AdamW(model.parameters(), lr=0.01)
    step = train_step(model, optimizer, cross_entropy, policy="sequential")

    def steps(call: Callable[..., Any]) -> None:
        for number, batch in enumerate(IMAGES * 2):
            torch.manual_seed(number)
            call(*batch)

    steps(step)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    others = []
    for scheduled in (False, True):
        other = ConvNet().double()
        others.append(other)
        its = AdamW(other.parameters(), lr=0.5)
        other.load_state_dict(saved[0])
        its.load_state_dict(copy.deepcopy(saved[1]))  # whose tensors become its own
        if scheduled:
            steps(train_step(other, its, cross_entropy, policy="sequential"))
        else:
            steps(lambda *batch, other=other, its=its: eager(other, its, cross_entropy, batch))
    steps(step)
    for other in others:
        close(dict(model.state_dict()), dict(other.state_dict()))


class Configured(nn.Linear):
    """Finds out in its first call what it is for."""

    kind: str | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.kind is None:
            self.kind = "regression"
        return super().forward(x)


def test_what_a_first_call_makes_for_all_others_keeps_only_that_one_out_of_a_graph() -> None:
    scene = Scene(partial(Configured, 6, 4), partial(SGD, lr=0.05), steps=4)
    assert modes(assert_trains_alike(scene, policy="sequential"))[0] == "one stream"


@pytest.mark.parametrize("change", ["load", "move"])
def test_what_was_loaded_over_is_gone_though_batches_of_another_size_do_not_come_again(change: str) -> None:
    """Such as the last of an epoch, before the best state is loaded."""
    torch.manual_seed(0)
    model = ConvNet().double()
    optimizer = AdamW(model.parameters(), lr=0.01)
    step = train_step(model, optimizer, cross_entropy, policy="sequential")
    x, y = IMAGES[0]
    for batch in ((x, y), (x[:-1], y[:-1])):
        for _ in range(3):
            step(*batch)
    if change == "move":
        is_there = [storages_alive([parameter]) for parameter in model.parameters()]
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
    else:
        is_there = [storages_alive([optimizer.state[own]["exp_avg"]]) for own in model.parameters()]
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for _ in range(2):
        step(x, y)
    gc.collect()
    assert not any(there() for there in is_there)


def pickled(step: TrainStep) -> TrainStep:
    return pickle.loads(pickle.dumps(step))  # type: ignore[no-any-return]


@pytest.mark.parametrize("optimizer", [AdamW, torch.optim.Adamax], ids=["whole", "in two parts"])
@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_a_copy_goes_on_by_itself(copied: Callable[[TrainStep], TrainStep], optimizer: Make) -> None:
    """With schedules and slots of its own, and the reason why its optimizer is in no graph."""
    model = normed().double()
    own = optimizer(model.parameters(), lr=0.01)
    step = train_step(model, own, mse, average=copy.deepcopy(model), policy="sequential")
    step(*ROWS[0])
    twin = copied(step)
    losses = []
    for each in (step, twin):
        torch.manual_seed(0)
        losses.append([each(*ROWS[0]) for _ in range(3)])
    close(*losses)
    assert modes(twin) == modes(step) == ["one stream"]
    assert reasons(twin) == reasons(step)
    assert twin.slots is not step.slots


# What runs as it is


def hooked_weight(number: int, model: Any, optimizer: Any) -> None:
    if number == 2:
        model[0].weight.register_hook(lambda gradient: gradient * 2)


def hooked_optimizer(number: int, model: Any, optimizer: Any) -> None:
    if number == 2:
        optimizer.register_step_post_hook(lambda *_: None)


def hooked_backward(number: int, model: Any, optimizer: Any) -> None:
    if number == 2:
        model[2].register_full_backward_hook(lambda module, into, out: tuple(2 * gradient for gradient in into))


def test_hooks_on_all_optimizers_are_called() -> None:
    model, optimizer = small()
    step = train_step(model, optimizer, mse, policy="sequential")
    for _ in range(2):
        step(*ROWS[0])
    called: list[object] = []
    handle = register_optimizer_step_pre_hook(lambda optimizer, *_: called.append(optimizer))
    try:
        step(*ROWS[0])
    finally:
        handle.remove()
    assert called == [optimizer]
    assert "hooks on the steps of all optimizers" in reasons(step)
    step(*ROWS[0])
    assert called == [optimizer]
    assert "one stream" in modes(step)


@pytest.mark.parametrize("since", [0, 2])
def test_the_step_of_an_optimizers_class_may_be_another(since: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a decorator that says it is PyTorch's."""
    written = SGD.step

    @wraps(written)
    def clamped(self: Any, closure: Any = None) -> Any:
        written(self, closure)
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.clamp_(-0.1, 0.1)

    def patch(number: int, model: Any, optimizer: Any) -> None:
        if number == since:
            monkeypatch.setattr(SGD, "step", clamped)

    if since == 0:
        monkeypatch.setattr(SGD, "step", clamped)
    step = assert_trains_alike(Scene(mlp, between=patch), policy="sequential")
    assert "SGD.step is not PyTorch's own" in reasons(step)


def watching_zero_grad(optimizer: Any, calls: list[str], name: str) -> None:
    own = optimizer.zero_grad

    def zero_grad() -> None:
        calls.append(name)
        own()

    optimizer.zero_grad = zero_grad


@pytest.mark.parametrize("optimizer", [SGD, AdamW, torch.optim.Adamax])
def test_a_zero_grad_of_an_optimizers_own_is_called(optimizer: Make) -> None:
    calls: list[str] = []
    model = mlp().double()
    ours = model, optimizer(model.parameters())
    theirs = copy.deepcopy(ours)
    step = train_step(*ours, mse, policy="sequential")
    for number in range(5):
        if number == 2:
            watching_zero_grad(ours[1], calls, "ours")
            watching_zero_grad(theirs[1], calls, "theirs")
        close(step(*ROWS[0]), eager(*theirs, mse, ROWS[0]).detach())
        close(dict(ours[0].state_dict()), dict(theirs[0].state_dict()))
    assert calls == ["ours", "ours", "theirs", "theirs"] * 3
    assert optimizer is torch.optim.Adamax or "a zero_grad of its own" in reasons(step)


@pytest.mark.parametrize("optimizer", [AdamW, torch.optim.Adamax])
@pytest.mark.parametrize("leaves", ["zeros", "all"])
@pytest.mark.parametrize("since", [0, 2])
def test_a_zero_grad_of_an_optimizers_own_may_leave_gradients(optimizer: Make, leaves: str, since: int) -> None:
    """A parameter that a step does not use then moves by its moments, or by earlier gradients."""

    def one_of_two(model: Any, x: Tensor, y: Tensor, which: int) -> Tensor:
        return F.mse_loss(model[which](x), y)

    model = nn.ModuleList([nn.Linear(6, 4), nn.Linear(6, 4)]).double()
    ours = model, optimizer(model.parameters(), lr=0.1)
    theirs = copy.deepcopy(ours)
    step: Any = None
    for number in range(6):
        if number == since:
            for _, own in (ours, theirs):
                own.zero_grad = partial(own.zero_grad, set_to_none=False) if leaves == "zeros" else lambda: None
        if number == 0:
            step = train_step(*ours, one_of_two, policy="sequential")
        x, y = ROWS[number % 2]
        close(step(x, y, number % 2), eager_one_of_two(*theirs, one_of_two, x, y, number % 2))
        close(dict(ours[0].state_dict()), dict(theirs[0].state_dict()))
        mine, its = ([parameter.grad for parameter in model.parameters()] for model, _ in (ours, theirs))
        if number >= since:
            assert [gradient is None for gradient in mine] == [gradient is None for gradient in its]
            close([own for own in mine if own is not None], [own for own in its if own is not None])
    assert "one stream" in modes(step)


def eager_one_of_two(model: Any, optimizer: Optimizer, loss_fn: Make, x: Tensor, y: Tensor, which: int) -> Tensor:
    optimizer.zero_grad()
    loss: Tensor = loss_fn(model, x, y, which)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def test_so_is_that_of_one_that_takes_a_closure() -> None:
    calls: list[str] = []
    model = mlp().double()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    watching_zero_grad(optimizer, calls, "cleared")
    train_step(model, optimizer, mse, policy="sequential")(*ROWS[0])
    assert calls == ["cleared"] * 4  # in each of three evaluations, and after them


@pytest.mark.filterwarnings("ignore:Anomaly Detection", "ignore:Error detected in MseLossBackward0")
def test_anomaly_detection_names_the_op_whose_backward_is_not_a_number() -> None:
    model, optimizer = small()
    step = train_step(model, optimizer, mse, policy="sequential")
    for _ in range(2):
        step(*ROWS[0])
    before = copy.deepcopy(model.state_dict())
    x, y = ROWS[0]
    for sought in (torch.autograd.detect_anomaly, partial(torch.autograd.set_detect_anomaly, True, check_nan=True)):
        with sought(), pytest.raises(RuntimeError, match="MseLossBackward0' returned nan"):
            step(x * float("nan"), y)
    close(dict(model.state_dict()), dict(before))
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        step(*ROWS[0])
    assert modes(step) == ["one stream"]


def test_so_it_does_where_the_first_step_has_it_and_tracing_leaves_it_as_it_is() -> None:
    model, optimizer = small()
    step = train_step(model, optimizer, mse, policy="sequential")
    for check in (True, False):
        with torch.autograd.set_detect_anomaly(True, check_nan=check):
            for _ in range(2):
                step(*ROWS[0])
            assert (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()) == (True, check)
    assert (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()) == (False, True)
    assert "anomaly detection" in reasons(step)
    assert "one stream" in modes(step)


def tie_data(number: int, model: Any, optimizer: Any) -> None:
    if number == 2:
        model[2].weight.data = model[0].weight.data


def tie_steps(number: int, model: Any, optimizer: Any) -> None:
    if number == 2:
        steps = optimizer.state[model[0].weight]["step"]
        for state in optimizer.state.values():
            state["step"] = steps


class Twofold(nn.Module):
    """Has two parameters in the same memory."""

    def __init__(self) -> None:
        super().__init__()
        one = t(6, 4)
        self.one, self.other = nn.Parameter(one), nn.Parameter(one.view(6, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.one + x @ self.other

    def __deepcopy__(self, memo: dict[int, Any]) -> Twofold:
        made = memo[id(self)] = Twofold()
        memo[id(self.one)], memo[id(self.other)] = made.one, made.other
        return made


def square() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))


def first_twice(parameters: Any) -> Optimizer:
    first, *others = parameters
    return SGD([first, first, *others], lr=0.05, momentum=0.9)


DECAYED = partial(SGD, lr=0.05, momentum=0.9, weight_decay=0.3)
SQUARES = ((t(8, 6), t(8, 6) - 1),)
OVERLAPPING = {
    "from the beginning": Scene(Twofold, DECAYED),
    "later": Scene(square, DECAYED, batches=SQUARES, between=tie_data),
    "counters": Scene(square, partial(Adam, lr=0.05), batches=SQUARES, between=tie_steps),
    "twice in a group": Scene(square, first_twice, batches=SQUARES),
}


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
@pytest.mark.parametrize("name", OVERLAPPING)
def test_what_shares_memory_is_updated_one_after_the_other(name: str) -> None:
    step = assert_trains_alike(OVERLAPPING[name], policy="sequential")
    assert "share memory" in reasons(step)


def test_between_the_first_two_steps_state_is_as_the_optimizer_left_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its counters, for one: where parameters are on a GPU, a graph needs them there."""
    model, losses, looks = mlp().double(), list[Tensor](), list[tuple[int, bool]]()
    look = step_graphs.state_of

    def state_of(optimizer: Optimizer, parameters: Sequence[Tensor]) -> Any:
        looks.append((len(losses), bool(optimizer.state)))
        return look(optimizer, parameters)

    step = train_step(model, Adam(model.parameters()), mse, policy="sequential")
    monkeypatch.setattr(step_graphs, "state_of", state_of)
    for _ in range(2):
        losses.append(step(t(8, 6), t(8, 4)))
    assert looks == [(1, True)], "before the second step, and not after the first"


@pytest.mark.parametrize("optimizer", [SGD, Adam])
def test_an_optimizer_without_parameters_trains_nothing(optimizer: Make) -> None:
    model = mlp().double()
    made = optimizer(model.parameters(), lr=0.1)
    step = train_step(model, made, mse, policy="sequential")
    for _ in range(2):
        step(*ROWS[0])
    made.param_groups.clear()
    before = copy.deepcopy(model.state_dict())
    for _ in range(2):
        close(step(*ROWS[0]), mse(model, *ROWS[0]).detach())
    close(dict(model.state_dict()), dict(before))
    assert "no parameters that require gradients" in reasons(step)


def rate_in_an_array(number: int, model: Any, optimizer: Any) -> None:
    if number == 2:
        optimizer.param_groups[0]["lr"] = np.array(0.1)


def test_a_rate_that_is_neither_a_number_nor_a_tensor_is_used_as_it_is() -> None:
    step = assert_trains_alike(Scene(mlp, between=rate_in_an_array), policy="sequential")
    assert "lr of SGD is a ndarray" in reasons(step)


def test_one_that_the_optimizer_cannot_use_either_fails_as_ever() -> None:
    model, optimizer = small()
    step = train_step(model, optimizer, mse, policy="sequential")
    step(*ROWS[0])
    optimizer.param_groups[0]["lr"] = Fraction(1, 10)
    with pytest.raises(TypeError, match="Fraction"):
        step(*ROWS[0])


def test_capturable_optimizers_are_refused_on_a_cpu_as_ever() -> None:
    model = mlp().double()
    step = train_step(model, Adam(model.parameters(), capturable=True), mse, policy="sequential")
    for _ in range(3):
        with pytest.raises(AssertionError, match="capturable"):
            step(*ROWS[0])


class Branching(nn.Module):
    """Chooses by data what to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if x.sum() > 0 else -self.layer(x)


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.embed(x)  # type: ignore[no-any-return]


table = t(4)


def with_a_tensor_of_nobodys(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return ((model(x) - y) * table).square().mean()


class Masked(nn.Module):
    """Holds a tensor that another one takes the place of."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.mask = nn.Linear(6, 4), t(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.mask  # type: ignore[no-any-return]


def another_mask(number: int, model: Any, optimizer: Any) -> None:
    model.mask = t(4) * number


APART = {
    "backwards hooks": Scene(mlp, between=hooked_backward),
    "layout torch.sparse": Scene(Sparse, partial(SGD, lr=0.1), batches=TOKENS),
}


@pytest.mark.parametrize("reason", APART)
def test_what_no_graph_would_do_is_done_all_the_same_and_the_report_says_why(reason: str) -> None:
    step = assert_trains_alike(APART[reason], policy="sequential")
    assert reason in reasons(step)


def test_another_tensor_that_nobody_registered_takes_effect() -> None:
    step = assert_trains_alike(Scene(Masked, between=another_mask), policy="sequential")
    assert "one stream" in modes(step)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("make", [torch.jit.script, lambda model: nn.Sequential(torch.jit.script(model), nn.Tanh())])
def test_torchscript_trains_as_it_is(make: Callable[[nn.Module], nn.Module]) -> None:
    model = mlp().double()
    ours, theirs = make(copy.deepcopy(model)), make(model)
    step = train_step(ours, SGD(ours.parameters(), lr=0.1), mse, policy="sequential")
    optimizer = SGD(theirs.parameters(), lr=0.1)
    for _ in range(3):
        close(step(*ROWS[0]), eager(theirs, optimizer, mse, ROWS[0]))
    assert modes(step) == ["plain"]
    assert "TorchScript cannot be captured" in reasons(step)


def printing(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), y)
    print("loss", loss.item())
    return loss


EAGER = {
    "hooks on its gradient": Scene(mlp, between=hooked_weight),
    "print": Scene(normed, loss=printing),
    "loss.item()": Scene(normed, AdamW, printing, kwargs={"microbatches": 2, "max_norm": 0.1}),
}


@pytest.mark.parametrize("reason", EAGER)
def test_where_the_loss_cannot_be_in_a_graph_forward_and_backward_of_the_model_are(reason: str) -> None:
    step = assert_trains_alike(EAGER[reason], policy="sequential")
    report = step.reports[-1]
    assert report.mode == "forward and backward"
    assert (report.refusals[0].choice, reason in report.refusals[0].reason) == (
        "loss and optimizer run as they are",
        True,
    )


@pytest.mark.parametrize("kwargs", [{}, {"microbatches": 2, "max_norm": 0.1}])
def test_tensors_that_are_nobodys_are_part_of_the_graph(kwargs: dict[str, Any]) -> None:
    step = assert_trains_alike(Scene(normed, AdamW, with_a_tensor_of_nobodys, kwargs=kwargs), policy="sequential")
    assert modes(step) == ["one stream"]


def test_another_optimizer_may_step_in_the_backward() -> None:
    """As where the update of a parameter is a hook on it, to save the memory of its gradient."""
    models = [mlp().double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())

    def step_in_the_backward(own: Any) -> None:
        SGD([own], lr=0.1).step()
        own.grad = None

    for model in models:
        for own in model[0].parameters():
            own.register_post_accumulate_grad_hook(step_in_the_backward)
    optimizers = [SGD(model[2].parameters(), lr=0.1) for model in models]
    step = train_step(models[0], optimizers[0], mse, policy="sequential")
    for number in range(4):
        close(step(*ROWS[number % 2]), eager(models[1], optimizers[1], mse, ROWS[number % 2]).detach())
        close(dict(models[0].state_dict()), dict(models[1].state_dict()))
    assert "a parameter that is not the optimizer's has hooks" in reasons(step)
    assert modes(step) == ["forward and backward"]


def test_what_is_saved_for_a_backward_is_shown_to_who_asks() -> None:
    model, optimizer = small()
    step = train_step(model, optimizer, mse, policy="sequential")
    for _ in range(2):
        step(*ROWS[0])
    packed: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda own: (packed.append(own), own)[1], lambda own: own):
        step(*ROWS[0])
    assert packed
    assert "hooks of saved tensors" in reasons(step)


class Layers(nn.Sequential):
    """A model that a loss looks into."""


def looking_into_it(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """By all that a stand-in would not answer; not in a graph, for it prints."""
    print("loss")
    assert isinstance(model, Layers)
    assert len(model) == 2
    weights = sum(layer.weight.square().mean() for layer in model)
    return ((model(x) - y) * table).square().mean() + 0.1 * weights + model[0](x).square().mean()


def test_a_loss_outside_of_a_graph_may_look_into_the_model() -> None:
    calls: list[str] = []
    model = Layers(nn.Linear(6, 5), nn.Linear(5, 4)).double()
    theirs = copy.deepcopy(model)
    optimizers = SGD(model.parameters(), lr=0.1), SGD(theirs.parameters(), lr=0.1)
    step = train_step(model, optimizers[0], looking_into_it, policy="sequential")
    for number in range(6):
        if number == 4:
            for each in (model, theirs):
                each.register_forward_hook(lambda *_: calls.append("hook"))
        found = step(*ROWS[0])
        close(found, eager(theirs, optimizers[1], looking_into_it, ROWS[0]).detach())
        close(dict(model.state_dict()), dict(theirs.state_dict()))
    assert "forward and backward" in modes(step)
    assert calls == ["hook"] * 4


def twice_differentiated(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """A penalty on the gradient of the input."""
    x = x.clone().requires_grad_()
    outputs = model(x)
    (gradient,) = torch.autograd.grad(outputs.sum(), x, create_graph=True)
    return ((outputs - y) * table).square().mean() + gradient.square().mean()


def beside_a_copy(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """Such as one whose weights are perturbed; it has to be another model, by its own weights."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
    return ((model(x) - other(x).detach() - y) * table).square().mean()


@pytest.mark.parametrize("loss", [twice_differentiated, beside_a_copy])
def test_a_loss_outside_of_a_graph_may_do_anything_with_the_model(loss: Make) -> None:
    step = assert_trains_alike(Scene(mlp, loss=loss), policy="sequential")
    assert modes(step)[-1] == ("plain" if loss is twice_differentiated else "forward and backward")


def test_on_a_cpu_the_model_is_left_alone_unless_a_schedule_is_asked_for() -> None:
    step = assert_trains_alike(Scene(mlp, loss=printing))
    assert modes(step) == ["plain"]


def test_where_the_optimizer_cannot_be_in_a_graph_forward_and_backward_are(caplog: pytest.LogCaptureFixture) -> None:
    """Its hooks come after the third step; the whole step has a graph by then."""
    step = assert_trains_alike(Scene(mlp, between=hooked_optimizer, steps=6), policy="sequential")
    assert [(report.model, report.mode) for report in step.reports] == [
        ("Sequential, TrainingStep", "one stream"),
        ("Sequential, Backward", "one stream"),
    ]
    why = [(refusal.choice, refusal.reason) for refusal in step.reports[1].refusals]
    assert why[0] == ("the optimizer runs as it is", "SGD has hooks on its step, which a graph would not call")
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 1


@pytest.mark.parametrize("name", GAINS)
def test_attributes_of_tensors_are_as_of_the_step(name: str) -> None:
    model: Any = Gained(GAINS[name]).double()
    step = train_step(model, SGD(model.parameters(), lr=0.0), mse)
    for number in range(5):
        x, y = ROWS[0][0].clone(), ROWS[0][1]
        model.linear.weight.gain = x.gain = number  # type: ignore[attr-defined]
        close(step(x, y), mse(model, x, y).detach())


def test_a_loss_that_fails_later_is_no_reason_for_less_in_a_graph() -> None:
    def picky(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return mse(model, x, y) if len(x) == 8 else mse(model, x, y).reshape(1, 1).expand(2, 2)

    model, optimizer = small()
    step = train_step(model, optimizer, picky, policy="sequential")
    for _ in range(2):
        step(*ROWS[0])
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(TargetError, match="a loss of shape 2x2"):
        step(*(tensor[:4] for tensor in ROWS[0]))
    close(dict(model.state_dict()), dict(before))
    step(*ROWS[0])
    assert modes(step) == ["one stream"]
    assert reasons(step) == ""


@pytest.mark.parametrize("kwargs", [{}, {"microbatches": 2, "max_norm": 0.1}])
@pytest.mark.parametrize("optimizer", [torch.optim.Adamax, torch.optim.Adadelta, torch.optim.NAdam])
def test_other_optimizers_run_after_a_graph_of_forward_and_backward(
    optimizer: Make, kwargs: dict[str, Any], options: dict[str, Any]
) -> None:
    step = assert_trains_alike(Scene(mlp, optimizer, kwargs=kwargs), **options)
    assert modes(step) == ["one stream" if options["policy"] == "sequential" else "threads"]
    assert f"{optimizer.__name__} is none of SGD, Adam, AdamW, RMSprop, Adagrad" in reasons(step)


@pytest.mark.parametrize("kwargs", [{}, {"microbatches": 2}, {"max_norm": 0.1}])
def test_an_optimizer_that_takes_a_closure_runs_the_graph_as_often_as_it_likes(
    kwargs: dict[str, Any], options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    models = [model := mlp().double(), copy.deepcopy(model)]
    ours, theirs = ((each, torch.optim.LBFGS(each.parameters(), lr=0.1, max_iter=3)) for each in models)
    step = train_step(*ours, nn.MSELoss(), **kwargs, **options)
    for number in range(4):
        found = step(*ROWS[number % 2])
        close(found, searched(*theirs, ROWS[number % 2], **kwargs))
        close(dict(ours[0].state_dict()), dict(theirs[0].state_dict()))
        assert all(parameter.grad is None for parameter in model.parameters())
    assert modes(step) == ["one stream" if options["policy"] == "sequential" else "threads"]
    assert "LBFGS is none of SGD, Adam, AdamW, RMSprop, Adagrad" in reasons(step)
    with pytest.raises(TargetError, match="LBFGS takes a closure, which no GradScaler allows"):
        train_step(*ours, nn.MSELoss(), scaler=torch.amp.GradScaler("cpu"))


def searched(model: nn.Module, optimizer: Optimizer, batch: tuple[Tensor, ...], **kwargs: Any) -> Any:
    """A step with a closure, as users write it."""

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = mse(model, *batch)
        loss.backward()
        if "max_norm" in kwargs:
            torch.nn.utils.clip_grad_norm_(model.parameters(), kwargs["max_norm"])
        return loss

    return optimizer.step(closure).detach()  # type: ignore[arg-type, func-returns-value, attr-defined]


@pytest.mark.parametrize("kwargs", [{}, {"microbatches": 2, "max_norm": 0.1}])
def test_a_scaler_skips_steps_whose_gradients_are_not_finite(kwargs: dict[str, Any], options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = mlp().double()
    ours = model, OPTIMIZERS["adamw"](model.parameters()), torch.amp.GradScaler("cpu", 8.0, growth_interval=2)
    theirs = copy.deepcopy(ours)
    step = train_step(*ours[:2], nn.MSELoss(), scaler=ours[2], **kwargs, **options)
    for number in range(7):
        x, y = ROWS[number % 2]
        x = x * (float("inf") if number == 3 else 1.0)
        found = step(x, y)
        close(found, scaled(*theirs, (x, y), **kwargs))
        close(dict(ours[0].state_dict()), dict(theirs[0].state_dict()))
        close(ours[1].state_dict(), theirs[1].state_dict())
        assert ours[2].get_scale() == theirs[2].get_scale()
    assert modes(step) == ["one stream" if options["policy"] == "sequential" else "threads"]
    assert "GradScaler asks the host whether gradients are finite" in reasons(step)


def test_a_scaler_that_is_switched_off_keeps_nothing_from_a_graph() -> None:
    model, optimizer = small()
    step = train_step(model, optimizer, mse, scaler=torch.amp.GradScaler("cpu", enabled=False), policy="sequential")
    theirs = copy.deepcopy((model, optimizer))
    for _ in range(3):
        close(step(*ROWS[0]), eager(*theirs, mse, ROWS[0]))
    assert (modes(step), reasons(step)) == (["one stream"], "")


def scaled(model: nn.Module, optimizer: Optimizer, scaler: Any, batch: tuple[Tensor, ...], **kwargs: Any) -> Tensor:
    """A step with a scaler, as users write it."""
    count, total = kwargs.get("microbatches", 1), torch.zeros((), dtype=torch.float64)
    for part in zip(*(tensor.chunk(count) for tensor in batch), strict=True):
        loss = mse(model, *part) / count
        scaler.scale(loss).backward()
        total = total + loss.detach()
    if "max_norm" in kwargs:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), kwargs["max_norm"])
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return total


@alone
def test_data_in_parallel_runs_as_it_is() -> None:
    """Alone, and ended at once: where a group's last owner goes, its threads and ours may wait for each other."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    step = assert_trains_alike(Scene(lambda: nn.parallel.DistributedDataParallel(mlp().double())))
    assert "averages gradients by hooks" in reasons(step)
    assert modes(step) == ["plain"]
    os._exit(0)


def test_what_comes_beside_an_object_that_no_graph_returns_is_detached() -> None:
    model, optimizer = small()
    note = object()
    step = train_step(model, optimizer, lambda model, x, y: (mse(model, x, y), note, [model(x)]), policy="sequential")
    for _ in range(2):
        loss, found, (outputs,) = step(*ROWS[0])
        assert (loss.requires_grad, outputs.requires_grad, found is note) == (False, False, True)
    assert modes(step) == ["one stream"]


def test_strict_says_why_not() -> None:
    model = Branching()
    step = train_step(model, SGD(model.parameters(), lr=0.1), mse, strict=True)
    batch = tuple(tensor.float() for tensor in ROWS[0])
    step(*batch)
    with pytest.raises(TraceError, match="Data-dependent branching"):
        step(*batch)


def test_other_batches_are_scheduled_up_to_the_limit_and_run_as_they_are_beyond_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    batches = [(t(rows, 6), t(rows, 4)) for rows in (8, 4, 2)]
    scene = Scene(mlp, batches=batches, steps=9, kwargs={})
    step = assert_trains_alike(scene, policy="sequential", max_signatures=2)
    assert modes(step) == ["one stream", "one stream", "plain"]
    assert reasons(step).endswith(
        "max_signatures allows, and meets another: shapes, strides, dtypes or devices changed"
    )
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 1


def test_what_changes_at_every_step_and_is_no_input_ends_at_the_limit_and_is_named() -> None:
    def grow(number: int, model: Any, optimizer: Any) -> None:
        optimizer.param_groups[0]["dampening"] -= 0.1

    step = assert_trains_alike(Scene(mlp, between=grow, steps=6), policy="sequential", max_signatures=2)
    assert modes(step) == ["one stream", "one stream", "plain"]
    assert reasons(step).endswith("max_signatures allows, and meets another: dampening changed")


@dataclass
class Weights:
    """What a loss goes by, and is no module."""

    l2: float = 0.1

    def loss(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(model(x), y) + self.l2 * sum(p.square().sum() for p in model.parameters())


L2 = 0.1


def with_a_global(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y) + L2 * sum(p.square().sum() for p in model.parameters())


WATCHED = Weights()


@pytest.mark.parametrize("loss", [WATCHED.loss, with_a_global], ids=["an attribute", "a global"])
def test_numbers_that_a_loss_reads_elsewhere_take_effect_in_the_next_step(
    loss: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two values in turn: two graphs."""

    def turn(number: int, model: Any, optimizer: Any) -> None:
        monkeypatch.setattr(WATCHED, "l2", 0.1 + number % 2)
        monkeypatch.setitem(globals(), "L2", 0.1 + number % 2)

    monkeypatch.setattr(WATCHED, "l2", 0.1)
    step = assert_trains_alike(Scene(mlp, loss=loss, between=turn, steps=7), policy="sequential")
    assert modes(step) == ["one stream"] * 2


def test_one_that_changes_at_every_step_ends_at_the_limit_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def grow(number: int, model: Any, optimizer: Any) -> None:
        monkeypatch.setitem(globals(), "L2", 0.1 * number)

    scene = Scene(mlp, loss=with_a_global, between=grow, steps=6)
    step = assert_trains_alike(scene, policy="sequential", max_signatures=2)
    assert modes(step) == ["one stream", "one stream", "plain"]
    assert "meets another, since " in reasons(step)
    assert "L2 == " in reasons(step)


def test_a_loss_that_goes_by_the_rate_has_the_rate_of_each_step(options: dict[str, Any]) -> None:
    """By that of a scheduler, and that of the optimizer."""

    def schedule(model: nn.Module) -> tuple[Any, Any]:
        optimizer = SGD(model.parameters(), lr=0.1)
        return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    ours, theirs = mlp().double(), mlp().double()
    theirs.load_state_dict(ours.state_dict())
    found = []
    for model in (ours, theirs):
        optimizer, scheduler = schedule(model)

        def loss(model: Any, x: Any, y: Any, optimizer: Any = optimizer, scheduler: Any = scheduler) -> Any:
            return mse(model, x, y) * scheduler.get_last_lr()[0] * optimizer.param_groups[0]["lr"]

        step = train_step(model, optimizer, loss, **options) if model is ours else None
        losses = []
        for _ in range(4):
            losses.append(step(*ROWS[0]) if step else eager(model, optimizer, loss, ROWS[0]))
            scheduler.step()
        found.append((losses, dict(model.state_dict())))
    close(*found)


class Settings:
    """Looks its attributes up itself."""

    def __init__(self, **values: Any) -> None:
        self.__dict__["values"] = values

    def __getattr__(self, name: str) -> Any:
        if name not in self.values:
            raise AttributeError(name)
        return self.values[name]


LOOKED_UP = Settings(l2=0.1)


def with_settings(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y) * LOOKED_UP.l2


def test_settings_that_an_object_looks_up_itself_take_effect_in_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def turn(number: int, model: Any, optimizer: Any) -> None:
        monkeypatch.setitem(LOOKED_UP.values, "l2", 0.1 + number % 2)

    monkeypatch.setitem(LOOKED_UP.values, "l2", 0.1)
    step = assert_trains_alike(Scene(mlp, loss=with_settings, between=turn, steps=7), policy="sequential")
    assert modes(step) == ["one stream"] * 2


class Reverse(torch.autograd.Function):
    """As where a model is trained not to tell domains apart."""

    strength = 0.1
    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return -Reverse.strength * gradient


class Counting(Reverse):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        Counting.calls += 1
        return gradient


def reversing(kind: type[Reverse]) -> Make:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(kind.apply(model(x)), y)  # type: ignore[no-untyped-call]

    return loss


def test_numbers_that_a_function_of_autograd_reads_take_effect_in_the_next_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def turn(number: int, model: Any, optimizer: Any) -> None:
        monkeypatch.setattr(Reverse, "strength", 0.1 + number % 2)

    monkeypatch.setattr(Reverse, "strength", 0.1)
    assert_trains_alike(Scene(mlp, loss=reversing(Reverse), between=turn, steps=7), policy="sequential")


def test_a_function_of_autograd_that_counts_its_calls_is_in_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counting, "calls", 0)
    step = assert_trains_alike(Scene(mlp, loss=reversing(Counting), steps=4), policy="sequential")
    assert modes(step) == ["forward and backward"]  # of the model
    assert "Counting.calls" in reasons(step)
    assert Counting.calls == 8


class Meter:
    """Sums over steps."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def update(self, value: float) -> None:
        self.total += value
        self.count += 1


@dataclass
class Told:
    """What losses of a kind tell, sum up or count beside a step."""

    history: list[Any] = field(default_factory=list)
    meter: Meter = field(default_factory=Meter)
    calls: int = 0


def appends(told: Told, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = mse(model, x, y)
    told.history.append(loss.item())
    return loss


def appends_what_it_uses(told: Told, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = mse(model, x, y)
    number = loss.item()
    told.history.append(number)
    return loss / (1 + number)


def meters(told: Told, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = mse(model, x, y)
    told.meter.update(2 * loss.item())
    return loss


def writes_text(told: Told, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = mse(model, x, y)
    told.history.append(f"{loss.item():.6f}")
    return loss


def prints(told: Told, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = mse(model, x, y)
    print("loss", f"{loss.item():.6f}")
    return loss


def returns(told: Told, model: nn.Module, x: Tensor, y: Tensor) -> Any:
    loss = mse(model, x, y)
    return loss, {"percent": 100 * loss.item()}


def sums_up_globally(told: Told, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    global running
    loss = mse(model, x, y)
    running += loss.item()
    told.history.append(running)
    return loss


def counts_on_an_object(told: Told, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    told.calls += 1
    return mse(model, x, y) * (1 + told.calls)


def counts_globally(told: Told, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    global running
    running += 1
    return mse(model, x, y) * (1 + running)


running = 0.0


@pytest.mark.parametrize(
    "loss",
    [
        *(appends, appends_what_it_uses, meters, writes_text, prints, returns, sums_up_globally),
        *(counts_on_an_object, counts_globally),
    ],
)
def test_what_a_loss_tells_or_counts_is_what_the_plain_step_has(
    loss: Callable[..., Any], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step by step, from the first on, whether Dynamo can do it behind a graph or not."""

    def trained(schedule: bool) -> tuple[Any, ...]:
        monkeypatch.setitem(globals(), "running", 0.0)
        torch.manual_seed(0)
        told, model = Told(), mlp().double()
        optimizer = SGD(model.parameters(), lr=0.1)
        step = train_step(model, optimizer, partial(loss, told), policy="sequential") if schedule else None
        results = [step(*batch) if step else eager(model, optimizer, partial(loss, told), batch) for batch in ROWS * 3]
        said = [line for line in capfd.readouterr().out.splitlines() if line.startswith("loss")]
        return results, *model.parameters(), told.history, vars(told.meter), told.calls, running, said

    close(trained(True), trained(False))


def test_numbers_that_a_loss_takes_are_the_hosts_after_the_graph() -> None:
    told, model = Told(), mlp().double()
    step = train_step(model, SGD(model.parameters(), lr=0.1), partial(returns, told), strict=True, policy="sequential")
    for batch in ROWS * 2:
        loss, found = step(*batch)
        assert found == {"percent": pytest.approx(100 * loss.item())}
    assert modes(step) == ["one stream"]


class Routed(nn.Module):
    """Keeps a part of the loss until somebody asks, as mixtures of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.balance = nn.Linear(6, 4), None

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.layer(x)
        self.balance = outputs.square().mean()  # type: ignore[assignment]
        return outputs


def balanced(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return mse(model, x, y) + 0.1 * model.balance  # type: ignore[no-any-return]


def test_what_a_model_keeps_for_the_loss_is_there_after_each_step() -> None:
    kept: list[Tensor] = []
    scene = Scene(Routed, loss=balanced, between=lambda number, model, optimizer: kept.append(model.balance.detach()))
    step = assert_trains_alike(scene, policy="sequential")
    assert set(modes(step)) == {"one stream"}
    close(kept[::2], kept[1::2])


# What losses refer to


@dataclass
class Teachers:
    """What losses have, which are methods, functions and objects: modules, and numbers of these."""

    teacher: nn.Module
    criterion: nn.Module
    by_name: dict[str, nn.Module] = field(default_factory=dict)

    def loss(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return self.compare(model(x), self.teacher(x).detach()) + F.mse_loss(model(x), y)

    def compare(self, student: Tensor, teacher: Tensor) -> Tensor:
        return self.criterion(student, teacher)  # type: ignore[no-any-return]

    __call__ = loss


GLOBAL: Any = None


def taught(x: Tensor) -> Tensor:
    return GLOBAL.teacher(x).detach()  # type: ignore[no-any-return]


def by_a_helper(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return GLOBAL.criterion(model(x), taught(x)) + F.mse_loss(model(x), y)  # type: ignore[no-any-return]


class Taught(nn.Module):
    """A loss that is a module."""

    def __init__(self, own: Teachers) -> None:
        super().__init__()
        self.teacher, self.criterion = own.teacher, own.criterion

    forward = Teachers.loss
    compare = Teachers.compare


def norm() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))


def by_closure(own: Teachers) -> Make:
    teacher, criterion = own.teacher, own.criterion
    return lambda model, x, y: criterion(model(x), teacher(x).detach()) + F.mse_loss(model(x), y)


def by_default(own: Teachers) -> Make:
    def loss(
        model: nn.Module, x: Tensor, y: Tensor, teacher: nn.Module = own.teacher, *, criterion: Any = own.criterion
    ) -> Tensor:
        return criterion(model(x), teacher(x).detach()) + F.mse_loss(model(x), y)  # type: ignore[no-any-return]

    return loss


LOSSES: dict[str, Callable[[Teachers], Make]] = {
    "a module": Taught,
    "a closure": by_closure,
    "defaults": by_default,
    "a method": lambda own: own.loss,
    "an object": lambda own: own,
    "partial": lambda own: partial(own.loss),
    "a function that it calls": lambda own: by_a_helper,
}


class Together(nn.Module):
    """All that a step may write, to copy it at once."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.all = nn.ModuleList(modules)


def teach(
    make: Callable[[Teachers], Make],
    monkeypatch: pytest.MonkeyPatch,
    between: Callable[[int, Teachers], None],
    **options: Any,
) -> tuple[TrainStep, Tensor, dict[str, Tensor], Tensor, dict[str, Tensor]]:
    """Train a model by a loss that has a teacher that learns statistics; and once more, as users do.

    Args:
        make: makes the loss.
        monkeypatch: puts what it refers to where functions find it.
        between: changes that, with the number of the step.
        options: of ``train_step``.

    Returns:
        The step, losses and state, and the losses and state that are expected.
    """
    results: list[Any] = []
    torch.manual_seed(0)
    start = Together(mlp(), norm(), norm().eval()).double()
    for ours in (True, False):
        model, teacher, other = modules = copy.deepcopy(start).all
        own = Teachers(teacher, nn.SmoothL1Loss(), {"other": other})
        monkeypatch.setitem(globals(), "GLOBAL", own)
        optimizer, loss = SGD(model.parameters(), lr=0.05, momentum=0.9), make(own)
        if ours:
            step = train_step(model, optimizer, loss, **options)
            results.append(step)
        losses = []
        for number in range(8):
            torch.manual_seed(number)
            batch = ROWS[number % 2]
            losses.append((step(*batch) if ours else eager(model, optimizer, loss, batch)).detach())
            between(number, own)
        results += [torch.stack(losses), dict(modules.state_dict())]
    return tuple(results)  # type: ignore[return-value]


@pytest.mark.parametrize("name", LOSSES)
def test_a_teacher_is_part_of_the_graph_however_a_loss_refers_to_it(
    name: str, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """It learns statistics as it does in an eager step; another setting of what compares takes effect."""

    def change(number: int, own: Teachers) -> None:
        if number == 3:
            own.criterion.beta = 0.01

    step, losses, state, expected, expected_state = teach(LOSSES[name], monkeypatch, change, **options)
    close(losses, expected)
    close(state, expected_state)
    assert not any(report.refusals for report in step.reports)
    assert "plain" not in modes(step)


@pytest.mark.parametrize("name", ["a method", "an object", "partial", "a function that it calls"])
def test_so_is_one_that_takes_its_place(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def change(number: int, own: Teachers) -> None:
        if number == 2:
            own.teacher = own.by_name["other"]
        if number == 4:
            own.teacher.train()
        if number == 5:
            own.criterion = nn.L1Loss(reduction="sum")

    step, losses, state, expected, expected_state = teach(LOSSES[name], monkeypatch, change, policy="sequential")
    close(losses, expected)
    close(state, expected_state)
    assert set(modes(step)) == {"one stream"}


SETTINGS = [
    (nn.CrossEntropyLoss(), "label_smoothing", 0.1),
    (nn.CrossEntropyLoss(), "ignore_index", 1),
    (nn.CrossEntropyLoss(), "reduction", "sum"),
]


@pytest.mark.parametrize(("loss", "name", "value"), SETTINGS, ids=[name for _, name, _ in SETTINGS])
def test_another_setting_of_pytorchs_loss_takes_effect_in_the_next_step(
    loss: nn.Module, name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = ROWS[0][0], torch.arange(8) % 4
    model = mlp().double()
    ours = model, SGD(model.parameters(), lr=0.1)
    theirs = copy.deepcopy(ours)
    step = train_step(*ours, loss, policy="sequential")
    for number in range(4):
        if number == 2:
            monkeypatch.setattr(loss, name, value)
        close(step(*batch), eager(*theirs, lambda model, x, y: loss(model(x), y), batch))
        close(dict(model.state_dict()), dict(theirs[0].state_dict()))
    assert set(modes(step)) == {"one stream"}


def test_disabled_it_is_the_plain_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOSTREAM_DISABLE", "1")
    assert assert_trains_alike(Scene(mlp)).reports == ()


def test_paranoid_every_step_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOSTREAM_VERIFY", "paranoid")
    step = assert_trains_alike(Scene(ConvNet, OPTIMIZERS["adamw"], cross_entropy, IMAGES), policy="sequential")
    assert modes(step) == ["one stream"]


def test_it_may_be_called_in_any_mode_of_autograd() -> None:
    model = mlp().double()
    step = train_step(model, SGD(model.parameters(), lr=0.1), mse, policy="sequential")
    losses = [step(*ROWS[0])]
    for mode in (torch.no_grad, torch.enable_grad, torch.inference_mode):
        with mode():
            losses.append(step(*ROWS[0]))
    assert losses == sorted(losses, reverse=True)
    assert not any(loss.requires_grad or loss.is_inference() for loss in losses)
    assert modes(step) == ["one stream"]


# Mistakes


def small() -> tuple[nn.Module, Optimizer]:
    model = mlp().double()
    return model, SGD(model.parameters(), lr=0.1)


def test_parameters_that_are_not_the_models_are_refused() -> None:
    model, _ = small()
    with pytest.raises(TargetError, match=r"1 of the optimizer's 1 parameters \(of shape 3x2\) are not the model's"):
        train_step(model, SGD([nn.Parameter(torch.ones(3, 2))], lr=0.1), mse)


def test_so_are_those_that_are_not_the_models_any_more() -> None:
    model, optimizer = small()
    step = train_step(model, optimizer, mse, policy="sequential")
    for _ in range(2):
        step(*ROWS[0])
    model[2] = nn.Linear(8, 4).double()  # type: ignore[operator]
    with pytest.raises(TargetError, match="2 of the optimizer's 4 parameters"):
        step(*ROWS[0])


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda model, x, y: (model(x) - y).square(), "a loss of shape 8x4: let it return a scalar"),
        (lambda model, x, y: 3.0, "returned a float: let it return the loss"),
        (lambda model, x, y: y.sum(), "depends on no parameter"),
        (
            lambda output, target: (output - target).square(),
            r"takes \(output, target\): where it takes the model's outputs",
        ),
    ],
)
def test_a_loss_that_is_none_is_refused_at_every_step(loss: Make, message: str) -> None:
    model, optimizer = small()
    before = copy.deepcopy(model.state_dict())
    step = train_step(model, optimizer, loss, policy="sequential")
    for _ in range(3):
        with pytest.raises(TargetError, match=message):
            step(*ROWS[0])
    close(dict(model.state_dict()), dict(before))


def test_a_batch_without_equal_parts_is_refused() -> None:
    model, optimizer = small()
    step = train_step(model, optimizer, mse, microbatches=3)
    with pytest.raises(TargetError, match="a batch of 8 has no 3 equal parts"):
        step(*ROWS[0])


def test_microbatches_have_no_outputs() -> None:
    model, optimizer = small()
    step = train_step(model, optimizer, with_outputs, microbatches=2)
    with pytest.raises(TargetError, match="return the loss alone"):
        step(*ROWS[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": nn.Linear}, "takes a torch.nn.Module"),
        ({"optimizer": SGD}, "takes an optimizer of torch.optim"),
        ({"loss_fn": 3}, "takes a function loss_fn"),
        ({"loss_fn": nn.MSELoss}, "MSELoss'>: make one"),
        ({"microbatches": 0}, "microbatches=0 is not allowed"),
        ({"microbatches": True}, "microbatches=True is not allowed"),
        ({"max_norm": -1}, "max_norm=-1 is not allowed"),
        ({"decay": 2}, "decay=2 is not allowed"),
        ({"decay": 0.9}, "decay=0.9 is of an average: give average="),
        ({"average": nn.Linear(2, 2)}, "average has to be a copy of the model"),
        ({"scaler": 2.0}, "scaler has to be a torch.amp.GradScaler"),
        ({"polices": "auto"}, "did you mean 'policy'"),
        ({"microbatch": 2}, "did you mean 'microbatches'"),
    ],
)
def test_what_it_does_not_take_is_refused(change: dict[str, Any], message: str) -> None:
    model, optimizer = small()
    with pytest.raises((TargetError, OptionError), match=message):
        train_step(**{"model": model, "optimizer": optimizer, "loss_fn": mse, **change})


def test_an_average_in_the_models_own_memory_is_refused() -> None:
    model, optimizer = small()
    with pytest.raises(TargetError, match="with tensors of its own"):
        train_step(model, optimizer, mse, average=model)


# Reports


def test_it_can_be_explained() -> None:
    model, optimizer = small()
    step = train_step(model, optimizer, mse, policy="sequential")
    assert "nothing is known yet" in autostream.explain(step)
    step(*ROWS[0])
    assert "the next one is scheduled" in autostream.explain(step)
    step(*ROWS[0])
    (report,) = step.reports
    assert isinstance(report, Report)
    assert report.model == "Sequential, TrainingStep"
    assert "runs as" in autostream.explain(step)
    assert repr(step).startswith("TrainStep(Sequential(")


def test_ops_of_the_backward_have_the_lines_of_those_forward_and_updates_have_none() -> None:
    model, optimizer = Partial().double(), None
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = train_step(model, optimizer, mse, policy="sequential")
    for _ in range(2):
        step(*ROWS[0])
    (report,) = step.reports
    assert report.graph is not None
    sources = {op.name: op.source.rpartition(": ")[2] for op in report.graph.ops.values()}
    assert sources["tanh"] == sources["mm"] == "return self.used(self.frozen(x).tanh())"
    assert sources["mse_loss_backward"] == "return F.mse_loss(model(x), y)"
    assert {source for name, source in sources.items() if name.startswith(("mul_", "add_"))} == {""}
