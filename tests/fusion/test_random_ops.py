"""Random ops of fused graphs: those of the model in its order, else an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from autostream.errors import FusionError
from autostream.fusion.random_ops import random_decompositions, random_ops_of, restore_random_order

aten = torch.ops.aten
X = torch.ones(2, 3)


def graph_of(*calls: tuple[str, Any, tuple[Any, ...]], origins: bool = False) -> fx.Graph:
    """Calls by name; arguments that are strings are ``x`` or results of earlier calls."""
    graph = fx.Graph()
    nodes = {"x": graph.placeholder("x")}
    nodes["x"].meta["val"] = X
    for name, target, args in calls:
        args = tuple(nodes.get(a, a) if isinstance(a, str) else a for a in args)
        nodes[name] = graph.create_node("call_function", target, args, {}, name=f"buf_{name}" if origins else name)
        nodes[name].meta["val"] = target(*(a.meta["val"] if isinstance(a, fx.Node) else a for a in args))
        nodes[name].meta["origins"] = [name] if origins else []
    graph.output(tuple(nodes.values()))
    return graph


RAND = ("rand", aten.rand.default, ([2],))
RANDN = ("randn", aten.randn.default, ([2],))
SIN = ("sin", aten.sin.default, ("randn",))
DROPOUT = ("dropout", aten.native_dropout.default, ("sin", 0.5, True))


def test_ops_without_inputs_move_to_their_place_in_the_model() -> None:
    """The model runs rand ── randn ── sin ── dropout; Inductor started with the inputs of dropout."""
    expected = random_ops_of(graph_of(RAND, RANDN, SIN, DROPOUT))
    fused = graph_of(RANDN, SIN, DROPOUT, RAND, origins=True)
    restore_random_order(fused, expected)
    fused.lint()
    assert [node.name for node in fused.nodes][1:-1] == ["buf_rand", "buf_randn", "buf_sin", "buf_dropout"]


def test_an_op_with_inputs_cannot_move() -> None:
    expected = random_ops_of(graph_of(RANDN, SIN, DROPOUT, RAND))
    same = graph_of(RANDN, SIN, DROPOUT, RAND, origins=True)
    restore_random_order(same, expected)
    assert [node.name for node in same.nodes][-2] == "buf_rand"
    with pytest.raises(FusionError, match="in another order than the model does"):
        restore_random_order(graph_of(RAND, RANDN, SIN, DROPOUT, origins=True), expected)


@pytest.mark.parametrize(
    "calls",
    [
        (RAND,),
        (RAND, RANDN, RANDN),
        (RAND, ("randn", aten.rand.default, ([2],))),
        (RAND, ("randn", aten.randn.default, ([3],))),
        (RAND, ("other", aten.randn.default, ([2],))),
    ],
    ids=["one is missing", "one more", "another op", "another size", "of unknown origin"],
)
def test_other_random_ops_are_refused(calls: Any) -> None:
    with pytest.raises(FusionError, match="other random numbers"):
        restore_random_order(graph_of(*calls, origins=True), random_ops_of(graph_of(RAND, RANDN)))


def test_decompositions_that_would_change_random_numbers_are_refused() -> None:
    table = random_decompositions({aten.rand_like.default: lambda x: x * 2, aten.sin.default: torch.cos})
    assert torch.equal(table[aten.rand_like.default](X), X * 2)
    assert table[aten.sin.default] is torch.cos
    with pytest.raises(FusionError, match=r"other random numbers for aten\.rand_like\.default"):
        table[aten.rand_like.default](X.t())


@pytest.mark.parametrize(
    "like",
    [
        torch.ones(4, 6).chunk(2, -1)[0],
        torch.ones(4, 6).t(),
        torch.ones(4, 6).t()[:, ::2],
        torch.ones(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        torch.ones(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)[:, :, 1:],
        torch.ones(4, 1).expand(4, 3),
        torch.ones(3, 1).t().expand(4, 3),
        torch.ones(1, 5, 1).transpose(0, 2),
        torch.ones(0, 3).t(),
        torch.ones(()),
    ],
    ids=lambda like: f"{tuple(like.shape)} {like.stride()}",
)
def test_ops_like_a_tensor_are_fused_if_the_result_is_contiguous(like: torch.Tensor) -> None:
    """A slice is not contiguous, but ``randn_like`` of it is: elements are filled in the same order when fused."""
    decompose = random_decompositions({aten.randn_like.default: lambda like: "fused"})[aten.randn_like.default]
    if torch.randn_like(like).is_contiguous():
        assert decompose(like) == "fused"
    else:
        with pytest.raises(FusionError):
            decompose(like)
