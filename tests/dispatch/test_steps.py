"""Training steps as users write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from autostream.errors import TargetError
from tests.steps import run, step_of


def mse(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().mean()


BATCH = (torch.ones(4, 3), torch.zeros(4, 2))


def small(optimizer: Callable[..., Optimizer] = SGD, model: nn.Module | None = None) -> Any:
    model = model or nn.Linear(3, 2)
    return step_of(model, optimizer(model.parameters(), lr=0.1), mse)


def test_a_step_trains_and_leaves_no_gradients() -> None:
    step = small()
    losses = [run(step, BATCH).item() for _ in range(30)]
    assert losses[-1] < 1e-3 * losses[0]
    assert [parameter.grad for parameter in step.model.parameters()] == [None, None]


def test_a_step_does_not_see_gradients_that_were_there() -> None:
    step, other = small(), small()
    other.model.load_state_dict(step.model.state_dict())
    for parameter in step.model.parameters():
        parameter.grad = torch.full_like(parameter, 1e6)
    run(step, BATCH)
    run(other, BATCH)
    assert all(map(torch.equal, step.model.parameters(), other.model.parameters()))


@torch.no_grad()
def test_what_is_differentiated_trains_nothing_until_it_is_completed() -> None:
    step = small()
    before = step.model.weight.detach().clone()
    result, gradients = step.differentiate(BATCH)
    assert torch.equal(step.model.weight, before)
    assert [gradient.shape for gradient in gradients] == [(2, 3), (2,)]
    assert step.complete(result, gradients) is result
    torch.testing.assert_close(step.model.weight.detach(), before - 0.1 * gradients[0])


def test_what_a_loss_refers_to_may_be_trained_and_nothing_else() -> None:
    head = nn.Linear(2, 2)

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return mse(nn.Sequential(model, head), x, y)

    model = nn.Linear(3, 2)
    step = step_of(model, SGD([*model.parameters(), *head.parameters()], lr=0.1), loss)
    before = head.weight.detach().clone()
    run(step, BATCH)
    assert not torch.equal(head.weight, before)
    with pytest.raises(TargetError, match="2 of the optimizer's 2 parameters"):
        step_of(model, SGD(nn.Linear(1, 1).parameters(), lr=0.1), loss)
