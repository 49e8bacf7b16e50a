"""What may be done to a model's state may be done to that of an optimized one, and its next call sees it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autostream import optimize
from autostream.api import OptimizedModule

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """Two branches, a buffer and a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("shift", torch.ones(4))
        self.plain = torch.ones(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) + self.right(x).relu() * self.shift + self.plain


class Broken(Net):
    """The same, which only Dynamo can trace, in pieces."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 1 if x.sum() > 0 else x)


def called(model: nn.Module, x: Tensor = X) -> OptimizedModule:
    """Optimized, and called often enough for its calls to take the short way."""
    fast = optimize(model)
    for _ in range(3):
        assert_same(fast, model, x)
    return fast


def assert_same(fast: OptimizedModule, model: nn.Module, x: Tensor = X) -> None:
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(fast(x), model(x))


@pytest.fixture
def swapping() -> Iterator[None]:
    """Modules convert themselves by swapping their parameters."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(before)


@pytest.mark.parametrize(
    ("kind", "name"), [(Net, "left.weight"), (Net, "shift"), (Net, "plain"), (Broken, "right.bias")]
)
def test_a_tensor_may_be_swapped_for_another(kind: type[Net], name: str) -> None:
    model = kind().eval()
    fast = called(model)
    owner, _, attribute = name.rpartition(".")
    tensor = getattr(model.get_submodule(owner), attribute)
    other = type(tensor)(torch.full_like(tensor, 7.0)) if isinstance(tensor, nn.Parameter) else tensor * 7
    with torch.no_grad():
        before = fast(X)
        torch.utils.swap_tensors(tensor, other)
        assert not torch.equal(fast(X), before)
    assert_same(fast, model)


def test_an_input_may_be_swapped_for_another() -> None:
    model, x = Net().eval(), X.clone()
    fast = called(model, x)
    torch.utils.swap_tensors(x, torch.full_like(x, 7.0))
    assert_same(fast, model, x)


@pytest.mark.usefixtures("swapping")
@pytest.mark.parametrize("through", [lambda fast, model: fast, lambda fast, model: model], ids=["ours", "model"])
def test_modules_may_convert_themselves_by_swapping(
    through: Callable[[nn.Module, nn.Module], nn.Module],
) -> None:
    model = Net().eval()
    fast = called(model)
    through(fast, model).to(torch.float64)
    model.plain = model.plain.double()
    assert model.left.weight.dtype is torch.float64
    assert_same(fast, model, X.double())


@pytest.mark.usefixtures("swapping")
@pytest.mark.parametrize("assign", [False, True])
def test_a_state_may_be_loaded_by_swapping(assign: bool) -> None:
    model = Net().eval()
    fast = called(model)
    fast.load_state_dict({name: tensor * 3 for name, tensor in model.state_dict().items()}, assign=assign)
    assert_same(fast, model)


def test_a_model_may_be_swapped_that_another_thread_has_called() -> None:
    model = Net().eval()
    fast = called(model)
    thread = threading.Thread(target=assert_same, args=(fast, model))
    thread.start()
    thread.join()
    torch.utils.swap_tensors(model.left.weight, nn.Parameter(torch.zeros(4, 4)))
    assert_same(fast, model)


class Asking(nn.Module):
    """Computes another thing where the answer is yes."""

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


@pytest.mark.parametrize("question", QUESTIONS)
def test_what_a_model_learns_about_autograd_is_as_of_the_call(question: str) -> None:
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


ATTRIBUTES: dict[str, Callable[[Tensor, Tensor], bool]] = {
    "of a weight": lambda x, weight: getattr(weight, "doubled", False),
    "whether a weight has it": lambda x, weight: hasattr(weight, "doubled"),
    "of an input": lambda x, weight: getattr(x, "doubled", False),
    "caught": lambda x, weight: is_doubled(x),
    "of a view's base": lambda x, weight: x._base is None,
    "the seed": lambda x, weight: torch.initial_seed() % 2 == 0,
}


def is_doubled(x: Tensor) -> bool:
    try:
        return bool(x.doubled)  # type: ignore[attr-defined]
    except AttributeError:
        return False


@pytest.mark.parametrize("grad_mode", [torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("question", ATTRIBUTES)
def test_what_a_user_has_put_on_tensors_is_as_of_the_call(question: str, grad_mode: Callable[[], Any]) -> None:
    """Those of a trace are others, and have no such attribute."""
    model, x = Asking(ATTRIBUTES[question]).eval(), X.clone()
    model.layer.weight.doubled = x.doubled = True  # type: ignore[attr-defined]
    fast = optimize(model, policy="sequential")
    answers = set()
    with grad_mode():
        for doubled in (True, False, True):
            if doubled:
                model.layer.weight.doubled = x.doubled = True  # type: ignore[attr-defined]
            else:
                del model.layer.weight.doubled, x.doubled  # type: ignore[attr-defined]
            for seed in (2, 3):
                torch.manual_seed(seed)
                for given in (x, x[:]):
                    assert torch.equal(fast(given), model(given))
                    answers.add(bool(model.ask(given, model.layer.weight)))
    assert answers == {True, False}


def test_attributes_that_nobody_asks_for_change_nothing() -> None:
    model = Net().eval()
    model.left.weight.name_of_mine = "left"  # type: ignore[attr-defined]
    fast = called(model)
    assert [report.mode for report in fast.reports] != ["plain"] or not fast.reports[0].refusals


def test_who_does_not_ask_keeps_the_schedule_whatever_requires_gradients() -> None:
    model = Net().eval()
    fast = called(model)
    entries = fast.reports
    model.requires_grad_(False)
    assert_same(fast, model)
    with torch.inference_mode():
        assert torch.equal(fast(X), model(X))
    assert fast.reports == entries
