"""Properties of a graph that bound every schedule: critical path, slack, width, and branches that may run in parallel.

    ┌─ b ── c ─┐      the longest path by cost is critical: no schedule is faster
 a ─┤          ├─ e   a and e are cuts: every other op is before or after them
    └─── d ────┘      between them is a region with two branches: b-c and d

Terms: the *bottom level* of an op is the longest path from its start to the end of the run, its *top level* the
longest path from the start of the run to its start (Adam, Chandy & Dickson 1974: "A comparison of list schedules for
parallel processing systems"). Edges between streams cost nothing here, so these are bounds.

All functions take time linear in ops and dependencies, except :func:`width`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from autostream.ir import FORK, JOIN, Costs, OpGraph
from autostream.scheduling.matching import maximum_chain_matching


@dataclass(frozen=True, slots=True)
class Region:
    """The ops between two neighbouring cuts, whose branches may run at the same time.

    Attributes:
        fork: the op after which the branches start, or ``FORK``.
        join: the op before which they end, or ``JOIN``.
        branches: their ops in program order; no op of one depends on an op of another.
    """

    fork: str
    join: str
    branches: tuple[tuple[str, ...], ...]


def bottom_levels(graph: OpGraph, costs: Costs) -> Mapping[str, float]:
    """The longest path from each op's start to a sink's end, µs.

    Example:
        >>> from autostream.ir import Dependency, Hazard, Op, OpCost
        >>> ops = {name: Op(name, "f", (name,), frozenset(), frozenset({name})) for name in "ab"}
        >>> graph = OpGraph(ops, (Dependency("a", "b", Hazard.RAW, "a"),), {}, (), "cpu")
        >>> costs = {"a": OpCost(3.0, 1.0, 0.0, "roofline"), "b": OpCost(4.0, 1.0, 0.0, "roofline")}
        >>> bottom_levels(graph, costs)["a"], top_levels(graph, costs)["b"], critical_path(graph, costs)
        (7.0, 3.0, ('a', 'b'))
    """
    level = [costs[name].duration_us for name in graph.ops]
    for at, after in reversed([*enumerate(graph.successors)]):
        if after:
            level[at] += max([level[other] for other in after])
    return dict(zip(graph.ops, level, strict=True))


def top_levels(graph: OpGraph, costs: Costs) -> Mapping[str, float]:
    """The longest path from a source's start to each op's start, µs: the earliest that it can start."""
    end: list[float] = []
    level: dict[str, float] = {}
    for name, before in zip(graph.ops, graph.predecessors, strict=True):
        level[name] = max([end[other] for other in before], default=0.0)
        end.append(level[name] + costs[name].duration_us)
    return level


def critical_path(graph: OpGraph, costs: Costs) -> tuple[str, ...]:
    """The ops of the longest path by duration; of equal ones, the first in program order."""
    names, level = list(graph.ops), list(bottom_levels(graph, costs).values())
    path: list[int] = []
    candidates: Sequence[int] = range(len(names))
    while candidates:
        path.append(max(candidates, key=level.__getitem__))
        candidates = graph.successors[path[-1]]
    return tuple(names[at] for at in path)


def slack(graph: OpGraph, costs: Costs) -> Mapping[str, float]:
    """How much later than its earliest start each op may start without making the longest path longer, µs."""
    bottom, top = bottom_levels(graph, costs), top_levels(graph, costs)
    length = max(bottom.values(), default=0.0)
    return {name: length - top[name] - bottom[name] for name in graph.ops}


def width(graph: OpGraph) -> int:
    """The largest number of ops that do not depend on each other: more streams are never busy at once.

    By Dilworth's theorem this is the smallest number of chains that cover every op, which is the number of ops minus
    the size of a maximum matching in the closure (Fulkerson 1956). Takes memory linear in ops and dependencies; for
    time, see :func:`~autostream.scheduling.matching.maximum_chain_matching`.
    """
    return len(graph.ops) - len(maximum_chain_matching(graph.successors))


def cuts(graph: OpGraph) -> tuple[str, ...]:
    """Ops that every other op is before or after, in program order.

    An op is a cut if and only if all earlier ops have a successor no later than it, and all later ops a predecessor no
    earlier than it: paths along these successors and predecessors lead to it.
    """
    successors = graph.successors
    count = len(successors)
    nearest_predecessor = [-1] * count
    for at, after in enumerate(successors):
        for successor in after:
            nearest_predecessor[successor] = at
    earliest_reach = [count] * (count + 1)
    for at in reversed(range(count)):
        earliest_reach[at] = min(earliest_reach[at + 1], nearest_predecessor[at])
    ops = []
    latest_reach = -1
    for at, name in enumerate(graph.ops):
        if latest_reach <= at <= earliest_reach[at + 1]:
            ops.append(name)
        latest_reach = max(latest_reach, min(successors[at], default=count))
    return tuple(ops)


def regions(graph: OpGraph) -> tuple[Region, ...]:
    """The regions of two or more branches, in program order.

    Branches that depend on each other count as one, so a wide graph may have no region.
    """
    bounds = [FORK, *cuts(graph), JOIN]
    inner: dict[str, list[str]] = {bound: [] for bound in bounds}
    fork = FORK
    for name in graph.ops:
        if name in inner:
            fork = name
        else:
            inner[fork].append(name)
    regions = (Region(fork, join, _branches(graph, inner[fork])) for fork, join in pairwise(bounds))
    return tuple(region for region in regions if len(region.branches) > 1)


def _branches(graph: OpGraph, names: list[str]) -> tuple[tuple[str, ...], ...]:
    import networkx as nx  # not needed to import autostream: see OpGraph.digraph

    position = {name: at for at, name in enumerate(names)}
    parts = nx.weakly_connected_components(graph.digraph.subgraph(names))
    return tuple(
        sorted((tuple(sorted(part, key=position.__getitem__)) for part in parts), key=lambda p: position[p[0]])
    )
