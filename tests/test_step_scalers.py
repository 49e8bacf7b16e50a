"""Gradient scalers in the graph of a step: what is skipped, scaled and counted is what eager code does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

import autostream

Update = Callable[..., Any]
QUICK: dict[str, Any] = {"policy": "critical_path", "kernels": "eager"}
ADAM = partial(Adam, lr=0.1)
NOT_FINITE = {4, 5, 9}
"""The steps whose batch is not finite."""


class Parts:
    """What a step is made of: two layers with an optimizer for each, and a scaler."""

    def __init__(self, optimizer: Callable[..., Optimizer] = ADAM, **kwargs: Any) -> None:
        torch.manual_seed(0)
        self.models = [nn.Linear(3, 2).double(), nn.Linear(2, 2).double()]
        self.optimizers = [optimizer(model.parameters()) for model in self.models]
        self.scaler = GradScaler("cpu", 8.0, growth_interval=2, **kwargs)

    def state(self) -> list[Any]:
        parameters = [parameter for model in self.models for parameter in model.parameters()]
        states = [value for each in self.optimizers for state in each.state.values() for value in state.values()]
        gradients = [parameter.grad for parameter in parameters]
        tensors = [*parameters, *states, *(gradient for gradient in gradients if gradient is not None)]
        scaler = {**self.scaler.state_dict(), "none": [gradient is None for gradient in gradients]}
        if self.scaler.is_enabled():
            scaler["between"] = len(self.scaler._per_optimizer_states)
        return [scaler, *(tensor.detach().double().clone() for tensor in tensors)]


def plain(parts: Parts, updates: bool = True) -> Update:
    """Gradients are cleared first, and stay."""
    (model, _), (optimizer, other), scaler = parts.models, parts.optimizers, parts.scaler

    def update(x: Tensor, scaled: bool) -> Tensor:
        optimizer.zero_grad()
        other.zero_grad()
        loss = model(x).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        if updates:
            scaler.update()
        return loss

    return update


def clipped_in_parts(parts: Parts) -> Update:
    (model, head), (optimizer, other), scaler = parts.models, parts.optimizers, parts.scaler

    def update(x: Tensor, scaled: bool) -> Tensor:
        total = torch.zeros((), dtype=torch.double)
        for part in x.chunk(2):
            loss = head(model(part).tanh()).square().mean() / 2
            scaler.scale(loss).backward()
            total = total + loss.detach()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.step(other)
        scaler.update()
        optimizer.zero_grad()
        other.zero_grad()
        return total

    return update


def one_is_skipped(parts: Parts) -> Update:
    """Two losses: the gradient of one is not finite, and only its optimizer's step is skipped."""
    models, optimizers, scaler = parts.models, parts.optimizers, parts.scaler

    def update(x: Tensor, scaled: bool) -> Tensor:
        losses = [models[0](x).square().mean(), models[1](torch.ones(2, 2).double()).square().mean()]
        for loss, optimizer in zip(scaler.scale(losses), optimizers, strict=True):
            loss.backward()
            scaler.step(optimizer)
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad()
        return losses[0] + losses[1].detach()

    return update


def two_updates(parts: Parts) -> Update:
    """One step after the other, as of a GAN, each with an update of the scale."""
    models, optimizers, scaler = parts.models, parts.optimizers, parts.scaler

    def update(x: Tensor, scaled: bool) -> Tensor:
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            loss = model(x[:, : model.in_features]).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return loss

    return update


def since_the_third(parts: Parts) -> Update:
    """The scaler makes its scale in a later step than the first."""
    step = plain(parts)
    (model, _), (optimizer, other) = parts.models, parts.optimizers

    def update(x: Tensor, scaled: bool) -> Tensor:
        if scaled:
            return step(x, scaled)
        optimizer.zero_grad()
        other.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return update


WRITTEN = (plain, clipped_in_parts, one_is_skipped, two_updates, since_the_third)


def grow_faster(parts: Parts) -> None:
    parts.scaler.set_growth_factor(4.0)


def set_scale(parts: Parts) -> None:
    parts.scaler.update(new_scale=2.0)


def load(parts: Parts) -> None:
    """The first time keeps the states, the second takes them again."""
    every = (*parts.optimizers, parts.scaler)
    kept = parts.__dict__.setdefault("kept", copy.deepcopy([each.state_dict() for each in every]))
    for each, state in zip(every, kept, strict=True):
        each.load_state_dict(copy.deepcopy(state))


def replace(parts: Parts) -> None:
    parts.scaler._scale = torch.tensor(16.0)


def run(
    write: Callable[[Parts], Update], parts: Parts, wrap: Callable[[Update], Update], between: Any, after: Any
) -> list[Any]:
    step, seen = wrap(write(parts)), []
    for at in range(12):
        x = torch.randn(4, 3, dtype=torch.double)
        if at in NOT_FINITE:
            x[0, 0] = float("inf")
        scaled = write is not since_the_third or at >= 3
        seen.append([step(x, scaled).detach(), parts.state()])
        if between is not None and at in after:
            between(parts)
    return seen


def assert_alike(
    write: Callable[[Parts], Update],
    make: Callable[[], Parts] = Parts,
    between: Any = None,
    after: Any = (3, 7),
    **options: Any,
) -> Any:
    """Run a step and its eager twin, with changes after some steps; returns the former."""
    steps: list[Any] = []
    ours = make()

    def wrap(update: Update) -> Update:
        steps.append(autostream.step(optimizers=ours.optimizers, **QUICK, **options)(update))
        return steps[0]  # type: ignore[no-any-return]

    seen = run(write, ours, wrap, between, after)
    for mine, theirs in zip(seen, run(write, make(), lambda update: update, between, after), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-10, equal_nan=True)
    return steps[0]


@pytest.mark.parametrize("write", WRITTEN, ids=lambda write: write.__name__)
def test_a_scaled_step_is_the_eager_one_in_one_graph(write: Callable[[Parts], Update]) -> None:
    step = assert_alike(write, strict=True)
    assert len(step.reports) == (3 if write is since_the_third else 1)
    assert any("_amp_update_scale_" in str(report.graph.ops) for report in step.reports)


@pytest.mark.parametrize(
    "optimizer",
    [
        partial(SGD, lr=0.1),
        partial(SGD, lr=0.1, momentum=0.9, nesterov=True),
        partial(AdamW, lr=0.1, amsgrad=True),
        partial(Adam, lr=0.1, fused=True),
        partial(RMSprop, lr=0.1, momentum=0.5, centered=True),
        partial(Adagrad, lr=0.1, lr_decay=0.1),
    ],
    ids=str,
)
def test_a_skipped_step_leaves_every_optimizer_as_it_was(optimizer: Callable[..., Optimizer]) -> None:
    assert_alike(clipped_in_parts, partial(Parts, optimizer), strict=True)


@pytest.mark.parametrize(("between", "graphs"), [(set_scale, 1), (load, 1), (grow_faster, 2), (replace, 3)])
def test_a_scaler_may_change_between_steps(between: Any, graphs: int) -> None:
    assert len(assert_alike(plain, between=between, strict=True).reports) == graphs


def test_a_scaler_that_begins_between_unscale_and_update_is_no_graphs() -> None:
    def unscale(parts: Parts) -> None:
        parts.scaler.unscale_(parts.optimizers[0])

    step = assert_alike(plain, between=unscale)
    assert [report.mode for report in step.reports] == ["one stream", "plain"]


def test_a_scaler_that_is_off_changes_nothing() -> None:
    step = assert_alike(clipped_in_parts, partial(Parts, enabled=False), strict=True)
    assert "_amp" not in str(step.reports[0].graph.ops)


def never_updated(parts: Parts) -> Update:
    """The scale is updated between steps only."""
    return plain(parts, updates=False)


def update_scale(parts: Parts) -> None:
    parts.scaler.update()


def asks(parts: Parts) -> Update:
    step = plain(parts)

    def update(x: Tensor, scaled: bool) -> Tensor:
        before = parts.scaler.get_scale()
        return step(x, scaled) * before

    return update


@pytest.mark.parametrize(
    ("write", "between", "reason"),
    [(never_updated, update_scale, "call scaler.update()"), (asks, None, "get_scale")],
)
def test_what_no_graph_does_with_a_scaler_runs_as_written(write: Any, between: Any, reason: str) -> None:
    (refusal,) = assert_alike(write, between=between, after=range(12)).reports[-1].refusals
    assert reason in refusal.reason
