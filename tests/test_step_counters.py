"""Steps that count their calls, and do something else in some of them, as delayed updates of an actor."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autostream

QUICK: dict[str, Any] = {"policy": "sequential", "kernels": "eager"}
CALLS = 12
Step = Callable[[Tensor], Tensor]


class Parts(nn.Module):
    """An actor and a critic, with a counter of each kind."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.actor, self.critic = nn.Linear(4, 4).double(), nn.Linear(4, 1).double()
        self.adams = [torch.optim.Adam(part.parameters(), lr=0.01) for part in (self.actor, self.critic)]
        self.calls, self.counts, self.latest = 0, {"calls": 0}, torch.zeros(())

    def train_critic(self, x: Tensor) -> Tensor:
        loss: Tensor = self.critic(self.actor(x).detach()).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        self.adams[1].step()
        self.adams[1].zero_grad()
        return loss

    def train_actor(self, x: Tensor) -> None:
        (-self.critic(self.actor(x)).mean()).backward()
        self.adams[0].step()
        for adam in self.adams:
            adam.zero_grad()


class Trainer:
    """Counts in an attribute of an object that is no module."""

    def __init__(self, parts: Parts) -> None:
        self.parts, self.calls = parts, 0

    def update(self, x: Tensor) -> Tensor:
        self.calls += 1
        loss = self.parts.train_critic(x)
        if self.calls % 2 == 0:
            self.parts.train_actor(x)
        return loss


def in_an_object(parts: Parts) -> tuple[Step, Callable[[], int]]:
    trainer = Trainer(parts)
    return trainer.update, lambda: trainer.calls


def in_a_module(parts: Parts) -> tuple[Step, Callable[[], int]]:
    """Counted where the step ends, beside a tensor that it leaves on the module."""

    def update(x: Tensor) -> Tensor:
        loss = parts.train_critic(x)
        if parts.calls % 3 == 0:
            parts.train_actor(x)
        parts.calls += 1
        parts.latest = loss.detach()
        return loss

    return update, lambda: parts.calls


def in_a_closure(parts: Parts) -> tuple[Step, Callable[[], int]]:
    calls = 0

    def update(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls > 3:  # a warm-up
            parts.train_actor(x)
        return parts.train_critic(x)

    return update, lambda: calls


CALLED = 0


def in_a_global(parts: Parts) -> tuple[Step, Callable[[], int]]:
    global CALLED
    CALLED = 0

    def update(x: Tensor) -> Tensor:
        global CALLED
        CALLED += 1
        loss = parts.train_critic(x)
        if CALLED % 2:
            parts.train_actor(x)
        return loss

    return update, lambda: CALLED


def with_prints(parts: Parts) -> tuple[Step, Callable[[], int]]:
    """Every fourth call runs as it is written."""

    def update(x: Tensor) -> Tensor:
        parts.calls += 1
        loss = parts.train_critic(x)
        if parts.calls % 4 == 0:
            print(loss.item())
        return loss

    return update, lambda: parts.calls


def as_a_factor(parts: Parts) -> tuple[Step, Callable[[], int]]:
    """The loss depends on the counter itself."""

    def update(x: Tensor) -> Tensor:
        parts.calls += 1
        return parts.train_critic(0.9**parts.calls * x)

    return update, lambda: parts.calls


def in_a_dictionary(parts: Parts) -> tuple[Step, Callable[[], int]]:
    def update(x: Tensor) -> Tensor:
        parts.counts["calls"] += 1
        loss = parts.train_critic(x)
        if parts.counts["calls"] % 2:
            parts.train_actor(x)
        return loss

    return update, lambda: parts.counts["calls"]


def after(write: Callable[[Parts], Any], **options: Any) -> tuple[list[Tensor], int, Any]:
    """All losses and weights after some calls, what was counted, and the step."""
    parts = Parts()
    update, count = write(parts)
    step = autostream.step(optimizers=parts.adams, **options)(update) if options else update
    data = torch.Generator().manual_seed(1)
    losses = [step(torch.randn(3, 4, dtype=torch.double, generator=data)).detach().clone() for _ in range(CALLS)]
    losses.append(parts.latest)
    return [*losses, *(parameter.detach() for parameter in parts.parameters())], count(), step


def check(write: Callable[[Parts], Any], **options: Any) -> Any:
    """Compare a step with the eager one; returns it."""
    (eager, counted, _), (ours, count, step) = after(write), after(write, **QUICK, **options)
    torch.testing.assert_close(ours, eager, rtol=0, atol=1e-10)
    assert count == counted == CALLS
    return step


def reasons(step: Any) -> Sequence[str]:
    return [refusal.reason for report in step.reports for refusal in report.refusals]


@pytest.mark.parametrize("write", [in_an_object, in_a_module, in_a_closure, in_a_global])
def test_each_outcome_of_a_branch_by_a_counter_has_one_graph(write: Callable[[Parts], Any]) -> None:
    step = check(write, strict=True)
    assert [report.mode for report in step.reports] == ["one stream"] * 2


def test_a_call_that_prints_now_and_then_is_the_only_one_that_runs_as_written() -> None:
    step = check(with_prints)
    assert [report.mode for report in step.reports] == ["one stream", "plain"]
    (reason,) = reasons(step)
    assert "it prints or logs" in reason


@pytest.mark.parametrize("write", [as_a_factor, in_a_dictionary])
def test_a_counter_of_another_kind_has_a_graph_for_each_value_and_the_reason_says_what_to_write(write: Any) -> None:
    (reason,) = reasons(check(write))
    assert re.search(r"since \S*\bcalls\S* has another value now: keep it in a tensor, or pass as a flag", reason)
    assert re.search(r"decides by it \(tests/test_step_counters\.py:\d+: ", reason)


def test_what_the_reason_says_to_write_has_one_graph_for_each_flag() -> None:
    """The counter outside of the step, and what is decided by it an argument."""
    parts, data, counted = Parts(), torch.Generator().manual_seed(1), {"calls": 0}

    @autostream.step(optimizers=parts.adams, strict=True, **QUICK)
    def update(x: Tensor, is_even: bool, weight: Tensor) -> Tensor:
        loss = parts.train_critic(weight * x)
        if is_even:
            parts.train_actor(x)
        return loss

    for _ in range(CALLS):
        counted["calls"] += 1
        x = torch.randn(3, 4, dtype=torch.double, generator=data)
        update(x, counted["calls"] % 2 == 0, torch.tensor(0.9 ** counted["calls"]))
    assert [report.mode for report in update.reports] == ["one stream"] * 2
