"""Graphs whose convolutions read and write channels-last tensors, forward and backward alike.

    as traced       x ──▶ conv ──▶ …        … ──▶ gradient of conv        all contiguous
    laid out        x ──▶ clone ──▶ conv ──▶ …  … ──▶ gradient of conv    all channels-last, by way of what lies between

Kernels of convolutions are fastest in that layout, so Inductor asks for it wherever it lowers a convolution. But what
a gradient of one reads it lays out as in the trace. For ``torch.compile`` that is the same, because it traces backwards
with what forwards return. Where both are traced together, as a training step or to be taken apart, each tensor that a
gradient shares with its convolution would be copied.

So such a graph is traced again, with inputs of convolutions and their gradients laid out. Only ops that are known to
care for values alone see tensors that lie otherwise than in the trace; for others they are copied back, and where that
could be seen, it is given up.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Container, Iterable
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta
from torch.utils import _pytree as pytree

from autostream.operators import base_name, bound_arguments, draws, written_names
from autostream.storages import layout_of, storage_of
from autostream.tracing.flat import tensors_in

aten = torch.ops.aten


class StridesSeen(Exception):  # noqa: N818 - a notice between modules, not an error
    """What a graph computes would show how its tensors lie; the message says where."""


def laid_out(module: fx.GraphModule) -> fx.GraphModule:
    """A graph traced again, with all that convolutions over two dimensions and their gradients read channels-last.

    What it returns lies as it did, and so does what :func:`as_traced` marks; what :func:`as_other` does, lies as that.

    Args:
        module: of ATen ops; nodes have their values of the trace in ``meta["val"]``. It stays as it is.

    Raises:
        StridesSeen: what is moved back would have to be the same memory.

    Example:
        >>> def twice(x, weight):
        ...     return torch.conv2d(torch.conv2d(x, weight), weight)
        >>> traced = make_fx(twice, tracing_mode="fake")(torch.ones(1, 2, 3, 3), torch.ones(2, 2, 2, 2))
        >>> [node.name for node in laid_out(traced).graph.nodes if node.op == "call_function"]
        ['clone', 'clone_1', 'convolution', 'convolution_1']
    """
    values = [node.meta["val"].detach() for node in module.graph.find_nodes(op="placeholder")]
    tracer = make_fx(_Relaid(module).run, tracing_mode="fake", _allow_non_fake_inputs=True)
    with torch.no_grad(), torch._C._DisableAutocast(), preserve_node_meta():  # casts are ops of the graph by now
        return tracer(*values)


def as_traced(tensor: Tensor) -> Tensor:
    """In a graph that is to be laid out, marks what lies as in the trace from there on: others will see it."""
    return tensor


def as_other(tensor: Tensor, other: Tensor) -> Tensor:
    """In a graph that is to be laid out, marks what is to lie as a tensor of that shape does: they will meet."""
    if layout_of(tensor) == layout_of(other):
        return tensor
    return torch.empty_strided(other.shape, other.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


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
    return all(value.is_contiguous(memory_format=torch.channels_last) for value in read if value.dim() == 4)


class _Relaid(fx.Interpreter):
    """Runs a graph with what convolutions read laid out; its outputs lie as in the trace."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self._shared = _shared_by_outputs(module)
        self._writes = Counter(storage for node in module.graph.nodes for storage in _written(node))  # to come
        self._copies: dict[tuple[fx.Node, Callable[..., Any]], Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if written := _written(n):  # copies of it are no longer the same
            known = self._copies.items()
            self._copies = {key: copies for key, copies in known if not _any_in(written, [key[0]])}
            self._writes -= Counter(written)
        return result

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = super().fetch_args_kwargs_from_env(n)
        if n.target in _CONVOLUTIONS and args[0].dim() == 4:
            read: Any = n.args[: _CONVOLUTIONS[n.target]]
            return (*(self._once(_channels_last, source) for source in read), *args[len(read) :]), kwargs
        if _cares_for_values_alone(n) or not any(map(self._has_moved, n.all_input_nodes)):
            return args, kwargs
        if n.target in _VIEWS and not _any_in(self._writes, n.all_input_nodes):
            return args, kwargs
        taken = self._shared if n.op == "output" else self._writes if _may_alias(n) else frozenset()

        def back(source: fx.Node) -> Any:
            if not self._has_moved(source):
                return self.env[source]
            if _any_in(taken, [source]):
                raise StridesSeen(f"{n.name} needs {source.name} as it was traced, and others need that memory")
            return self._once(_back, source)

        return fx.map_arg((n.args, n.kwargs), back)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return (aten.reshape.default if target in _VIEWS else target)(*args, **kwargs)

    def _once(self, make: Callable[[Any, Any], Any], source: fx.Node) -> Any:
        """The same for the same: a convolution shares its input and its weight with its gradients."""
        if (source, make) not in self._copies:
            self._copies[source, make] = make(self.env[source], source.meta["val"])
        return self._copies[source, make]

    def _has_moved(self, source: fx.Node) -> bool:
        """Whether a node's tensors lie otherwise than in the trace."""
        before, now = tensors_in(source.meta["val"]), tensors_in(self.env[source])
        return list(map(layout_of, before)) != list(map(layout_of, now))


_CONVOLUTIONS: dict[Any, int] = {aten.convolution.default: 2, aten.convolution_backward.default: 3}
"""How many of their first arguments are laid out alike."""

_VIEWS = (aten.view.default, aten._unsafe_view.default)
"""Of what has moved, they may have to be copies."""

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
    if node.op != "call_function" or node.target in (operator.getitem, as_other):
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


def _channels_last(value: Tensor, _: Tensor) -> Tensor:
    return value.contiguous(memory_format=torch.channels_last)


def _back(values: Any, traced: Any) -> Any:
    return pytree.tree_map(
        lambda value, was: as_other(value, was) if isinstance(value, Tensor) else value, values, traced
    )


def _shared_by_outputs(module: fx.GraphModule) -> frozenset[int]:
    """Storages that several outputs, or an argument and an output, lie in."""
    nodes = [*module.graph.find_nodes(op="placeholder"), *module.graph.output_node().all_input_nodes]
    count = Counter(storage_of(tensor) for node in nodes for tensor in tensors_in(node.meta["val"]))
    return frozenset(storage for storage, times in count.items() if times > 1)


def _written(node: fx.Node) -> list[int]:
    """The storages that a call writes to."""
    if not isinstance(node.target, OpOverload):
        return []
    bound = bound_arguments(node, node.target)
    written = fx.map_arg([bound[name] for name in written_names(node.target)], lambda source: source.meta["val"])
    return [storage_of(tensor) for value in written for tensor in tensors_in(value)]
