"""Blame: which statement of a generated forward raised."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx

from autostream.runtime.failing_node import where


def error_of(run: Callable[[], object]) -> BaseException:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - whatever it is, it is handed on
        run()
    return caught.value


def product(x: Tensor) -> Tensor:
    y = x.relu()
    z = y @ y
    return z + 1


def test_the_failing_statement_is_named_without_what_fx_appends_to_it() -> None:
    module = fx.symbolic_trace(product)
    error = error_of(lambda: module.forward(torch.ones(2, 3)))
    assert where(error) == " at matmul = relu @ relu"


def calling(function: Callable[[Tensor], Tensor]) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(graph.call_function(function, (graph.placeholder("x"),)))
    return fx.GraphModule(torch.nn.Module(), graph)


def test_of_nested_graphs_the_innermost_statement_is_named() -> None:
    inner = fx.symbolic_trace(product)

    def run_inner(x: Tensor) -> Tensor:
        return inner.forward(x)

    outer = calling(run_inner)
    error = error_of(lambda: outer.forward(torch.ones(2, 3)))
    assert where(error) == " at matmul = relu @ relu"


def test_an_error_from_elsewhere_blames_nobody() -> None:
    assert where(error_of(lambda: product(torch.ones(2, 3)))) == ""
    assert where(ValueError("never raised")) == ""


def test_an_error_of_an_op_that_python_implements_blames_the_statement_that_called_it() -> None:
    def fails(x: Tensor) -> Tensor:
        raise ZeroDivisionError

    error = error_of(lambda: calling(fails).forward(torch.ones(1)))
    assert where(error).startswith(" at fails = ")
