"""``requires_grad`` that a step sets and sets back: which gradients there are is as in eager code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autostream

QUICK: dict[str, Any] = {"policy": "sequential", "kernels": "eager"}
Update = Callable[[Tensor], Tensor]


class Gan:
    """An actor and a critic, with an optimizer each."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.actor, self.critic = nn.Linear(3, 3).double(), nn.Linear(3, 1).double()
        self.optimizers = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5) for net in (self.actor, self.critic)]

    def train(self, loss: Tensor, at: int) -> Tensor:
        self.optimizers[at].zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizers[at].step()
        return loss

    def state(self) -> list[Any]:
        parameters = [*self.actor.parameters(), *self.critic.parameters()]
        flags = [parameter.requires_grad for parameter in parameters]
        return [flags, *([p.detach().clone(), None if p.grad is None else p.grad.clone()] for p in parameters)]


def frozen_for_the_actor(gan: Gan) -> Update:
    def update(x: Tensor) -> Tensor:
        gan.train(F.softplus(gan.critic(gan.actor(x).detach())).mean() - gan.critic(x).mean(), 1)
        gan.critic.requires_grad_(False)
        loss = gan.train(F.softplus(-gan.critic(gan.actor(x))).mean(), 0)
        gan.critic.requires_grad_(True)
        return loss

    return update


def by_attribute(gan: Gan) -> Update:
    def update(x: Tensor) -> Tensor:
        for parameter in gan.critic.parameters():
            parameter.requires_grad = False
        loss = gan.train(F.softplus(-gan.critic(gan.actor(x))).mean(), 0)
        for parameter in gan.critic.parameters():
            parameter.requires_grad = True
        gan.train(F.softplus(gan.critic(gan.actor(x).detach())).mean() - gan.critic(x).mean(), 1)
        return loss

    return update


def frozen_at_first(gan: Gan) -> Update:
    gan.critic.requires_grad_(False)

    def update(x: Tensor) -> Tensor:
        gan.critic.requires_grad_()
        gan.train(F.softplus(gan.critic(gan.actor(x).detach())).mean() - gan.critic(x).mean(), 1)
        gan.critic.requires_grad_(False)
        return gan.train(F.softplus(-gan.critic(gan.actor(x))).mean(), 0)

    return update


def frozen_after_the_forward(gan: Gan) -> Update:
    def update(x: Tensor) -> Tensor:
        gan.optimizers[1].zero_grad()
        loss = F.softplus(-gan.critic(gan.actor(x))).mean()
        gan.critic.weight.requires_grad_(False)
        gan.train(loss, 0)
        gan.optimizers[1].step()
        gan.critic.weight.requires_grad_(True)
        return loss

    return update


def stays_frozen(gan: Gan) -> Update:
    def update(x: Tensor) -> Tensor:
        gan.optimizers[1].zero_grad()
        loss = gan.train(F.softplus(-gan.critic(gan.actor(x))).mean(), 0)
        gan.critic.requires_grad_(not gan.critic.weight.requires_grad)
        return loss

    return update


def asks(gan: Gan) -> Update:
    """Python reads what it has set."""

    def update(x: Tensor) -> Tensor:
        gan.optimizers[1].zero_grad()
        gan.critic.bias.requires_grad = False
        scale = 2.0 if gan.critic.bias.requires_grad else 3.0
        loss = gan.train(gan.critic(gan.actor(x)).square().mean() * scale, 0)
        gan.critic.bias.requires_grad = True
        return loss

    return update


@pytest.mark.parametrize(
    "write", [frozen_for_the_actor, by_attribute, frozen_at_first, frozen_after_the_forward, asks, stays_frozen]
)
def test_a_part_may_be_frozen_while_another_is_trained(write: Callable[[Gan], Update]) -> None:
    ours, eager = Gan(), Gan()
    step, other = autostream.step(optimizers=ours.optimizers, **QUICK)(write(ours)), write(eager)
    for _ in range(6):
        x = torch.randn(4, 3, dtype=torch.double)
        torch.testing.assert_close(step(x), other(x).detach(), rtol=0, atol=1e-10)
        torch.testing.assert_close(ours.state(), eager.state(), rtol=0, atol=1e-10)
    reasons = [refusal.reason for report in step.reports for refusal in report.refusals]
    assert ["set it back where the step ends" in reason for reason in reasons] == [True] * (write is stays_frozen)
    assert {report.mode for report in step.reports} == ({"plain"} if write is stays_frozen else {"one stream"})
