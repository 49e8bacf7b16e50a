"""A part of an fx graph as a graph of its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import fx


def excerpt(into: fx.Graph, given: Iterable[fx.Node], nodes: Iterable[fx.Node], results: Iterable[fx.Node]) -> fx.Graph:
    """Copy nodes, with their names and metadata, into an empty graph; returns it.

    Args:
        into: the empty graph.
        given: what the graph takes: each becomes a placeholder.
        nodes: what it computes, in an order in which that can be done.
        results: what it returns, as a tuple.

    Example:
        >>> from torch import fx
        >>> whole = fx.symbolic_trace(lambda x: (x + 1) * 2).graph
        >>> x, plus, times, _ = whole.nodes
        >>> part = excerpt(fx.Graph(), [plus], [times], [times])
        >>> [node.name for node in part.nodes]
        ['add', 'mul', 'output']
    """
    copies: dict[fx.Node, fx.Node] = {}
    for node in given:
        copies[node] = into.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in nodes:
        copies[node] = into.node_copy(node, copies.__getitem__)
    into.output(tuple(copies[node] for node in results))
    return into
