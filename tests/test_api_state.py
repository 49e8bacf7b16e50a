"""Changes of state and of modes are seen in the next call of an optimized model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autostream import optimize
from autostream.api import OptimizedModule

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("shift", torch.ones(4))
        self.plain = torch.ones(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) + self.right(x).relu() * self.shift + self.plain


def called(model: nn.Module, x: Tensor = X) -> OptimizedModule:
    """Optimized, and called often enough for the fast path."""
    fast = optimize(model)
    for _ in range(3):
        assert_same(fast, model, x)
    return fast


def assert_same(fast: OptimizedModule, model: nn.Module, x: Tensor = X) -> None:
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(fast(x), model(x))


def test_an_input_may_be_swapped_for_another() -> None:
    model, x = Net().eval(), X.clone()
    fast = called(model, x)
    torch.utils.swap_tensors(x, torch.full_like(x, 7.0))
    assert_same(fast, model, x)


class Asking(nn.Module):
    """Computes twice as much if a condition holds."""

    def __init__(self, ask: Callable[[Tensor, Tensor], bool]) -> None:
        super().__init__()
        self.layer, self.ask = nn.Linear(4, 4), ask

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * (2 if self.ask(x, self.layer.weight) else 1)


QUESTIONS = {
    "a weight's requires_grad": lambda x, weight: weight.requires_grad,
    "an input's requires_grad": lambda x, weight: x.requires_grad,
    "is_inference": lambda x, weight: x.is_inference(),
    "is_inference_mode_enabled": lambda x, weight: torch.is_inference_mode_enabled(),
}


OLD = torch.__version__ < (2, 13)
"""Where calls without gradients, as those of ``torch.compile``, do not notice that a weight's ``requires_grad`` changes
(docs/differences.md)."""


@pytest.mark.parametrize(
    "question",
    [
        pytest.param(name, marks=pytest.mark.xfail(OLD and name == "a weight's requires_grad", reason="torch 2.11"))
        for name in QUESTIONS
    ],
)
def test_autograd_flags_that_a_model_reads_are_those_of_the_call(question: str) -> None:
    model = Asking(QUESTIONS[question]).eval()
    fast = optimize(model)
    with torch.inference_mode():
        made_inside = X.clone()
    answers = set()
    for mode in (torch.no_grad, torch.inference_mode, torch.no_grad):
        for required in (True, False, True):
            model.requires_grad_(required)
            for x in (X, made_inside, X.clone().requires_grad_(), X):
                with mode():
                    assert torch.equal(fast(x), model(x))
                    answers.add(bool(model.ask(x, model.layer.weight)))
    assert answers == {True, False}


ATTRIBUTES: dict[str, Callable[[Tensor], bool]] = {
    "of an input": lambda x: getattr(x, "doubled", False),
    "the seed": lambda x: torch.initial_seed() % 2 == 0,
}


@pytest.mark.parametrize("grad_mode", [torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("question", ATTRIBUTES)
def test_attributes_of_inputs_and_the_seed_are_those_of_the_call(question: str, grad_mode: Callable[[], Any]) -> None:
    ask, x = ATTRIBUTES[question], X.clone()
    model = Asking(lambda x, weight: ask(x)).eval()
    fast = optimize(model, policy="sequential")
    answers = set()
    with grad_mode():
        for doubled in (True, False, True):
            if doubled:
                x.doubled = True  # type: ignore[attr-defined]
            else:
                del x.doubled  # type: ignore[attr-defined]
            for seed in (2, 3):
                torch.manual_seed(seed)
                for given in (x, x[:]):
                    assert torch.equal(fast(given), model(given))
                    answers.add(bool(ask(given)))
    assert answers == {True, False}


@pytest.mark.xfail(torch.__version__ < (2, 13), reason="torch.compile of 2.11 does not notice it either", strict=True)
@torch.no_grad()
def test_attributes_of_weights_are_those_of_the_call() -> None:
    model = Asking(lambda x, weight: getattr(weight, "doubled", False)).eval()
    fast = optimize(model, policy="sequential")
    weight = next(model.parameters())
    for doubled in (True, False, True, False):
        if doubled:
            weight.doubled = True  # type: ignore[attr-defined]
        else:
            del weight.doubled  # type: ignore[attr-defined]
        for _ in range(3):
            assert torch.equal(fast(X), model(X))


def test_a_change_of_requires_grad_reuses_the_schedule() -> None:
    """It is captured again, as by ``torch.compile``, to the same graph."""
    model = Net().eval()
    fast = called(model)
    modes = {report.mode for report in fast.reports}
    model.requires_grad_(False)
    assert_same(fast, model)
    with torch.inference_mode():
        assert torch.equal(fast(X), model(X))
    assert {report.mode for report in fast.reports} == modes


LEVEL: Any = 1


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (3, 11),
        ("a", "b"),
        (True, False),
        (1.5, 2.5),
        (3, None),
        (None, 3),
        (torch.float32, torch.float16),
        ((1,), (2,)),
    ],
    ids=repr,
)
@pytest.mark.parametrize("where", ["attribute", "global", "dictionary"])
def test_what_is_returned_beside_tensors_is_what_it_is_now(
    where: str, before: Any, after: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dynamo guards no number that is only returned: its bytecode reads it in each call."""

    class Returns(Net):
        def __init__(self) -> None:
            super().__init__()
            self.level, self.levels = before, {"level": before}

        def forward(self, x: Tensor) -> Any:
            if where == "attribute":
                return super().forward(x), self.level
            return super().forward(x), LEVEL if where == "global" else self.levels["level"]

    monkeypatch.setitem(globals(), "LEVEL", before)
    model = Returns().eval()
    fast = optimize(model)
    with torch.no_grad():
        assert [fast(X)[1] for _ in range(4)] == 4 * [before]
        model.level = model.levels["level"] = after
        monkeypatch.setitem(globals(), "LEVEL", after)
        assert [fast(X)[1] for _ in range(2)] == 2 * [after]
