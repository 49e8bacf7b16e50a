"""Computes the fake values of a graph of kernels, and compares its outputs with those of the program before fusion."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import detect_fake_mode
from torch._subclasses import FakeTensorMode

from autostream.frontend.aten import tensors_in
from autostream.ir import Program
from autostream.utils.kernels import Kernel
from autostream.utils.storages import layout_of, storage_of

aten = torch.ops.aten


def arguments_of(module: fx.GraphModule) -> list[Any]:
    """The values of a graph's placeholders."""
    return [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]


def outputs_of(module: fx.GraphModule) -> tuple[fx.Node, ...]:
    """The nodes whose values a graph returns."""
    return tuple(module.graph.output_node().args[0])  # type: ignore[arg-type]


def fake_mode_of(values: Sequence[Any]) -> FakeTensorMode:
    """The fake tensor mode of these values, or a new one if none is a fake tensor."""
    return detect_fake_mode(values) or FakeTensorMode(allow_non_fake_inputs=True)


def match_program(module: fx.GraphModule, program: Program) -> fx.GraphModule:
    """Name a graph's placeholders like a program's, return as many distinct tensors, and give each node its value.

    Args:
        module: a graph of kernels with the same arguments; changed in place, and returned.
        program: the program that was fused into it.
    """
    values = arguments_of(program.module)
    for node, placeholder in zip(module.graph.find_nodes(op="placeholder"), program.placeholders, strict=True):
        node.name = node.target = placeholder.name
    _match_outputs(module.graph, program)
    with fake_mode_of(values), torch.no_grad():
        evaluate(module, values)
    module.recompile()
    return module


def _match_outputs(graph: fx.Graph, program: Program) -> None:
    """Return the same tensor exactly where the program does: Inductor only preserves which outputs share memory.

    An output that the program returns twice is returned twice, instead of two views of it. An output that is a view in
    the program becomes a view, if Inductor returns the base or an argument itself.
    """
    output = graph.output_node()
    results: tuple[fx.Node, ...] = output.args[0]  # type: ignore[assignment]
    nodes = dict(zip(program.outputs, outputs_of(program.module), strict=True))
    arguments = arguments_of(program.module)
    tensors: dict[str, fx.Node] = {}
    for name, result in zip(program.outputs, results, strict=True):
        if name in tensors:
            continue
        view = result in tensors.values() or (result.op == "placeholder" and not _is_argument(nodes[name], arguments))
        with graph.inserting_before(output):
            tensors[name] = graph.call_function(aten.alias.default, (result,)) if view else result
    output.args = (tuple(tensors[name] for name in program.outputs),)
    for unused in dict.fromkeys(results):
        if not unused.users and unused.op != "placeholder":
            graph.erase_node(unused)


def _is_argument(node: fx.Node, arguments: Sequence[Any]) -> bool:
    """Whether a node returns an argument itself and not a view, e.g. ``x.float()`` of a float tensor."""
    storage = storage_of(node.meta["val"])

    @cache  # a tensor that is mutated in place may be read twice by each of many ops
    def evaluate_again(node: fx.Node) -> Any:
        """A node's value; it is computed again if it may share memory with the output."""
        value = node.meta["val"]
        if node.op != "call_function" or all(storage_of(tensor) != storage for tensor in tensors_in(value)):
            return value
        args: Any
        kwargs: Any
        args, kwargs = fx.map_arg((node.args, node.kwargs), evaluate_again)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    with fake_mode_of([node.meta["val"]]), torch.no_grad():
        value = evaluate_again(node)
    return any(value is argument for argument in arguments)


def evaluate(module: fx.GraphModule, values: Sequence[Tensor]) -> None:
    """Give each node of a graph of kernels its fake value, without running kernels.

    Args:
        module: the graph.
        values: fake tensors for its placeholders, in the current fake tensor mode.
    """
    for node, value in zip(module.graph.find_nodes(op="placeholder"), values, strict=True):
        node.meta["val"] = value
    mode = fake_mode_of(values)
    for node in module.graph.nodes:
        if node.op == "get_attr":
            node.meta["val"] = mode.from_tensor(getattr(module, node.target))
        elif node.op == "call_function":
            node.meta["val"] = _value(node)


def _value(node: fx.Node) -> Any:
    if isinstance(node.target, Kernel):
        return None
    args: Any
    kwargs: Any
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
    if node.target is torch.ops.inductor._reinterpret_tensor.default:
        tensor, size, stride, offset = args
        return tensor.as_strided(size, stride, tensor.storage_offset() + offset)
    return kwargs["out"] if "out" in kwargs else node.target(*args, **kwargs)  # type: ignore[operator]


def shared_storages(module: fx.GraphModule) -> list[int]:
    """For each argument and output of a graph, the position of the first of them with the same storage."""
    values = [*arguments_of(module), *(node.meta["val"] for node in outputs_of(module))]
    storages = list(map(storage_of, values))
    return [storages.index(storage) for storage in storages]


def output_layouts(module: fx.GraphModule) -> list[tuple[torch.dtype, torch.Size, tuple[int, ...]]]:
    """Dtype, shape and layout of each output of a graph. Inductor may return an expanded row for a sum over zeros."""
    values = [node.meta["val"] for node in outputs_of(module)]
    return [(value.dtype, value.shape, layout_of(value)) for value in values]
