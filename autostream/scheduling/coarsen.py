"""Coarsening: chains of short ops become one op each, so that policies keep them on one stream.

    a ──▶ b ──▶ c ──▶ e      b is short, the only consumer of a and the only producer of c: a-b-c is one chain
    └──▶ d ──────────▶┘      c, d and e are long, so the rest stays as it is

Take a dependency that is the only one out of its producer and the only one into its consumer. On two streams the two
ops start no earlier, and the edge between them costs more than one within a stream. Two streams gain at most the
duration of the shorter op, in which another op may run. If the edge costs more than that, the dependency is
*contracted*. This is linear clustering (Kim & Browne 1988, "A general approach to mapping of parallel computations upon
multiprocessor architectures"), limited to short ops.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from autostream.ir import Assignment, Costs, Dependency, DeviceProfile, Launch, OpCost, OpGraph, Schedule
from autostream.scheduling.simulate import simulate


@dataclass(frozen=True)
class Coarse:
    """A graph of chains, each named after its first op.

    Attributes:
        graph: the first op of each chain, with the dependencies between chains and without storages.
        costs: of each chain, as if it ran alone: time in µs, and shares averaged over it.
        pinned: chains that must be on stream 0.
        chains: the ops of each, in program order.
    """

    graph: OpGraph
    costs: Costs
    pinned: frozenset[str]
    chains: Mapping[str, tuple[str, ...]]


def coarsen(graph: OpGraph, costs: Costs, profile: DeviceProfile, pinned: frozenset[str]) -> Coarse:
    """Contract every such dependency with an op that takes less than changing streams costs.

    Dependencies between an op that is pinned to stream 0 and one that is not stay, and so do those of collectives.
    O(V + E) for V ops and E edges.

    Example:
        >>> from autostream.ir import Dependency, Hazard, Op
        >>> ops = {name: Op(name, "f", (name,), frozenset(), frozenset({name})) for name in "abc"}
        >>> graph = OpGraph(ops, tuple(Dependency(x, y, Hazard.RAW, x) for x, y in ("ab", "bc")), {}, (), "cuda:0")
        >>> profile = DeviceProfile("GPU", 132, 4.8e6, {}, 2.0, 1.0, 3.0, 1.0, 1.0, "table")
        >>> costs = {name: OpCost(9.0 if name != "b" else 1.0, 0.1, 0.1, "roofline") for name in "abc"}
        >>> coarse = coarsen(graph, costs, profile, frozenset())
        >>> coarse.chains, coarse.costs["a"].duration_us
        ({'a': ('a', 'b', 'c')}, 21.0)
    """
    head = _heads(graph, costs, profile.cross_stream_edge_us - profile.same_stream_edge_us, pinned)
    chains: dict[str, list[str]] = {}
    for name, first in head.items():
        chains.setdefault(first, []).append(name)
    dependencies = tuple(
        Dependency(head[edge.before], edge.after, edge.hazard, edge.resource)
        for edge in graph.dependencies
        if head[edge.before] != head[edge.after]
    )
    return Coarse(
        graph=replace(graph, ops={first: graph.ops[first] for first in chains}, dependencies=dependencies, storages={}),
        costs={first: _cost(chain, costs, profile) for first, chain in chains.items()},
        pinned=pinned & chains.keys(),
        chains={first: tuple(chain) for first, chain in chains.items()},
    )


def expand(coarse: Coarse, assignment: Assignment) -> Assignment:
    """The assignment of ops that an assignment of chains is: each chain launched as a whole, on one stream."""
    stream = {name: assignment.stream[first] for first, chain in coarse.chains.items() for name in chain}
    order = tuple(name for first in assignment.order for name in coarse.chains[first])
    return replace(assignment, order=order, stream=stream)


def _heads(graph: OpGraph, costs: Costs, change_us: float, pinned: frozenset[str]) -> dict[str, str]:
    """The first op of each op's chain; ``change_us`` is what changing streams costs."""
    names, head, apart = list(graph.ops), dict[str, str](), graph.collectives
    for name, before in zip(names, graph.predecessors, strict=True):
        head[name] = name
        if len(before) == 1 and len(graph.successors[before[0]]) == 1:
            producer = names[before[0]]
            shorter_us = min(costs[producer].duration_us, costs[name].duration_us)
            alike = (producer in pinned) == (name in pinned) and apart.isdisjoint((producer, name))
            if shorter_us < change_us and alike:
                head[name] = head[producer]
    return head


def _cost(chain: list[str], costs: Costs, profile: DeviceProfile) -> OpCost:
    """The cost of a chain: its duration alone, and the average shares of its ops."""
    if len(chain) == 1:
        return costs[chain[0]]
    alone = Schedule("chain", 1, tuple(Launch(name, 0) for name in chain))
    duration_us = simulate(alone, costs, profile).makespan_us
    members = [costs[name] for name in chain]

    def averaged(shares: list[float]) -> float:
        work_us = sum(share * member.duration_us for share, member in zip(shares, members, strict=True))
        return work_us / duration_us if duration_us else max(shares)

    return OpCost(
        duration_us,
        averaged([member.sm_share for member in members]),
        averaged([member.bandwidth_share for member in members]),
        members[0].source,
    )
