"""Operator schemas and tags."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from autostream.utils.operators import bound_arguments, draws, is_unknown, written_arguments

aten = torch.ops.aten


def test_arguments_are_bound_by_position_by_name_and_by_default() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    call = graph.call_function(aten.add.Tensor, (x,), {"other": x})
    assert bound_arguments(call, aten.add.Tensor) == {"self": x, "other": x, "alpha": 1}


def test_mutated_arguments_may_be_in_a_list_or_left_out() -> None:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    target: Any = SimpleNamespace(
        _schema=torch._C.parse_schema("ours::f(Tensor x, Tensor(a!)[] ys, Tensor(b!)? z) -> ()")
    )
    assert written_arguments(graph.call_function(print, (x, [x, y], None)), target) == [x, y]
    assert written_arguments(graph.call_function(print, (x, []), {"z": y}), target) == [y]


@pytest.mark.parametrize(
    ("ask", "unknown"),
    [
        (lambda x: x.sum().item(), True),
        (lambda x: x.long().sum().item(), True),
        (lambda x: x.sum().item() > 0, True),
        (lambda x: x.nonzero().shape[0], True),
        (lambda x: x.shape[0], False),
        (lambda x: x.numel() / 2, False),
        (lambda x: x.sum(), False),
    ],
)
def test_numbers_are_unknown_if_they_depend_on_data(ask: Any, unknown: bool) -> None:
    with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True):
        assert is_unknown(ask(torch.ones(3))) == unknown


@pytest.mark.parametrize(
    ("target", "arguments", "expected"),
    [
        (aten.rand.default, {"size": [2]}, True),
        (aten.sin.default, {}, False),
        (aten.native_dropout.default, {"p": 0.5, "train": True}, True),
        (aten.native_dropout.default, {"p": 0.0, "train": True}, True),
        (aten.native_dropout.default, {"p": 0.5, "train": False}, False),
        (aten.dropout.default, {"p": 0.0, "train": True}, False),
        (aten.bernoulli.p, {"p": 0.0}, True),
        (aten.rrelu_with_noise.default, {"training": False}, False),
        (aten.scaled_dot_product_attention.default, {"dropout_p": 0.0}, False),
        (aten.lstm.input, {"dropout": 0.0, "train": True}, False),
        (aten.lstm.input, {"dropout": 0.5, "train": True}, True),
    ],
)
def test_random_operators_and_dropouts_that_do_nothing(target: Any, arguments: dict[str, Any], expected: bool) -> None:
    assert draws(target, arguments) == expected
