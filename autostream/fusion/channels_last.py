"""Training steps whose convolutions read and write channels-last tensors, forward and backward alike.

    as traced       x ──▶ conv ──▶ …        … ──▶ gradient of conv        all contiguous
    laid out        x ──▶ clone ──▶ conv ──▶ …  … ──▶ gradient of conv    all channels-last, by way of what lies between

Kernels of convolutions are fastest in that layout, so Inductor asks for it wherever it lowers a convolution. But what
a gradient of one reads it lays out as in the trace. For ``torch.compile`` that is the same, because it traces backwards
with what forwards return. In a graph of both, each tensor that a gradient shares with its convolution would be copied.

So such a graph is traced again, with inputs of convolutions and their gradients laid out. Only ops that are known to
care for values alone see tensors that lie otherwise than in the trace; for others they are copied back, and where that
could be seen, it is given up.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from autostream.frontend.aten import tensors_in
from autostream.utils.operators import base_name, bound_arguments, draws, written_arguments
from autostream.utils.storages import layout_of, storage_of

aten = torch.ops.aten

Decomposition = Callable[..., Any]


class StridesSeen(Exception):  # noqa: N818 - a notice between modules, not an error
    """What a graph computes would show how its tensors lie; the message says where."""


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
    """Whether all convolutions over two dimensions of a graph read channels-last tensors."""
    convolutions = graph.find_nodes(op="call_function", target=aten.convolution.default)
    read = (node.args[0].meta["val"] for node in convolutions)
    return all(_is_laid_out(value) for value in read if value.dim() == 4)


class Relaid(fx.Interpreter):
    """Runs a graph whose tensors may lie otherwise than they did in its trace; its outputs lie as they did.

    Args:
        module: of ATen ops; nodes have their values of the trace in ``meta["val"]``.

    Raises:
        StridesSeen: when it is run: what is moved back would have to be the same memory.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self._shared = _shared_by_outputs(module)
        self._written = {storage_of(tensor) for node in module.graph.nodes for tensor in _written(node)}

    def run_node(self, n: fx.Node) -> Any:
        """What a node computes."""
        if _cares_for_values_alone(n) or not any(map(self._has_moved, n.all_input_nodes)):
            return super().run_node(n)
        if n.target in _VIEWS and not _any_in(self._written, n.all_input_nodes):
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            return aten.reshape.default(*args, **kwargs)  # a view where it can be one
        taken = self._shared if n.op == "output" else self._written if _may_alias(n) else frozenset()

        def back(source: fx.Node) -> Any:
            if not self._has_moved(source):
                return self.env[source]
            if _any_in(taken, [source]):
                raise StridesSeen(f"{n.name} needs {source.name} as it was traced, and others need that memory")
            return pytree.tree_map(_laid_out_as, self.env[source], source.meta["val"])

        args, kwargs = fx.map_arg((n.args, n.kwargs), back)
        return getattr(self, n.op)(n.target, args, kwargs)

    def _has_moved(self, source: fx.Node) -> bool:
        """Whether a node's tensors lie otherwise than in the trace."""
        before, now = tensors_in(source.meta["val"]), tensors_in(self.env[source])
        return list(map(layout_of, before)) != list(map(layout_of, now))


_VIEWS = (aten.view.default, aten._unsafe_view.default)

_FOR_VALUES = {
    *("convolution", "convolution_backward", "cat", "constant_pad_nd", "clone", "copy_", "_to_copy", "detach", "alias"),
    *("permute", "transpose", "t", "expand", "squeeze", "unsqueeze", "slice", "select", "split", "split_with_sizes"),
    *("mm", "addmm", "bmm", "native_layer_norm", "native_layer_norm_backward"),
    *("native_group_norm", "native_group_norm_backward"),
    *("hardtanh_backward", "hardsigmoid_backward", "hardswish_backward", "elu_backward", "leaky_relu_backward"),
    *("softplus_backward", "mish_backward", "hardshrink_backward", "softshrink_backward", "log_sigmoid_backward"),
    *("hardswish", "hardswish_", "threshold_", "masked_fill", "zero_", "fill_", "where"),
    *("mean", "sum", "amax", "amin", "max", "min", "var", "var_mean", "linalg_vector_norm"),
    *("empty_like", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"),
    *("avg_pool2d", "avg_pool2d_backward", "_adaptive_avg_pool2d", "_adaptive_avg_pool2d_backward"),
    *("max_pool2d_with_indices", "max_pool2d_with_indices_backward"),
    *("native_batch_norm", "native_batch_norm_backward", "cudnn_batch_norm", "cudnn_batch_norm_backward"),
    *("_native_batch_norm_legit", "_native_batch_norm_legit_functional", "_native_batch_norm_legit_no_training"),
    *("_batch_norm_with_update", "_batch_norm_with_update_functional", "batch_norm_backward"),
}
"""ATen ops that compute the same wherever elements lie, and as fast; beside those that are tagged ``pointwise``, which
not all are that compute element by element."""


def _cares_for_values_alone(node: fx.Node) -> bool:
    if node.op != "call_function" or node.target is operator.getitem:
        return node.op != "output"
    target = node.target
    if not isinstance(target, OpOverload) or draws(target, bound_arguments(node, target)):  # in the order of memory
        return False
    known = target.namespace == "aten" and base_name(target) in _FOR_VALUES
    return known or torch.Tag.pointwise in target.tags or base_name(target).startswith("_foreach_")


def _may_alias(node: fx.Node) -> bool:
    """Whether a call may write to its arguments or look at them later."""
    target = node.target
    return not isinstance(target, OpOverload) or any(given.alias_info is not None for given in target._schema.arguments)


def _any_in(storages: Container[int], nodes: Iterable[fx.Node]) -> bool:
    return any(storage_of(tensor) in storages for node in nodes for tensor in tensors_in(node.meta["val"]))


def _laid_out_as(value: Any, traced: Any) -> Any:
    if not isinstance(value, Tensor) or layout_of(value) == layout_of(traced):
        return value
    return torch.empty_strided(traced.shape, traced.stride(), dtype=value.dtype, device=value.device).copy_(value)


def _shared_by_outputs(module: fx.GraphModule) -> frozenset[int]:
    """Storages that several outputs, or an argument and an output, lie in."""
    nodes = [*module.graph.find_nodes(op="placeholder"), *module.graph.output_node().all_input_nodes]
    count = Counter(storage_of(tensor) for node in nodes for tensor in tensors_in(node.meta["val"]))
    return frozenset(storage for storage, times in count.items() if times > 1)


def _written(node: fx.Node) -> list[Tensor]:
    sources = written_arguments(node, node.target) if isinstance(node.target, OpOverload) else ()
    return [tensor for source in sources for tensor in tensors_in(source.meta["val"])]
