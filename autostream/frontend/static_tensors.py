"""Tensors that were said to stay where they are (``torch._dynamo.mark_static_address``), and how Dynamo passes them.

    mark_static_address(tensor)              ──▶ an input of the graph
    mark_static_address(tensor, guard=True)  ──▶ an attribute of the graph ──attributes_as_inputs──▶ an input

``torch.compile`` marks the parameters and the state of optimizers in the second way. A tracer on fake tensors would
compute with such an attribute itself, and write it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx


def stays(tensor: Tensor) -> bool:
    """Whether the tensor was marked as one whose address stays the same from call to call.

    Example:
        >>> import torch
        >>> cache = torch.zeros(2)
        >>> torch._dynamo.mark_static_address(cache)
        >>> stays(cache), stays(torch.zeros(2))
        (True, False)
    """
    return getattr(tensor, "_dynamo_static_input_type", None) is not None


def attributes_as_inputs(module: fx.GraphModule) -> tuple[fx.GraphModule, list[Tensor]]:
    """Make inputs of the marked tensors that are attributes of a graph of Dynamo's, behind its other inputs.

    Args:
        module: the graph, which does not change: Dynamo still needs it.

    Returns:
        The same graph with these inputs, and the tensors to pass there in each call.
    """
    marked: dict[str, Tensor] = {}
    for node in module.graph.find_nodes(op="get_attr"):
        tensor: Any = getattr(module, str(node.target), None)
        if isinstance(tensor, Tensor) and stays(tensor):
            marked[str(node.target)] = tensor
    if not marked:
        return module, []
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in module.graph.find_nodes(op="placeholder"):
        copies[node] = _from(getattr(node, "_dynamo_source", None), graph.node_copy(node))
    sources = getattr(module, "_param_name_to_source", None) or {}
    inputs = {name: _from(sources.get(name), graph.placeholder(name)) for name in marked}
    for node in module.graph.nodes:
        if node.op == "get_attr" and node.target in inputs:
            copies[node] = inputs[str(node.target)]
            copies[node].meta = {**node.meta}
        elif node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    changed = fx.GraphModule(module, graph)
    changed.meta = {"backend_id": getattr(module, "_backend_id", None), **module.meta}
    return changed, [*marked.values()]


def _from(source: Any, placeholder: fx.Node) -> fx.Node:
    """A placeholder, with where Dynamo found its value."""
    placeholder.__dict__["_dynamo_source"] = source
    return placeholder


def with_attributes(run: Callable[..., Any], attributes: Sequence[Tensor]) -> Callable[..., Any]:
    """A function of a graph's other inputs."""
    return (lambda *values: run(*values, *attributes)) if attributes else run
