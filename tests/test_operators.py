"""What schemas and tags say of calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from autostream.operators import bound_arguments, draws, written_names

aten = torch.ops.aten


def test_arguments_by_position_by_name_and_by_default() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    call = graph.call_function(aten.add.Tensor, (x,), {"other": x})
    assert bound_arguments(call, aten.add.Tensor) == {"self": x, "other": x, "alpha": 1}


@pytest.mark.parametrize(
    ("target", "written"),
    [
        (aten.add.Tensor, ()),
        (aten.add_.Tensor, ("self",)),
        (aten.sort.values, ("values", "indices")),
        (aten.view.default, ()),
    ],
)
def test_what_is_written(target: Any, written: tuple[str, ...]) -> None:
    assert written_names(target) == written


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
def test_who_draws(target: Any, arguments: dict[str, Any], expected: bool) -> None:
    assert draws(target, arguments) == expected
