"""Chains of ops too short to be worth an edge, as one op each: no policy splits them, and there is less to decide.

    a ──▶ b ──▶ c ──▶ e      b is short and has one neighbour on either side: a-b-c is one chain
    └──▶ d ──────────▶┘      d is long, and so are c and e, so the rest stays as it is

A *link* is a dependency that is the only one out of its producer and the only one into its consumer. Put on two
streams, its ends run no sooner, and the edge between them costs more than one within a stream; all that could be gained
is to let something else in between. Where that gain is at most as long as the shorter end, and the edge costs more,
the link is *contracted*. This is linear clustering (Kim & Browne 1988, "A general approach to mapping of parallel
computations upon multiprocessor architectures"), held back where ops are long enough to be scheduled for themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from autostream.ir import Assignment, Costs, Dependency, DeviceProfile, Launch, OpCost, OpGraph, Schedule
from autostream.scheduling.simulate import simulate


@dataclass(frozen=True)
class Coarse:
    """A graph of chains: what a policy needs to know of them.

    Attributes:
        graph: one op per chain, the first one standing for all; the storages are left out.
        costs: of each chain, as if it ran alone: time in µs, and shares averaged over it.
        pinned: chains that must be on stream 0.
        chains: the ops of each, in program order, by the first of them.
    """

    graph: OpGraph
    costs: Costs
    pinned: frozenset[str]
    chains: Mapping[str, tuple[str, ...]]


def coarsen(graph: OpGraph, costs: Costs, profile: DeviceProfile, pinned: frozenset[str]) -> Coarse:
    """Contract every link with an end that takes less than leaving its stream costs. O(V + E) for V ops and E edges.

    Links between an op that is pinned to stream 0 and one that is not stay.

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
    head = _heads(graph, costs, _leaving_us(profile), pinned)
    chains: dict[str, list[str]] = {}
    for name, first in head.items():
        chains.setdefault(first, []).append(name)
    dependencies = tuple(
        Dependency(head[link.before], link.after, link.hazard, link.resource)
        for link in graph.dependencies
        if head[link.before] != head[link.after]
    )
    return Coarse(
        graph=replace(graph, ops={first: graph.ops[first] for first in chains}, dependencies=dependencies, storages={}),
        costs={first: _cost(chain, costs, profile) for first, chain in chains.items()},
        pinned=pinned & chains.keys(),
        chains={first: tuple(chain) for first, chain in chains.items()},
    )


def expand(coarse: Coarse, assignment: Assignment) -> Assignment:
    """The assignment of chains as one of their ops: each right behind the one before it, on the same stream."""
    stream = {name: assignment.stream[first] for first, chain in coarse.chains.items() for name in chain}
    order = tuple(name for first in assignment.order for name in coarse.chains[first])
    return replace(assignment, order=order, stream=stream)


def _leaving_us(profile: DeviceProfile) -> float:
    """What an edge to another stream costs more than one within a stream, µs."""
    return profile.cross_stream_edge_us - profile.same_stream_edge_us


def _heads(graph: OpGraph, costs: Costs, leaving_us: float, pinned: frozenset[str]) -> dict[str, str]:
    """The first op of each op's chain, in program order."""
    names, head = list(graph.ops), dict[str, str]()
    for name, before in zip(names, graph.predecessors, strict=True):
        head[name] = name
        if len(before) == 1 and len(graph.successors[before[0]]) == 1:
            link = names[before[0]]
            shorter_us = min(costs[link].duration_us, costs[name].duration_us)
            if shorter_us < leaving_us and (link in pinned) == (name in pinned):
                head[name] = head[link]
    return head


def _cost(chain: list[str], costs: Costs, profile: DeviceProfile) -> OpCost:
    """What a chain needs: the time that it takes alone, and the shares that its ops take up on average."""
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
