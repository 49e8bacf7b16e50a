"""What changes between two steps, and is seen in the next one: each was once missed, and gave a wrong result."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import autostream
from autostream import TraceError

QUICK: dict[str, Any] = {"policy": "critical_path", "kernels": "eager"}


def step_of(optimizer: Optimizer, loss: Callable[[Tensor], Tensor]) -> Any:
    """A step that clears gradients first, and so leaves them."""

    @autostream.step(optimizers=[optimizer], **QUICK)
    def update(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        value = loss(x)
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return value

    return update


def rows(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, 4, dtype=torch.double, generator=torch.Generator().manual_seed(seed))


def layer(wide: int = 2) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, wide).double()


@pytest.mark.parametrize("name", ["weight_decay", "betas"])
def test_a_number_that_changes_before_a_batch_of_another_size_counts_in_later_steps_too(name: str) -> None:
    ours, theirs = layer(), layer()
    optimizers = [AdamW(model.parameters(), lr=0.1, weight_decay=0.5) for model in (ours, theirs)]
    step = autostream.train_step(ours, optimizers[0], nn.MSELoss(), **QUICK)
    for at, count in enumerate([8, 8, 8, 5, 8, 5, 8, 8]):
        if at == 5:
            for optimizer in optimizers:
                optimizer.param_groups[0][name] = 0.1 if name == "weight_decay" else (0.5, 0.6)
        x, y = rows(count, at), rows(count, at + 100)[:, :2]
        step(x, y)
        optimizers[1].zero_grad()
        F.mse_loss(theirs(x), y).backward()
        optimizers[1].step()
        torch.testing.assert_close(ours.weight, theirs.weight, rtol=0, atol=1e-12)


def test_parameters_that_dynamo_met_in_an_optimizer_are_trained_in_the_next_graph() -> None:
    """Dynamo marks them, as ``torch.compile(optimizer.step)`` does, and takes those with a mark for constants."""
    model = layer()
    optimizer = SGD(model.parameters(), lr=0.1)

    @autostream.step(optimizers=[optimizer], **QUICK)
    def update(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        for group in optimizer.param_groups:
            nn.utils.clip_grad_norm_(group["params"], 1.0)
        optimizer.step()
        return loss

    for count in (8, 8, 6, 6, 8):
        before = model.weight.detach().clone()
        update(rows(count))
        assert not torch.equal(model.weight, before)
        assert model.weight.grad is not None
    assert len(update.reports) == 2


def test_function_transforms_are_captured_and_left_again() -> None:
    def made() -> tuple[Any, Optimizer]:
        model = layer()
        optimizer = SGD(model.parameters(), lr=0.1)

        def update(x: Tensor) -> Tensor:
            def loss(weights: dict[str, Tensor]) -> Tensor:
                return torch.func.functional_call(model, weights, (x,)).square().mean()  # type: ignore[no-any-return]

            gradients = torch.func.grad(loss)({name: p.detach() for name, p in model.named_parameters()})
            for name, parameter in model.named_parameters():
                parameter.grad = gradients[name]
            optimizer.step()
            return model.weight.detach().clone()

        return update, optimizer

    (ours, optimizer), (eager, _) = made(), made()
    step = autostream.step(optimizers=[optimizer], **QUICK)(ours)
    for seed in range(4):
        torch.testing.assert_close(step(rows(8, seed)), eager(rows(8, seed)), rtol=0, atol=1e-12)
        assert torch._C._functorch.peek_interpreter_stack() is None
    assert "plain" not in {report.mode for report in step.reports}


class Growing(nn.Module):
    """Layers, factors and flags, of which there are none at first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.more = layer(), nn.ModuleList()
        self.factors: dict[str, float] = {}
        self.flags: dict[str, bool] = {}

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        for part in self.more:
            x = part(x)
        for factor in self.factors.values():
            x = x * factor
        return x * 2 if "double" in self.flags or hasattr(self.layer.weight, "tag") else x


class Twice(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


CHANGES: dict[str, Callable[[Growing], Any]] = {
    "a layer in a list": lambda model: model.more.append(nn.Tanh()),
    "a factor in a dictionary": lambda model: model.factors.update(new=3.0),
    "a flag in a dictionary": lambda model: model.flags.update(double=True),
    "an attribute of a weight": lambda model: setattr(model.layer.weight, "tag", True),
    "the class of a layer": lambda model: setattr(model.layer, "__class__", Twice),
}


@pytest.mark.parametrize(
    ("how", "change"),
    [
        *(("train_step", change) for change in CHANGES),
        *(("optimize", change) for change in CHANGES if "attribute" not in change),  # see tests/test_api_state.py
    ],
)
def test_a_change_of_the_model_is_seen(how: str, change: str) -> None:
    model = Growing()
    if how == "optimize":
        fast = autostream.optimize(model, **QUICK)
        calls: list[Callable[[], Tensor]] = [lambda: fast(rows(8)), lambda: model(rows(8))]
    else:
        step = autostream.train_step(model, SGD(model.parameters(), lr=0.0), lambda m, x: m(x).square().mean(), **QUICK)
        calls = [lambda: step(rows(8)), lambda: model(rows(8)).square().mean()]
    with torch.set_grad_enabled(how == "train_step"):
        before = [calls[0]() for _ in range(3)][-1]
        CHANGES[change](model)
        torch.testing.assert_close(*[call().detach() for call in calls])
        assert not torch.equal(calls[0](), before)


def test_a_layer_without_submodules_may_get_one_that_the_step_reads() -> None:
    model = nn.Sequential(layer(), nn.Tanh())
    optimizer = SGD(model[0].parameters(), lr=0.0)

    @autostream.step(optimizers=[optimizer], **QUICK)
    def update(x: Tensor) -> tuple[Tensor, Tensor]:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            return loss, torch.stack([parameter.sum() for parameter in model.parameters()]).sum()

    for _ in range(3):
        update(rows(8))
    model[0].extra = layer()
    _, total = update(rows(8))
    torch.testing.assert_close(total, sum(parameter.detach().sum() for parameter in model.parameters()))


def test_an_average_takes_over_a_buffer_that_the_model_gets() -> None:
    model = nn.Sequential(layer(), nn.Tanh())
    average = copy.deepcopy(model)
    step = autostream.train_step(model, SGD(model.parameters(), lr=0.1), nn.MSELoss(), average=average, **QUICK)
    for _ in range(3):
        step(rows(8), rows(8)[:, :2])
    model[0].register_buffer("extra", torch.ones(3))
    step(rows(8), rows(8)[:, :2])
    torch.testing.assert_close(average[0].extra, torch.ones(3))


NET = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()


@pytest.mark.parametrize("first", ["zero_grad", "the loss"])
def test_weights_of_a_model_that_is_a_global_may_be_replaced(first: str) -> None:
    optimizer = SGD(NET.parameters(), lr=0.0)

    @autostream.step(optimizers=[optimizer], **QUICK)
    def update(x: Tensor) -> Tensor:
        if first == "zero_grad":
            optimizer.zero_grad()
        loss: Tensor = NET(x).square().mean()
        if first == "the loss":
            optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss

    for _ in range(3):
        update(rows(8))
    NET[0].weight, NET[2].weight = NET[2].weight, NET[0].weight
    torch.testing.assert_close(update(rows(8)), NET(rows(8)).square().mean().detach())


def group_elsewhere(optimizer: Optimizer) -> Callable[[Tensor, float], None]:
    (group,) = optimizer.param_groups
    return lambda weight, number: group.update(lr=number)


def data_of_a_weight(optimizer: Optimizer) -> Callable[[Tensor, float], None]:
    def halve(weight: Tensor, number: float) -> None:
        weight.data = number * weight.data

    return halve


@pytest.mark.parametrize("made", [group_elsewhere, data_of_a_weight])
def test_what_a_step_sets_of_its_optimizer_or_weights_is_set(made: Callable[[Optimizer], Any]) -> None:
    def trained(wrap: Callable[[Any, Optimizer], Any]) -> list[Tensor]:
        model = layer()
        optimizer = SGD(model.parameters(), lr=0.1)
        set_it = made(optimizer)

        def update(x: Tensor, number: float) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(x).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            set_it(model.weight, number)
            optimizer.step()
            return loss

        step = wrap(update, optimizer)
        return [step(rows(8, at), 0.1 + 0.1 * at).detach() for at in range(5)]

    ours = trained(lambda update, optimizer: autostream.step(optimizers=[optimizer], **QUICK)(update))
    torch.testing.assert_close(ours, trained(lambda update, _: update), rtol=0, atol=1e-12)


@dataclass
class Stats:
    epoch: int = 0


def test_a_dataclass_that_lives_on_is_returned_itself() -> None:
    model, stats = layer(), Stats()
    step = autostream.train_step(
        model, SGD(model.parameters(), lr=0.1), lambda m, x: (m(x).square().mean(), stats), **QUICK
    )
    for epoch in range(4):
        stats.epoch = epoch
        assert step(rows(8))[1].epoch == epoch


def test_copies_of_gradients_that_the_step_makes_are_what_it_made() -> None:
    """With another dtype, another shape, a view from before: unlike those that a backward makes for parameters."""
    model = layer()

    @autostream.step(optimizers=[SGD(model.parameters(), lr=0.1)], **QUICK)
    def update(x: Tensor) -> Sequence[Tensor]:
        weight, bias = torch.autograd.grad(model(x).square().mean(), [model.weight, model.bias])
        half = torch.empty_like(model.weight, dtype=torch.float32)
        half.copy_(weight)
        row = torch.empty_like(model.bias[None])
        row.copy_(bias)
        memory = torch.empty_like(model.weight)
        flat = memory.view(-1)
        memory.copy_(weight)
        return half, row, flat, weight

    for _ in range(3):
        half, row, flat, weight = update(rows(8))
        assert (half.dtype, row.shape) == (torch.float32, (1, 2))
        torch.testing.assert_close(flat, weight.flatten())


class SavesItsGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, x: Tensor) -> Tensor:
        gradient = 2 * x
        ctx.save_for_backward(gradient)
        return (weight * x).sum()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[Tensor, None]:
        return ctx.saved_tensors[0], None


def test_a_gradient_that_a_function_saved_is_not_the_parameters_own() -> None:
    weight = nn.Parameter(torch.ones(4))
    optimizer = SGD([weight], lr=0.1)

    @autostream.step(optimizers=[optimizer], **QUICK)
    def update(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = SavesItsGradient.apply(weight, x)  # type: ignore[no-untyped-call]
        loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        assert weight.grad is not None
        weight.grad.mul_(10)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return weight.grad

    assert [update(torch.ones(4))[0].item() for _ in range(3)] == [22.0] * 3


def test_strict_raises_where_the_average_lacks_a_buffer() -> None:
    model = layer()
    average = copy.deepcopy(model)
    for module in (model, average):
        module.register_buffer("extra", torch.ones(1))
    step = autostream.train_step(
        model, SGD(model.parameters(), lr=0.1), nn.MSELoss(), average=average, strict=True, **QUICK
    )
    for _ in range(2):
        step(rows(8), rows(8)[:, :2])
    del average.extra
    with pytest.raises(TraceError, match="the average has no buffer extra"):
        step(rows(8), rows(8)[:, :2])


def test_a_frozen_model_beside_the_optimizers_may_be_unfrozen() -> None:
    model, target = layer(), layer().requires_grad_(False)
    step = step_of(SGD(model.parameters(), lr=0.1), lambda x: (model(x) - target(x)).square().mean())
    for _ in range(4):
        step(rows(8))
    target.requires_grad_(True)
    step(rows(8))
    assert target.weight.grad is not None
