"""Training steps whose convolutions read and write channels-last tensors, forward and backward alike.

    as traced       x ──▶ conv ──▶ …        … ──▶ gradient of conv        all contiguous
    laid out        x ──▶ clone ──▶ conv ──▶ …  … ──▶ gradient of conv    all channels-last, by way of what lies between

Kernels of convolutions are fastest in that layout, so Inductor asks for it wherever it lowers a convolution. But what
a gradient of one reads it lays out as in the trace. For ``torch.compile`` that is the same, because it traces backwards
with what forwards return. In a graph of both, each tensor that a gradient shares with its convolution would be copied.

So such a graph is traced again, with inputs of convolutions and their gradients laid out. Values do not depend on that;
where strides could be seen, it is given up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from autostream.operators import base_name, bound_arguments, draws, written_names
from autostream.storages import layout_of, storage_of
from autostream.tracing.flat import tensors_in

aten = torch.ops.aten

Decomposition = Callable[..., Any]


class StridesSeen(Exception):  # noqa: N818 - a notice between modules, not an error
    """What a graph computes depends on how its tensors lie; the message says which op does."""


def in_channels_last(table: Mapping[Any, Decomposition]) -> dict[Any, Decomposition]:
    """A table of decompositions that lays out what convolutions over two dimensions and their gradients read.

    Args:
        table: decompositions by ATen op; what is laid out already goes by it.

    Example:
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> def twice(x, weight):
        ...     return torch.conv2d(torch.conv2d(x, weight), weight)
        >>> graph = make_fx(twice, in_channels_last({}))(torch.ones(1, 2, 3, 3), torch.ones(2, 2, 2, 2)).graph
        >>> [node.name for node in graph.nodes if node.op == "call_function"]
        ['clone', 'clone_1', 'convolution', 'convolution_1']
    """
    known: dict[int, tuple[Tensor, Tensor]] = {}  # with what they were made of, so that its number is nobody else's

    def laid_out(tensor: Tensor) -> Tensor:
        """The same for the same: a convolution shares its input and its weight with its gradients."""
        if id(tensor) not in known:
            known[id(tensor)] = tensor, tensor.contiguous(memory_format=torch.channels_last)
        return known[id(tensor)][1]

    def decomposition(target: OpOverload, reads: int) -> Decomposition:
        def computed(*args: Any) -> Any:
            read, rest = args[:reads], args[reads:]
            if read[0].dim() == 4 and not all(map(_is_laid_out, read)):
                return target(*map(laid_out, read), *rest)
            return table[target](*args) if target in table else NotImplemented

        return computed

    reads = {aten.convolution.default: 2, aten.convolution_backward.default: 3}
    return {**table, **{target: decomposition(target, count) for target, count in reads.items()}}


def _is_laid_out(tensor: Tensor) -> bool:
    return tensor.is_contiguous(memory_format=torch.channels_last)


def trains_convolutions(graph: fx.Graph) -> bool:
    """Whether a graph has both convolutions and gradients of some."""
    return all(
        graph.find_nodes(op="call_function", target=target)
        for target in (aten.convolution.default, aten.convolution_backward.default)
    )


def is_channels_last(graph: fx.Graph) -> bool:
    """Whether all convolutions of a graph read channels-last tensors."""
    convolutions = graph.find_nodes(op="call_function", target=aten.convolution.default)
    read = (node.args[0].meta["val"] for node in convolutions)
    return all(value.dim() == 4 and _is_laid_out(value) for value in read)


class Relaid(fx.Interpreter):
    """Runs a graph whose tensors may lie otherwise than they did in its trace.

    Args:
        module: of ATen ops; nodes have their values of the trace in ``meta["val"]``.

    Raises:
        StridesSeen: when it is run: an op looks at strides, or draws numbers in the order in which they lie, or what
            was a view would be a copy that somebody writes to, or an output would lie otherwise.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self._written = {storage_of(tensor) for node in module.graph.nodes for tensor in _written(node)}

    def run_node(self, n: fx.Node) -> Any:
        """What a node computes."""
        moved = next((source for source in n.all_input_nodes if self._moved(source)), None)
        if moved is None or not (n.op == "output" or n.target in _VIEWS or _sees_strides(n)):
            return super().run_node(n)
        if n.target not in _VIEWS:
            raise StridesSeen(f"{n.name} sees how {moved.name} lies")
        if storage_of(moved.meta["val"]) in self._written:
            raise StridesSeen(f"{n.name} may be a copy of {moved.name}, and somebody writes to one of them")
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        return aten.reshape.default(*args, **kwargs)

    def _moved(self, source: fx.Node) -> bool:
        """Whether a node's tensors lie otherwise than in the trace."""
        before, now = tensors_in(source.meta["val"]), tensors_in(self.env[source])
        return list(map(layout_of, before)) != list(map(layout_of, now))


_VIEWS = (aten.view.default, aten._unsafe_view.default)

_STRIDED = {
    *("as_strided", "as_strided_", "as_strided_copy", "as_strided_scatter", "_reshape_alias"),
    *("resize_", "resize_as_", "set_", "stride", "sym_stride"),
}
"""ATen ops that look at strides or at storages."""


def _sees_strides(node: fx.Node) -> bool:
    if node.op != "call_function" or getattr(node.target, "__module__", None) == "_operator":
        return False
    if not isinstance(node.target, OpOverload) or node.target.namespace not in ("aten", "prims"):
        return True
    return base_name(node.target) in _STRIDED or draws(node.target, bound_arguments(node, node.target))


def _written(node: fx.Node) -> list[Tensor]:
    if not isinstance(node.target, OpOverload):
        return []
    bound = bound_arguments(node, node.target)
    written = fx.map_arg([bound[name] for name in written_names(node.target)], lambda source: source.meta["val"])
    return [tensor for value in written for tensor in tensors_in(value)]
