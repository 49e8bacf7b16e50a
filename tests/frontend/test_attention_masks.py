"""Attention under a mask of constants: the same values, by the kernel that eager code gets without the mask."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autostream


class Masked(nn.Module):
    def __init__(self, mask: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, self.mask(x))


def causal(x: Tensor) -> Tensor:
    at = torch.arange(x.shape[-2], device=x.device)
    return at[:, None] >= at


def everything(x: Tensor) -> Tensor:
    return torch.ones(x.shape[-2], dtype=torch.bool, device=x.device).expand(len(x), 1, x.shape[-2], -1)


def banded(x: Tensor) -> Tensor:
    at = torch.arange(x.shape[-2], device=x.device)
    return (at[:, None] >= at) & (at[:, None] - at < 3)


def after(x: Tensor) -> Tensor:
    at = torch.arange(x.shape[-2], device=x.device)
    return at[:, None] <= at


def of_the_input(x: Tensor) -> Tensor:
    return causal(x) & (x.sum() < 1e9)


def random(x: Tensor) -> Tensor:
    return torch.rand(x.shape[-2], x.shape[-2]) >= 0.0


def added(x: Tensor) -> Tensor:
    return torch.zeros(x.shape[-2], x.shape[-2]).masked_fill(causal(x).logical_not(), float("-inf"))


@pytest.mark.parametrize("mask", [causal, everything, banded, after, of_the_input, random, added])
def test_a_mask_that_attention_does_without_is_not_computed(mask: Callable[[Tensor], Tensor]) -> None:
    model, x = Masked(mask), torch.randn(2, 4, 8, 16)
    fast = autostream.optimize(model, x, kernels="eager")
    torch.testing.assert_close(fast(x), model(x))
    ops = [str(op.target) for op in fast.reports[0].graph.ops.values()]
    without = ["aten.scaled_dot_product_attention.default"]
    assert ops == without if mask in (causal, everything) else len(ops) > 2


def test_a_mask_of_fewer_queries_than_keys_is_not_causal() -> None:
    """``is_causal`` of two queries and four keys lets the first query see one key; this mask lets it see three."""

    def model(query: Tensor, key: Tensor) -> Tensor:
        mask = torch.ones(2, 4, dtype=torch.bool).tril(2)
        return F.scaled_dot_product_attention(query, key, key, attn_mask=mask)

    query, key = torch.randn(1, 1, 2, 8), torch.randn(1, 1, 4, 8)
    torch.testing.assert_close(autostream.optimize(model)(query, key), model(query, key))


def test_a_mask_that_the_model_returns_is_still_computed() -> None:
    def model(x: Tensor) -> tuple[Tensor, Tensor]:
        mask = causal(x)
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask), mask

    x = torch.randn(1, 2, 8, 16)
    attended, mask = autostream.optimize(model)(x)
    torch.testing.assert_close(attended, model(x)[0])
    assert mask.equal(causal(x))


def test_a_training_step_and_a_graph_behind_a_break_do_without_it_too() -> None:
    class Net(Masked):
        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            torch._dynamo.graph_break()
            return super().forward(y)

    def loss(model: Any, x: Tensor) -> Tensor:
        return model(model.linear(x)).square().mean()  # type: ignore[no-any-return]

    x, model = torch.randn(2, 4, 8, 16), Masked(causal)
    model.linear = nn.Linear(16, 16)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    step = autostream.train_step(model, sgd, loss, kernels="eager", policy="critical_path")
    for _ in range(3):
        step(x)
    assert "aten.ge.Tensor" not in Counter(str(op.target) for op in step.reports[-1].graph.ops.values())

    split = Net(causal)
    split.linear = model.linear
    fast = autostream.optimize(split)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), split(x))
    parts = [part for report in fast.reports for part in (report.parts or (report,))]
    targets = Counter(str(op.target) for part in parts if part.graph for op in part.graph.ops.values())
    assert targets["aten.scaled_dot_product_attention.default"] == 1
    assert "aten.ge.Tensor" not in targets
