"""Comparisons of a tensor with a parameter have the layout that Python's order of asking gives them."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autostream.tracing.export import trace
from autostream.frontend.tree import flatten
from tests.semantics import Model

X = torch.arange(12.0).view(3, 4).t()
WEIGHT = nn.Parameter(torch.full((4, 3), 5.0))

COMPARISONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "<": lambda x, y: x < y,
    "<=": lambda x, y: x <= y,
    ">": lambda x, y: x > y,
    ">=": lambda x, y: x >= y,
    "==": lambda x, y: x == y,
    "!=": lambda x, y: x != y,
    "method": lambda x, y: x.gt(y),
    "method eq": lambda x, y: x.eq(y),
    "function": lambda x, y: torch.gt(x, y),
    "a sum": operator.add,
}


@pytest.mark.parametrize("name", COMPARISONS)
@pytest.mark.parametrize("right", [True, False])
def test_a_trace_has_numbers_and_strides_of_eager_mode(name: str, right: bool) -> None:
    """Of ``x``, which is turned, and a weight, which is not, the one that is asked gives the result its strides."""

    def compared(model: Model, x: Tensor) -> Tensor:
        return COMPARISONS[name](*((x, model.weight) if right else (model.weight, x)))

    model = Model(compared, weight=WEIGHT)
    with torch.no_grad():
        expected = model(X)
        program = trace(model, *flatten(((X,), {}))).program
        (result,) = program.module(WEIGHT, X)
    assert torch.equal(result, expected)
    assert result.stride() == expected.stride()
    asked = right and name in ("<", "<=", ">", ">=", "==", "!=")
    assert expected.stride() == ((3, 1) if asked or not right else (1, 4))
