"""Layout of a graph in layers, so that every edge points down.

layer 0        a
             ╱   ╲
layer 1     b     c      an op is one layer below its lowest predecessor, and as near as
             ╲   ╱       there is room to the middle of its predecessors
layer 2        d

Layers, and the order within them by barycentres in one pass from the top, are those of Sugiyama, Tagawa & Toda (1981,
"Methods for visual understanding of hierarchical system structures").
"""

from __future__ import annotations

from collections.abc import Mapping

from autostream.ir import OpGraph


def places(graph: OpGraph) -> Mapping[str, tuple[float, int]]:
    """Column and layer of each op, by name; ops of a layer are at least one column apart. O(E + V·log V).

    Example:
        >>> from autostream.ir import Dependency, Hazard, Op
        >>> ops = {name: Op(name, "f", (name,), frozenset(), frozenset({name})) for name in "abcd"}
        >>> arrows = tuple(Dependency(before, after, Hazard.RAW, before) for before, after in ("ab", "ac", "bd", "cd"))
        >>> places(OpGraph(ops, arrows, {}, (), "cuda:0"))
        {'a': (0.0, 0), 'b': (-0.5, 1), 'c': (0.5, 1), 'd': (0.0, 2)}
    """
    layers: dict[int, list[str]] = {}
    for name, layer in _layer_of(graph).items():
        layers.setdefault(layer, []).append(name)
    column: dict[str, float] = {}
    for _, names in sorted(layers.items()):
        wished = {name: _middle([column[before] for before in graph.digraph.predecessors(name)]) for name in names}
        column |= _spread(wished)
    return {name: (column[name], layer) for layer, names in sorted(layers.items()) for name in names}


def _layer_of(graph: OpGraph) -> Mapping[str, int]:
    """The longest path to each op, in ops; ops without predecessors are right above their first successor."""
    layer: dict[str, int] = {}
    for name in graph.ops:
        layer[name] = max((layer[before] + 1 for before in graph.digraph.predecessors(name)), default=0)
    for name in graph.ops:
        if not graph.digraph.in_degree(name):
            layer[name] = min((layer[after] - 1 for after in graph.digraph.successors(name)), default=0)
    return layer


def _middle(columns: list[float]) -> float:
    return sum(columns) / len(columns) if columns else 0.0


def _spread(wished: Mapping[str, float]) -> Mapping[str, float]:
    """Columns at least one apart, in the order of the wished ones and with their mean."""
    columns: dict[str, float] = {}
    last = -float("inf")
    for name in sorted(wished, key=wished.__getitem__):
        columns[name] = last = max(wished[name], last + 1)
    shift = _middle([wished[name] - column for name, column in columns.items()])
    return {name: round(column + shift, 2) for name, column in columns.items()}
