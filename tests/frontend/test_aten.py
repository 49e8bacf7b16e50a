"""Graphs of torch ops as programs of ATen ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from autostream.errors import TraceError
from autostream.frontend.aten import program_of
from autostream.frontend.capture import capture
from autostream.ir import Program, Role

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def program(function: Callable[..., Any], *args: Tensor, **options: Any) -> tuple[Program, dict[str, Tensor]]:
    """What is made of a captured call; all that is no argument is a buffer."""
    captured = capture(function, args, {})
    assert captured is not None
    given = [
        (Role.INPUT if source.is_argument else Role.BUFFER, str(at), tensor)
        for at, (source, tensor) in enumerate(zip(captured.inputs, captured.tensors, strict=True))
    ]
    return program_of(captured.module, given, **options)


def targets(made: Program) -> list[str]:
    """The ops of a program, in order."""
    nodes = (node for node in made.module.graph.nodes if node.op == "call_function")
    return [str(node.target).removeprefix("aten.") for node in nodes]


@torch.no_grad()
def test_ops_in_place_stay_in_place_and_composed_ones_whole() -> None:
    cache, position = torch.zeros(8, 4), torch.zeros(1, dtype=torch.long)
    layer = nn.Linear(4, 4)

    def step(x: Tensor) -> Tensor:
        cache.index_copy_(0, position, layer(x))
        position.add_(1)
        return cache.sum()

    made, _ = program(step, torch.ones(1, 4))
    assert targets(made) == ["linear.default", "index_copy_.default", "add_.Tensor", "sum.default"]


@torch.no_grad()
def test_what_stays_in_place_comes_before_what_is_copied() -> None:
    layer = nn.Linear(4, 4)
    made, _ = program(lambda x, y: layer(x) + y, torch.ones(1, 4), torch.ones(4))
    assert [p.role for p in made.placeholders] == [Role.BUFFER, Role.BUFFER, Role.INPUT, Role.INPUT]


@torch.no_grad()
def test_constants_become_placeholders() -> None:
    made, constants = program(lambda x: x + torch.tensor([1.0, 2.0]), torch.ones(2))
    (constant,) = (p for p in made.placeholders if p.role is Role.CONSTANT)
    torch.testing.assert_close(constants[constant.target], torch.tensor([1.0, 2.0]))


@torch.no_grad()
def test_views_of_one_storage_have_one_owner() -> None:
    base = torch.ones(4)
    made, _ = program(lambda x, y: x + y, base[:2], base[2:])
    first, second = made.placeholders
    assert first.storage == second.storage == first.name


@torch.no_grad()
@pytest.mark.parametrize("inside", [False, True])
def test_casts_of_autocast_are_ops(inside: bool) -> None:
    """So that a program computes the same whatever is on when it runs."""
    layer = nn.Linear(4, 4)

    def cast(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            return layer(x)

    with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
        made, _ = program(cast if inside else layer, torch.ones(1, 4))
    found = targets(made)
    assert "_to_copy.default" in found
    assert not any("autocast" in target for target in found)


@torch.no_grad()
def test_dropouts_with_nothing_to_do_are_no_ops() -> None:
    made, _ = program(nn.Sequential(nn.Dropout(0.5), nn.ReLU()).eval(), torch.ones(2))
    assert targets(made) == ["relu.default"]


@torch.no_grad()
def test_nodes_keep_the_users_lines() -> None:
    made, _ = program(lambda x: x.sin(), torch.ones(2))
    (sin,) = made.module.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)
    assert "test_aten.py" in sin.meta["stack_trace"]


@torch.no_grad()
def test_a_program_may_be_told_to_run_elsewhere() -> None:
    made, _ = program(lambda x: x.sin(), torch.ones(2), device="cuda:0")
    assert made.device == "cuda:0"


@torch.no_grad()
@pytest.mark.parametrize("sizes", [(3,), (0,)])
def test_other_shapes_are_traced_anew(sizes: tuple[int, ...]) -> None:
    """As sections are, whose inputs may depend on data."""
    made, _ = program(lambda x: x * 2, torch.ones(5))
    again, _ = program_of(made.module, [(Role.INPUT, "0", torch.ones(sizes))])
    (value,) = (node.meta["val"] for node in again.module.graph.find_nodes(op="placeholder"))
    assert tuple(value.shape) == sizes


def test_a_graph_that_sets_a_default_is_refused() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(torch.set_default_dtype, (torch.float64,))
    graph.output((x,))
    with pytest.raises(TraceError, match="it sets default_dtype"):
        program_of(fx.GraphModule(nn.Module(), graph), [(Role.INPUT, "0", torch.ones(2))])
