"""Policies: each gives every op of a graph a stream and a position in the launch order.

A policy takes the graph, the costs, the device's profile, the largest number of streams and the ops that must be on
stream 0. It is deterministic; waits and memory are added by later stages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from types import MappingProxyType

from autostream.ir import Assignment, Costs, DeviceProfile, OpGraph
from autostream.scheduling.coarsen import coarsen, expand
from autostream.scheduling.policies import critical_path, path_cover, search, sequential

Policy = Callable[[OpGraph, Costs, DeviceProfile, int, frozenset[str]], Assignment]


def in_chains(policy: Policy) -> Policy:
    """The same policy over chains of short ops instead of ops, so that it never splits a chain."""

    @wraps(policy)
    def on_chains(
        graph: OpGraph, costs: Costs, profile: DeviceProfile, streams: int, pinned: frozenset[str]
    ) -> Assignment:
        coarse = coarsen(graph, costs, profile, pinned)
        return expand(coarse, policy(coarse.graph, coarse.costs, profile, streams, coarse.pinned))

    return on_chains


ON_CHAINS: Mapping[str, Policy] = MappingProxyType(
    {"critical_path": critical_path.critical_path, "path_cover": path_cover.path_cover}
)
"""The policies that work on chains of short ops, by name."""

POLICIES: Mapping[str, Policy] = MappingProxyType(
    {
        "sequential": sequential.sequential,
        **{name: in_chains(policy) for name, policy in ON_CHAINS.items()},
        "search": lambda graph, costs, *rest: search.search(graph, costs, *rest)[-1],
    }
)
"""The policies by name, as in ``Options.policy``.

A new policy is a file here, a line in ``ON_CHAINS``, and its name in ``PolicyName`` of ``options.py``. One that does
not work on chains of ops has its line in ``POLICIES`` instead, and ``tuning/candidates.py`` has to call it.
"""
