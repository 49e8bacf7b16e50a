"""Captured graphs as programs of ATen ops, and the fake tensors that they are traced with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode

import autostream
from autostream.errors import TraceError
from autostream.frontend.aten import drop_weak_references, mode_of, program_of
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
    """The ops of a program, in order."""
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


@torch.no_grad()
def test_constants_become_placeholders_and_views_of_one_storage_have_one_owner() -> None:
    base = torch.ones(4)
    made, constants = program(lambda x, y: x + y + torch.tensor([1.0, 2.0]), base[:2], base[2:], device="cuda:0")
    constant, first, second = made.placeholders
    assert constant.role is Role.CONSTANT
    torch.testing.assert_close(constants[constant.target], torch.tensor([1.0, 2.0]))
    assert first.storage == second.storage == first.name
    assert made.device == "cuda:0"


@torch.no_grad()
@pytest.mark.parametrize("inside", [False, True])
def test_casts_of_autocast_are_ops(inside: bool) -> None:
    """A program computes the same whatever is on when it runs."""
    layer = nn.Linear(4, 4)

    def cast(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            return layer(x)

    with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
        made, _ = program(cast if inside else layer, torch.ones(1, 4))
    assert "_to_copy.default" in targets(made)
    assert not any("autocast" in target for target in targets(made))


@torch.no_grad()
def test_a_program_can_be_traced_at_other_shapes() -> None:
    """As sections are, whose inputs may depend on data."""
    made, _ = program(lambda x: x * 2, torch.ones(5))
    for size in (3, 0):
        again, _ = program_of(made.module, [(Role.INPUT, "0", torch.ones(size))])
        (value,) = (node.meta["val"] for node in again.module.graph.find_nodes(op="placeholder"))
        assert tuple(value.shape) == (size,)


def test_a_graph_that_sets_a_default_is_refused() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(torch.set_default_dtype, (torch.float64,))
    graph.output((x,))
    with pytest.raises(TraceError, match="it sets default_dtype"):
        program_of(fx.GraphModule(nn.Module(), graph), [(Role.INPUT, "0", torch.ones(2))])


# Fake tensors


def graph_of(*examples: object) -> fx.GraphModule:
    """A graph whose placeholders have these example values; ``None`` for none."""
    graph = fx.Graph()
    for at, example in enumerate(examples):
        node = graph.placeholder(f"x{at}")
        if example is not None:
            node.meta["example_value"] = example
    graph.output(())
    return fx.GraphModule(nn.Module(), graph)


def test_the_mode_of_a_graph_is_that_of_its_first_fake_input() -> None:
    mode = FakeTensorMode()
    fake = mode.from_tensor(torch.ones(2))
    assert mode_of(graph_of(None, 3, torch.ones(2), fake, FakeTensorMode().from_tensor(torch.ones(2)))) is mode
    assert mode_of(graph_of(None, 3, torch.ones(2))) is None
    graph = fx.symbolic_trace(lambda x: x.sin())
    (node,) = graph.graph.find_nodes(op="call_method", target="sin")
    node.meta["example_value"] = fake
    assert mode_of(graph) is None, "it is no input"


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
