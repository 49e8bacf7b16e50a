"""From a graph and its costs to a schedule: pure functions of immutable values, without torch and without a device.

    structure                                what the graph allows: bottom levels, critical path, width, branches
    sequential, critical_path, path_cover    policies: OpGraph, Costs ─▶ Assignment (which stream, in which order)
    synchronize, releases                    Assignment ─▶ Schedule (where streams wait, where memory is given back)
    verify                                   Schedule ─▶ nothing, or ScheduleError; shares no code with the above
    simulate                                 Schedule ─▶ Timeline

A policy is called with the graph, the costs, the device's profile, the largest number of streams and the ops that must
be on stream 0. It is deterministic, and it leaves waits and memory to the stages after it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from autostream.ir import Assignment, Costs, DeviceProfile, OpGraph
from autostream.scheduling import critical_path, path_cover, sequential

Policy = Callable[[OpGraph, Costs, DeviceProfile, int, frozenset[str]], Assignment]

POLICIES: Mapping[str, Policy] = MappingProxyType(
    {
        "sequential": sequential.sequential,
        "critical_path": critical_path.critical_path,
        "path_cover": path_cover.path_cover,
    }
)
"""The policies by name, as in ``Options.policy``; a new one is a file, a line here and a value there."""
