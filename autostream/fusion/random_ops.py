"""Random numbers in fused kernels: the ops that draw them are the model's, in the model's order.

    model    randn ── rand ──▶ …                     Inductor    rand ── … ── randn: whatever needs it comes first
    in order                                                     randn ── rand ── …: moved back, it needs nothing

TorchInductor sorts ops by what they need, and most random ops need nothing. Some it takes apart, into ops that draw
other numbers. What depends on random numbers would differ from the model with the same seed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from autostream.errors import FusionError
from autostream.utils import operators

aten = torch.ops.aten

_OF_OTHERS = frozenset({aten.bernoulli, aten.rrelu_with_noise_functional})
_LIKE_OTHERS = frozenset({aten.rand_like, aten.randn_like, aten.randint_like})


def draws(node: fx.Node) -> bool:
    """Whether a node draws random numbers.

    Example:
        >>> graph = fx.Graph()
        >>> draws(graph.call_function(aten.rand.default, ([2],)))
        True
        >>> draws(graph.call_function(aten.native_dropout.default, (graph.placeholder("x"), 0.5, False)))
        False
    """
    target = node.target
    return isinstance(target, OpOverload) and operators.draws(target, operators.bound_arguments(node, target))


def drawing_as_eager(table: Mapping[Any, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """A table of decompositions that refuses where a decomposition draws other random numbers than the op itself.

    Numbers that are drawn like a tensor fill memory in order: another layout gives them to other elements.

    Raises:
        FusionError: not here, but where an op is to be taken apart that cannot be.

    Example:
        >>> drawing_as_eager({aten.bernoulli.default: lambda p: torch.rand_like(p) < p})[aten.bernoulli.default]("p")
        Traceback (most recent call last):
            ...
        autostream.errors.FusionError: TorchInductor would draw other random numbers for aten.bernoulli.default
    """

    def guarded(op: Any, decomposition: Callable[..., Any]) -> Callable[..., Any]:
        def apart(like: Any, *args: Any, **kwargs: Any) -> Any:
            if op.overloadpacket in _OF_OTHERS or not like.is_contiguous():
                raise FusionError(f"TorchInductor would draw other random numbers for {op}")
            return decomposition(like, *args, **kwargs)

        return apart

    drawing = _OF_OTHERS | _LIKE_OTHERS
    return {
        op: guarded(op, how) if getattr(op, "overloadpacket", None) in drawing else how for op, how in table.items()
    }


@dataclass(frozen=True, slots=True)
class Draw:
    """One op of a graph that draws random numbers.

    Attributes:
        name: of its node.
        target: the operator.
        layout: of its results: data type, sizes and strides of each.
    """

    name: str
    target: object
    layout: tuple[object, ...]

    @staticmethod
    def of(node: fx.Node, name: str = "") -> Draw:
        """What a node with a value draws; ``name``, if it is the copy of one of that name."""
        value = node.meta["val"]
        results = value if isinstance(value, (list, tuple)) else [value]
        tensors = [result for result in results if isinstance(result, torch.Tensor)]
        layout = tuple((tensor.dtype, tensor.shape, tensor.stride()) for tensor in tensors)
        return Draw(name or node.name, node.target, layout)


def draws_of(graph: fx.Graph) -> list[Draw]:
    """What a graph draws, in order."""
    return [Draw.of(node) for node in graph.nodes if draws(node)]


def draw_in_order(graph: fx.Graph, expected: Sequence[Draw]) -> None:
    """Put the ops of a fused graph that draw random numbers into the order that they had before.

    Args:
        graph: fused; ``meta["origins"]`` of a node has the names of those that it was made of.
        expected: what was drawn before.

    Raises:
        FusionError: others would be drawn.
    """
    names = {draw.name: at for at, draw in enumerate(expected)}
    drawing = [node for node in graph.nodes if draws(node)]
    origins = [[names[name] for name in node.meta.get("origins", ()) if name in names] for node in drawing]
    order = sorted(zip(origins, drawing, strict=True), key=lambda pair: pair[0])
    found = [Draw.of(node, expected[at[0]].name) for at, node in order if len(at) == 1]
    if found != list(expected):
        raise FusionError("TorchInductor would draw other random numbers than the model does")
    places = {node: at for at, node in enumerate(graph.nodes)}
    later: fx.Node | None = None
    for _, node in reversed(order):
        if later is not None and places[node] > places[later]:
            if node.all_input_nodes:
                raise FusionError("TorchInductor would draw random numbers in another order than the model does")
            later.prepend(node)
            places[node] = places[later]
        later = node
