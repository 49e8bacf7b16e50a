"""Keeps the random ops of a fused graph the same as the model's and in the model's order.

    model       randn ── rand ──▶ …
    Inductor    rand ── … ── randn      sorted by dependencies; most random ops have none
    restored    randn ── rand ── …      moved back, which is possible because they have none

TorchInductor also decomposes some random ops into others that generate different numbers. With either change, results
would differ from those of the model with the same seed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autostream.errors import FusionError
from autostream.frontend.aten import is_random

aten = torch.ops.aten

_DECOMPOSED_DIFFERENTLY = frozenset({aten.bernoulli, aten.rrelu_with_noise_functional})
_LIKE_OPS = frozenset({aten.rand_like, aten.randn_like, aten.randint_like})


def random_decompositions(table: Mapping[Any, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """Make the decompositions of a table raise an error if they generate other random numbers than the op itself.

    The numbers of ops like ``rand_like`` fill memory in order, so in another layout they go to other elements.

    Raises:
        FusionError: by a returned decomposition, when it is called for such an op.

    Example:
        >>> table = random_decompositions({aten.bernoulli.default: lambda p: torch.rand_like(p) < p})
        >>> table[aten.bernoulli.default]("p")
        Traceback (most recent call last):
            ...
        autostream.errors.FusionError: TorchInductor would draw other random numbers for aten.bernoulli.default
    """

    def checked(op: Any, decomposition: Callable[..., Any]) -> Callable[..., Any]:
        def decompose(like: Any, *args: Any, **kwargs: Any) -> Any:
            if op.overloadpacket in _DECOMPOSED_DIFFERENTLY or _has_other_order(like):
                raise FusionError(f"TorchInductor would draw other random numbers for {op}")
            return decomposition(like, *args, **kwargs)

        return decompose

    random = _DECOMPOSED_DIFFERENTLY | _LIKE_OPS
    return {
        op: checked(op, decomposition) if getattr(op, "overloadpacket", None) in random else decomposition
        for op, decomposition in table.items()
    }


def _has_other_order(like: torch.Tensor) -> bool:
    """Whether a new tensor like this one is not contiguous: it keeps the order of dimensions, though no gaps."""
    strides = [stride for stride, size in zip(like.stride(), like.shape, strict=True) if stride and size > 1]
    return strides != sorted(strides, reverse=True)


@dataclass(frozen=True, slots=True)
class RandomOp:
    """A random op of a graph.

    Attributes:
        name: of its node.
        target: the operator.
        layout: dtype, sizes and strides of each result.
    """

    name: str
    target: object
    layout: tuple[object, ...]

    @staticmethod
    def of(node: fx.Node, name: str = "") -> RandomOp:
        """Describe a node that has a value; ``name`` replaces the node's own."""
        value = node.meta["val"]
        results = value if isinstance(value, (list, tuple)) else [value]
        tensors = [result for result in results if isinstance(result, torch.Tensor)]
        layout = tuple((tensor.dtype, tensor.shape, tensor.stride()) for tensor in tensors)
        return RandomOp(name or node.name, node.target, layout)


def random_ops_of(graph: fx.Graph) -> list[RandomOp]:
    """The random ops of a graph, in order."""
    return [RandomOp.of(node) for node in graph.nodes if is_random(node)]


def restore_random_order(graph: fx.Graph, expected: Sequence[RandomOp]) -> None:
    """Put the random ops of a fused graph into the order that they had before fusion.

    Args:
        graph: the fused graph; ``meta["origins"]`` of a node has the names of the nodes that it was made of.
        expected: the random ops before fusion.

    Raises:
        FusionError: the graph has other random ops, or they cannot be put in order.
    """
    positions = {op.name: at for at, op in enumerate(expected)}
    nodes = [node for node in graph.nodes if is_random(node)]
    origins = [[positions[name] for name in node.meta.get("origins", ()) if name in positions] for node in nodes]
    order = sorted(zip(origins, nodes, strict=True), key=lambda pair: pair[0])
    actual = [RandomOp.of(node, expected[at[0]].name) for at, node in order if len(at) == 1]
    if actual != list(expected):
        raise FusionError("TorchInductor would draw other random numbers than the model does")
    index = {node: at for at, node in enumerate(graph.nodes)}
    later: fx.Node | None = None
    for _, node in reversed(order):
        if later is not None and index[node] > index[later]:
            if node.all_input_nodes:
                raise FusionError("TorchInductor would draw random numbers in another order than the model does")
            later.prepend(node)
            index[node] = index[later]
        later = node
