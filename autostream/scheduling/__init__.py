"""From a graph and its costs to a schedule: pure functions of immutable values, without torch and without a device.

    structure                                what the graph allows: bottom levels, critical path, width, branches
    sequential, critical_path, path_cover    policies: OpGraph, Costs ─▶ Assignment (which stream, in which order)
    coarsen                                  OpGraph, Costs ─▶ chains of short ops, which no policy splits
    search                                   the policy that starts from what these find, and simulates what it changes
    synchronize, releases                    Assignment ─▶ Schedule (where streams wait, where memory is given back)
    footprint                                Timeline ─▶ what is in memory at a time
    slack                                    Timeline ─▶ Timeline (all as late as it may be)
    postpone                                 Schedule, Timeline ─▶ Assignment (what takes memory is launched later)
    recycling                                Schedule, Timeline ─▶ Schedule (waits that take no time and save memory)
    clocks                                   Schedule ─▶ what has happened before each launch
    lifetimes, arena                         Schedule ─▶ when each storage is in use ─▶ Schedule (where storages lie)
    verify                                   Schedule ─▶ nothing, or ScheduleError; shares no code with the above
    simulate                                 Schedule ─▶ Timeline
    losses, overlap                          Schedule ─▶ where its time goes; Timeline ─▶ what runs beside what
    peak                                     Schedule ─▶ bytes
    check                                    Costs ─▶ nothing, or CostError

A policy is called with the graph, the costs, the device's profile, the largest number of streams and the ops that must
be on stream 0. It is deterministic, and it leaves waits and memory to the stages after it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from types import MappingProxyType

from autostream.ir import Assignment, Costs, DeviceProfile, OpGraph
from autostream.scheduling import critical_path, path_cover, search, sequential
from autostream.scheduling.coarsen import coarsen, expand

Policy = Callable[[OpGraph, Costs, DeviceProfile, int, frozenset[str]], Assignment]


def in_chains(policy: Policy) -> Policy:
    """A policy that never splits a chain of short ops: it decides on chains in the place of ops."""

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
"""The policies that are to decide on chains of short ops, by name."""

POLICIES: Mapping[str, Policy] = MappingProxyType(
    {
        "sequential": sequential.sequential,
        **{name: in_chains(policy) for name, policy in ON_CHAINS.items()},
        "search": search.search,
    }
)
"""The policies by name, as in ``Options.policy``; a new one is a file, a line here and a value there."""
