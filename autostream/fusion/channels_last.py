"""Retraces a training step so that its convolutions and their gradients use channels-last tensors.

    as traced       x ──▶ conv ──▶ …            … ──▶ convolution_backward    all contiguous
    retraced        x ──▶ clone ──▶ conv ──▶ …  … ──▶ convolution_backward    all channels-last, and the ops between

Convolution kernels are fastest in that layout, so Inductor requires it wherever it lowers a convolution. The inputs of
``convolution_backward``, however, it lays out as in the trace. ``torch.compile`` traces the backward separately, with
tensors as the compiled forward returns them, so there the two agree. In one graph of both, each tensor that a
convolution shares with its gradient would be copied.

So the graph is traced again, with the inputs of convolutions and of their gradients in channels-last layout. Only ops
that are known to depend on values alone get tensors of another layout than in the trace. For other ops, tensors are
copied back to the traced layout. If such a copy would be visible (aliases, mutation), retracing is given up.
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


class LayoutVisibleError(Exception):
    """The results of a graph would depend on the layout of its tensors; the message says where."""


def channels_last_decompositions(table: Mapping[Any, Decomposition]) -> dict[Any, Decomposition]:
    """Add decompositions that convert the inputs of 2d convolutions and their gradients to channels-last.

    Args:
        table: decompositions by ATen op; they apply to convolutions whose inputs are channels-last already.

    Example:
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> def twice(x, weight):
        ...     return torch.conv2d(torch.conv2d(x, weight), weight)
        >>> table = channels_last_decompositions({})
        >>> graph = make_fx(twice, table)(torch.ones(1, 2, 3, 3), torch.ones(2, 2, 2, 2)).graph
        >>> [node.name for node in graph.nodes if node.op == "call_function"]
        ['clone', 'clone_1', 'convolution', 'convolution_1']
    """
    converted: dict[int, tuple[Tensor, Tensor]] = {}  # by id; the original is held so that its id is not reused

    def convert(tensor: Tensor) -> Tensor:
        """Convert each tensor once: a convolution shares its input and its weight with its gradients."""
        if id(tensor) not in converted:
            converted[id(tensor)] = tensor, tensor.contiguous(memory_format=torch.channels_last)
        return converted[id(tensor)][1]

    def decomposition(target: OpOverload, tensors: int) -> Decomposition:
        def decompose(*args: Any) -> Any:
            inputs, rest = args[:tensors], args[tensors:]
            if inputs[0].dim() == 4 and not all(map(_is_channels_last, inputs)):
                return target(*map(convert, inputs), *rest)
            return table[target](*args) if target in table else NotImplemented

        return decompose

    leading_tensors = {aten.convolution.default: 2, aten.convolution_backward.default: 3}
    return {**table, **{target: decomposition(target, count) for target, count in leading_tensors.items()}}


def _is_channels_last(tensor: Tensor) -> bool:
    return tensor.is_contiguous(memory_format=torch.channels_last)


def trains_convolutions(graph: fx.Graph) -> bool:
    """Whether a graph has both convolutions and gradients of convolutions."""
    return all(
        graph.find_nodes(op="call_function", target=target)
        for target in (aten.convolution.default, aten.convolution_backward.default)
    )


def is_channels_last(graph: fx.Graph) -> bool:
    """Whether all 2d convolutions of a graph read channels-last tensors."""
    convolutions = graph.find_nodes(op="call_function", target=aten.convolution.default)
    inputs = (node.args[0].meta["val"] for node in convolutions)
    return all(_is_channels_last(value) for value in inputs if value.dim() == 4)


class LayoutInterpreter(fx.Interpreter):
    """Runs a graph with tensors whose layouts may differ from those of its trace; its outputs have the traced layout.

    Args:
        module: a graph of ATen ops whose nodes have their traced values in ``meta["val"]``.

    Raises:
        LayoutVisibleError: when it is run: a tensor that must be copied back to its traced layout is aliased.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self._shared = _shared_by_outputs(module)
        self._written = {storage_of(tensor) for node in module.graph.nodes for tensor in _written(node)}

    def run_node(self, n: fx.Node) -> Any:
        """Run a node, on inputs in the traced layout unless the op depends on values alone."""
        if _depends_on_values_only(n) or not any(map(self._layout_differs, n.all_input_nodes)):
            return super().run_node(n)
        if n.target in _VIEWS and not _any_in(self._written, n.all_input_nodes):
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            return aten.reshape.default(*args, **kwargs)  # a view if strides allow it
        aliased = self._shared if n.op == "output" else self._written if _may_alias(n) else frozenset()

        def in_traced_layout(source: fx.Node) -> Any:
            if not self._layout_differs(source):
                return self.env[source]
            if _any_in(aliased, [source]):
                raise LayoutVisibleError(f"{n.name} needs {source.name} as it was traced, and others need that memory")
            return pytree.tree_map(_with_layout_of, self.env[source], source.meta["val"])

        args, kwargs = fx.map_arg((n.args, n.kwargs), in_traced_layout)
        return getattr(self, n.op)(n.target, args, kwargs)

    def _layout_differs(self, source: fx.Node) -> bool:
        """Whether the layouts of a node's tensors differ from the trace."""
        traced, actual = tensors_in(source.meta["val"]), tensors_in(self.env[source])
        return list(map(layout_of, traced)) != list(map(layout_of, actual))


_VIEWS = (aten.view.default, aten._unsafe_view.default)

_VALUE_OPS = {
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
"""ATen ops whose results and speed do not depend on the layout of their inputs, besides those tagged ``pointwise``:
some elementwise ops lack that tag."""


def _depends_on_values_only(node: fx.Node) -> bool:
    if node.op != "call_function" or node.target is operator.getitem:
        return node.op != "output"
    target = node.target
    # Random numbers fill a tensor in the order of memory.
    if not isinstance(target, OpOverload) or draws(target, bound_arguments(node, target)):
        return False
    known = target.namespace == "aten" and base_name(target) in _VALUE_OPS
    return known or torch.Tag.pointwise in target.tags or base_name(target).startswith("_foreach_")


def _may_alias(node: fx.Node) -> bool:
    """Whether a call may write to its arguments or return views of them."""
    target = node.target
    return not isinstance(target, OpOverload) or any(a.alias_info is not None for a in target._schema.arguments)


def _any_in(storages: Container[int], nodes: Iterable[fx.Node]) -> bool:
    return any(storage_of(tensor) in storages for node in nodes for tensor in tensors_in(node.meta["val"]))


def _with_layout_of(value: Any, traced: Any) -> Any:
    if not isinstance(value, Tensor) or layout_of(value) == layout_of(traced):
        return value
    return torch.empty_strided(traced.shape, traced.stride(), dtype=value.dtype, device=value.device).copy_(value)


def _shared_by_outputs(module: fx.GraphModule) -> frozenset[int]:
    """The storages that several outputs, or an argument and an output, share."""
    nodes = [*module.graph.find_nodes(op="placeholder"), *module.graph.output_node().all_input_nodes]
    count = Counter(storage_of(tensor) for node in nodes for tensor in tensors_in(node.meta["val"]))
    return frozenset(storage for storage, times in count.items() if times > 1)


def _written(node: fx.Node) -> list[Tensor]:
    sources = written_arguments(node, node.target) if isinstance(node.target, OpOverload) else ()
    return [tensor for source in sources for tensor in tensors_in(source.meta["val"])]
