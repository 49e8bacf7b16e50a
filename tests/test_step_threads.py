"""Training steps in several threads: one after the other, and what else a thread does is left alone meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import autostream
from tests.threads import in_threads

pytestmark = pytest.mark.skipif(
    torch.version.cuda is not None and not torch.cuda.is_available(),
    reason="built for CUDA, without a device, PyTorch crashes where a thread traces after another has ended",
)

QUICK: dict[str, Any] = {"policy": "sequential", "kernels": "eager"}
Update = Callable[[Tensor], Tensor]


def written() -> tuple[Update, nn.Linear, Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    adam = torch.optim.Adam(model.parameters(), lr=0.01)

    def update(x: Tensor) -> Tensor:
        adam.zero_grad()
        loss = square(model, x)
        loss.backward()  # type: ignore[no-untyped-call]
        adam.step()
        return loss.detach()

    return update, model, adam


def square(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


@pytest.mark.parametrize("how", ["step", "train_step"])
def test_steps_of_several_threads_run_one_after_the_other(how: str) -> None:
    (update, ours, adam), (eager, theirs, _) = written(), written()
    step: Any = autostream.step(optimizers=[adam], **QUICK)(update)
    if how == "train_step":
        step = autostream.train_step(ours, adam, square, **QUICK)
    x = torch.ones(8, 4)
    step(x)
    in_threads(3, lambda _: [step(x) for _ in range(20)])
    assert adam.state[ours.weight]["step"] == 61
    for _ in range(61):
        eager(x)
    torch.testing.assert_close([*ours.parameters()], [*theirs.parameters()])
    assert {report.mode for report in step.reports} == {"one stream"}


class Pause:
    """Lets a trace wait until another thread has done something."""

    def __init__(self) -> None:
        self.reached, self.over = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.reached.set()
        self.over.wait(60)


PAUSES: list[Pause] = []


@torch.library.custom_op("autostream_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    """Twice its argument."""
    return x * 2


@doubled.register_fake
def _(x: Tensor) -> Tensor:
    for pause in PAUSES:
        pause()
    return torch.empty_like(x)


doubled.register_autograd(lambda context, gradient: gradient * 2)


@pytest.fixture
def pause() -> Iterator[Pause]:
    PAUSES.append(pause := Pause())
    yield pause
    pause.over.set()
    PAUSES.clear()


def pausing(*others: Optimizer) -> tuple[Any, nn.Linear, Optimizer]:
    """A step that pauses where it is captured, which lists other optimizers as well; its model and its optimizer."""
    model = nn.Linear(4, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.5)

    @autostream.step(optimizers=[*others, sgd], strict=True, **QUICK)
    def update(x: Tensor) -> Tensor:
        sgd.zero_grad()
        loss: Tensor = doubled(model(x)).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        sgd.step()
        return loss

    return update, model, sgd


def test_what_a_thread_calls_while_another_captures_is_the_optimizers_own(pause: Pause) -> None:
    """A user's own ``optimizer.step()`` and ``zero_grad()`` do what they always do."""
    update, model, sgd = pausing()
    x = torch.zeros(8, 4)
    update(x)  # makes state
    moved: list[Tensor] = []
    cleared: list[bool] = []

    def work(number: int) -> None:
        if number == 0:
            update(x)
            return
        assert pause.reached.wait(60)
        before = model.weight.detach().clone()
        model.weight.grad = torch.ones(1, 4)
        sgd.step()
        moved.append(before - model.weight.detach())
        sgd.zero_grad()
        cleared.append(model.weight.grad is None)
        pause.over.set()

    in_threads(2, work)
    torch.testing.assert_close(moved, [torch.full((1, 4), 0.5)])
    assert cleared == [True]
    assert [report.mode for report in update.reports] == ["one stream"]


def test_a_step_that_begins_while_another_of_its_optimizers_is_captured_waits(pause: Pause) -> None:
    """It is not refused because of what the capture has put in their place."""
    first, _, adam = written()
    second, *_ = pausing(adam)
    step = autostream.step(optimizers=[adam], strict=True, **QUICK)(first)
    x = torch.ones(8, 4)
    step(x)
    step(x)
    second(x)
    waiting = threading.Event()

    def work(number: int) -> None:
        if number == 0:
            second(x)
        elif number == 1:
            assert pause.reached.wait(60)
            waiting.set()
            step(x)
        else:
            assert waiting.wait(60)
            pause.over.wait(0.2)  # the step of the other thread has begun by then, if the machine is not too slow
            pause.over.set()

    in_threads(3, work)
    assert [report.mode for each in (step, second) for report in each.reports] == ["one stream"] * 2
