"""Nodes that are views of a program's arguments, so that they can be computed again from the arguments at any time."""

from __future__ import annotations

from collections.abc import Container

from torch import Tensor, fx

from autostream.analysis.effects import effects_of


def argument_views(graph: fx.Graph, others: Container[str] = ()) -> frozenset[str]:
    """The names of the nodes that are certainly views of arguments, and of ``get_attr`` nodes.

    Ops like ``reshape`` that may copy are left out: a copy of a tensor that is mutated later keeps the old values.

    Args:
        graph: the graph of a traced program.
        others: the names of nodes of which views are wanted, too.

    Example:
        >>> import torch
        >>> graph = fx.Graph()
        >>> x = graph.placeholder("x")
        >>> view = graph.call_function(torch.ops.aten.t.default, (x,))
        >>> copy = graph.call_function(torch.ops.aten.ravel.default, (x,))
        >>> x.meta["val"] = view.meta["val"] = copy.meta["val"] = torch.ones(2)
        >>> argument_views(graph)
        frozenset({'t_default'})
    """
    views = set[fx.Node]()
    for node in graph.nodes:
        if node.op == "get_attr" or (node.op == "call_function" and _is_view(node, views, others)):
            views.add(node)
    return frozenset(node.name for node in views)


def _is_view(node: fx.Node, views: set[fx.Node], others: Container[str]) -> bool:
    effects = effects_of(node)
    if effects.launches or effects.may_copy or not node.all_input_nodes:
        return False

    def has_views(source: fx.Node) -> bool:
        other = source.name in others and isinstance(source.meta["val"], Tensor)  # the parts of a tuple are no views
        return source.op == "placeholder" or source in views or other

    return all(map(has_views, node.all_input_nodes))
