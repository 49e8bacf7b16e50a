"""Views of a program's arguments: whoever has the arguments can make them, at any time."""

from __future__ import annotations

from torch import fx

from autostream.analysis.effects import effects_of


def argument_views(graph: fx.Graph) -> frozenset[str]:
    """The nodes that are views of arguments for certain, or submodules.

    What strides may make a copy is left out: of what is written, a copy has what was there when it was made.

    Args:
        graph: of a traced program.

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
    found = set[fx.Node]()
    for node in graph.nodes:
        if node.op == "get_attr" or (node.op == "call_function" and _is_view(node, found)):
            found.add(node)
    return frozenset(node.name for node in found)


def _is_view(node: fx.Node, views: set[fx.Node]) -> bool:
    effects = effects_of(node)
    if effects.launches or effects.may_copy or not node.all_input_nodes:
        return False
    return all(source.op == "placeholder" or source in views for source in node.all_input_nodes)
