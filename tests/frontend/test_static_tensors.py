"""Tensors that were marked by ``mark_static_address``: the model writes each as often as in eager mode.

With ``guard=True``, as ``torch.compile`` marks what optimizers hold, Dynamo puts the tensor into its graph.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autostream
from autostream.explaining import reports_of
from tests.semantics import same, t

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

TWO_STREAMS: dict[str, Any] = {"policy": "critical_path", "streams": 2}


class Counting(nn.Module):
    """Counts its calls in a tensor that is none of its buffers, and scales by it."""

    def __init__(self, *, guarded: bool, breaks: bool = False) -> None:
        super().__init__()
        self.linear, self.breaks = nn.Linear(4, 2), breaks
        self.count = [t(3).zero_()]
        torch._dynamo.mark_static_address(self.count[0], guard=guarded)

    def forward(self, x: Tensor) -> Tensor:
        count = self.count[0].add_(1)
        if self.breaks:
            torch._dynamo.graph_break()
        return self.linear(x) * count.sum()


def optimized(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return autostream.optimize(model, **TWO_STREAMS)


def backend(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return torch.compile(model, backend="autostream", options=TWO_STREAMS)  # type: ignore[no-any-return]


@pytest.mark.parametrize("recorded", [False, True], ids=["no gradients", "gradients"])
@pytest.mark.parametrize("breaks", [False, True], ids=["whole", "graph break"])
@pytest.mark.parametrize("guarded", [False, True], ids=["input", "attribute"])
@pytest.mark.parametrize("scheduled", [optimized, backend])
def test_a_marked_tensor_is_written_once_a_call(
    scheduled: Callable[[nn.Module], Callable[[Tensor], Tensor]], guarded: bool, breaks: bool, recorded: bool
) -> None:
    model, x = Counting(guarded=guarded, breaks=breaks), t(3, 4)
    eager = copy.deepcopy(model)
    fast = scheduled(model)
    with torch.set_grad_enabled(recorded):
        for calls in range(1, 4):
            value, expected = fast(x), eager(x)
            same(value, expected)
            assert model.count[0].tolist() == [calls] * 3
            if recorded:
                value.sum().backward()
                expected.sum().backward()
    if recorded:
        same(model.linear.weight.grad, eager.linear.weight.grad)


@pytest.mark.parametrize("guarded", [False, True], ids=["input", "attribute"])
def test_a_step_writes_a_marked_tensor_once(guarded: bool) -> None:
    model, x = Counting(guarded=guarded), t(3, 4)
    eager = copy.deepcopy(model)
    sgd, eager_sgd = (torch.optim.SGD(each.parameters(), lr=0.01) for each in (model, eager))
    step = autostream.train_step(model, sgd, lambda model, x: model(x).square().mean(), **TWO_STREAMS)
    for calls in range(1, 5):
        step(x)
        eager(x).square().mean().backward()
        eager_sgd.step()
        eager_sgd.zero_grad()
        assert model.count[0].tolist() == [calls] * 3
    torch.testing.assert_close(model.linear.weight, eager.linear.weight)
    assert "plain" not in {report.mode for report in reports_of(step)}


def test_a_compiled_optimizer_makes_one_update_a_step() -> None:
    """``torch.compile`` marks its parameters and states."""
    model, x = nn.Linear(4, 2), t(3, 4)
    eager = copy.deepcopy(model)
    adam, eager_adam = (torch.optim.Adam(each.parameters(), lr=torch.tensor(0.01)) for each in (model, eager))
    update = torch.compile(adam.step, backend="autostream", options=TWO_STREAMS)
    for _ in range(3):
        for each, run in ((model, update), (eager, eager_adam.step)):
            each.zero_grad()
            each(x).square().mean().backward()
            run()
        torch.testing.assert_close(model.weight, eager.weight)
    assert adam.state[model.weight]["step"] == 3


def test_a_marked_tensor_that_is_replaced_is_seen() -> None:
    model, x = Counting(guarded=True), t(3, 4)
    fast = autostream.optimize(model, **TWO_STREAMS)
    with torch.no_grad():
        fast(x)
        fast(x)
        model.count[0] = t(3).fill_(10.0)
        same(fast(x), model.linear(x) * 33.0)
        assert model.count[0].tolist() == [11.0] * 3
