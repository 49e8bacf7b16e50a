"""A model that branches on data between its layers, and its gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

DYNAMO_WARNS = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
"""Dynamo reads the gradient of every tensor that it traces with."""


class Branching(nn.Module):
    """A branch on data between layers, one of which is used before and after it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.other = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).tanh()
        y = self.second(y).sin() if y.sum() > 0 else self.other(y).cos()
        return self.second(y) * self.first(x)


def trained(model: nn.Module, run: Callable[[Tensor], Tensor], **backward: Any) -> list[Tensor | None]:
    """Gradients after steps on both branches, each of two calls before their backward."""
    gradients: list[Tensor | None] = []
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    for seed in range(6):
        model.zero_grad()
        losses = [run(x + seed - 3 + turn).square().sum() for turn in range(2)]
        (losses[0] + losses[1]).backward(**backward)
        gradients += [None if p.grad is None else p.grad.detach().clone() for p in model.parameters()]
    return gradients


def same_gradients(ours: list[Tensor | None], theirs: list[Tensor | None]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        zero = one if other is None else other if one is None else None
        if zero is None:
            torch.testing.assert_close(one, other)
        else:
            assert not zero.any()
