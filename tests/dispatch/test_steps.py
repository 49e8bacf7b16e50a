"""The eager training step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from autostream.dispatch.steps import Step
from autostream.errors import TargetError
from tests.steps import run, step_of


def mse(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().mean()


BATCH = (torch.ones(4, 3), torch.zeros(4, 2))


def small() -> Step:
    model = nn.Linear(3, 2)
    return step_of(model, SGD(model.parameters(), lr=0.1), mse)


def test_a_step_trains_and_neither_reads_nor_leaves_gradients() -> None:
    step, other = small(), small()
    other.model.load_state_dict(step.model.state_dict())
    for parameter in step.model.parameters():
        parameter.grad = torch.full_like(parameter, 1e6)
    losses = [run(step, BATCH).item() for _ in range(30)]
    assert losses == [run(other, BATCH).item() for _ in range(30)]
    assert losses[-1] < 1e-3 * losses[0]
    assert [parameter.grad for parameter in step.model.parameters()] == [None, None]


@torch.no_grad()
def test_differentiating_changes_no_weight_and_completing_updates_them() -> None:
    step = small()
    weight = next(step.model.parameters())
    before = weight.detach().clone()
    result, gradients = step.differentiate(BATCH)
    assert torch.equal(weight, before)
    assert [gradient.shape for gradient in gradients if gradient is not None] == [(2, 3), (2,)]
    assert step.complete(result, gradients) is result
    assert gradients[0] is not None
    torch.testing.assert_close(weight.detach(), before - 0.1 * gradients[0])


def test_modules_that_the_loss_refers_to_can_be_trained_and_no_others() -> None:
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
