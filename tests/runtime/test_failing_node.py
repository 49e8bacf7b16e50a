"""Errors of lowered graphs name the statement that failed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx

from autostream.runtime.failing_node import where


def product(x: Tensor) -> Tensor:
    y = x.relu()
    z = y @ y
    return z + 1


def fails(x: Tensor) -> Tensor:
    raise ZeroDivisionError


def calling(function: Callable[[Tensor], Tensor]) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(graph.call_function(function, (graph.placeholder("x"),)))
    return fx.GraphModule(torch.nn.Module(), graph)


INNER = fx.symbolic_trace(product)


@pytest.mark.parametrize(
    ("run", "statement"),
    [
        (INNER.forward, " at matmul = relu @ relu"),
        (calling(lambda x: INNER.forward(x)).forward, " at matmul = relu @ relu"),
        (calling(fails).forward, " at fails = "),
        (product, ""),
    ],
    ids=["a graph", "the inner one of two", "an op in Python", "no graph"],
)
def test_the_failing_statement_of_the_innermost_graph_is_named(run: Callable[[Tensor], object], statement: str) -> None:
    with pytest.raises((RuntimeError, ZeroDivisionError)) as caught:
        run(torch.ones(2, 3))
    assert where(caught.value).partition("test_failing_node")[0].startswith(statement)
    assert bool(where(caught.value)) == bool(statement)
    assert ";" not in where(caught.value), "fx appends statements that drop values"
