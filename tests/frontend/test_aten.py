"""Captured graphs as programs of ATen ops, and the fake tensors that they are traced with."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import autostream
from autostream.frontend.aten import drop_weak_references, program_of
from autostream.frontend.capture import capture
from autostream.ir import Program, Role

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def program(function: Callable[..., Any], *args: Tensor, **options: Any) -> tuple[Program, dict[str, Tensor]]:
    """The program of a captured call; inputs that are not arguments are buffers."""
    captured = capture(function, args, {})
    assert captured is not None
    inputs = [
        (Role.INPUT if item.is_argument else Role.BUFFER, str(at), tensor)
        for at, (item, tensor) in enumerate(zip(captured.inputs, captured.tensors, strict=True))
    ]
    return program_of(captured.module, inputs, **options)


def targets(made: Program) -> list[str]:
    nodes = (node for node in made.module.graph.nodes if node.op == "call_function")
    return [str(node.target).removeprefix("aten.") for node in nodes]


@torch.no_grad()
def test_in_place_ops_stay_in_place_and_composite_ops_whole() -> None:
    """Weights come before inputs, dropouts that do nothing are removed, and nodes keep the user's lines."""
    cache, position = torch.zeros(8, 4), torch.zeros(1, dtype=torch.long)
    layer = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).eval()

    def step(x: Tensor) -> Tensor:
        cache.index_copy_(0, position, layer(x))
        position.add_(1)
        return cache.sum()

    made, _ = program(step, torch.ones(1, 4))
    assert targets(made) == ["linear.default", "index_copy_.default", "add_.Tensor", "sum.default"]
    assert [p.role for p in made.placeholders] == [*[Role.BUFFER] * 4, Role.INPUT]
    (linear,) = made.module.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
    assert "cache.index_copy_(0, position, layer(x))" in linear.meta["stack_trace"]


# Fake tensors


def test_traced_tensors_may_be_swapped_once_weak_references_are_dropped() -> None:
    mode, parameter = FakeTensorMode(), nn.Parameter(torch.zeros(2))
    mode.from_tensor(parameter)
    with pytest.raises(RuntimeError, match="weakref"):
        torch.utils.swap_tensors(parameter, nn.Parameter(torch.ones(2)))
    drop_weak_references(mode)
    torch.utils.swap_tensors(parameter, nn.Parameter(torch.ones(2)))
    assert parameter.tolist() == [1, 1]
    assert mode.from_tensor(parameter).shape == (2,), "the mode may still be used"
    drop_weak_references(None)


@pytest.mark.parametrize("drop", [F.dropout, F.dropout2d, F.alpha_dropout, F.feature_alpha_dropout])
@pytest.mark.parametrize("how", [{"training": False}, {"p": 0.0}])
def test_what_a_dropout_returns_that_drops_nothing_is_its_argument(drop: Any, how: dict[str, Any]) -> None:
    """Sin ──▶ dropout ──┬──▶ add_ ──▶ cos of a row: the row is read after the write, on whichever stream."""

    class Rows(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            rows = drop(x.sin(), **how)
            row = rows.split(1)[0]
            rows.add_(y)
            return row.cos()

    x, y = torch.randn(4, 3, 2, 2), torch.randn(4, 3, 2, 2)
    optimized = autostream.optimize(Rows(), policy="critical_path")
    with torch.no_grad():
        torch.testing.assert_close(optimized(x, y), Rows()(x, y))
    (report,) = optimized.reports
    assert report.graph is not None
    names = {op.target: name for name, op in report.graph.ops.items()}
    edges = {(each.before, each.after) for each in report.graph.dependencies}
    assert (names["aten.add_.Tensor"], names["aten.cos.default"]) in edges


class Turned(nn.Module):
    """Adds to a buffer and turns it, or a value of its own; with a tuple of both."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.own, self.state = own, nn.Buffer(torch.arange(6.0).view(2, 3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        turned = self.state.sin() if self.own else self.state.add_(1)
        return turned.t_(), x + self.state.mean()


@pytest.mark.parametrize("own", [False, True], ids=["a buffer", "a value of its own"])
def test_what_gives_a_tensor_of_the_model_another_shape_runs_as_it_is(own: bool) -> None:
    ours, theirs = Turned(own), Turned(own)
    fast = autostream.optimize(ours, policy="sequential")
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(fast(torch.ones(2)), theirs(torch.ones(2)))
            assert ours.state.stride() == theirs.state.stride()
    reasons = {refusal.reason for report in fast.reports for refusal in report.refusals}
    if own:
        assert not reasons
    else:
        (reason,) = reasons
        assert re.match(r"t_ changes the shape of .* a tensor of the model, .*: use t \(.*test_aten.py:\d+", reason)
