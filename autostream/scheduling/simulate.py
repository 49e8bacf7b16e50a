"""When each op of a schedule would run, by the cost model: no device needed.

A discrete-event simulation of two shared resources, the multiprocessors and the memory bandwidth. Ops that run at the
same time demand their ``sm_share`` of the one and their ``bandwidth_share`` of the other; where either is asked for
more than all of it, they all slow down by the same factor, the larger of the two sums (a fluid model: processor
sharing over the bottleneck). As the factor is common, one clock of *work done* serves all running ops: each ends when
that clock has advanced by its duration (the virtual time of Parekh & Gallager 1993, "A generalized processor sharing
approach to flow control in integrated services networks").

A third resource is the front end, which starts one kernel after the other: in a CUDA graph in the order in which they
become ready, uncaptured in the order in which the host launches them.

O(L·(K + log L)) for L launches and waits and K streams.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf

from autostream.errors import ScheduleError
from autostream.ir import FORK, JOIN, Costs, DeviceProfile, OpCost, Schedule, Slice, Timeline

Edges = Mapping[str, Mapping[str, float]]
"""What must have ended before something starts, and the time from that end to this start, µs."""


def simulate(schedule: Schedule, costs: Costs, profile: DeviceProfile, *, captured: bool = True) -> Timeline:
    """Run a schedule on the cost model.

    An op starts ``same_stream_edge_us`` after its predecessor on the stream, ``cross_stream_edge_us`` after each
    producer that it waits for, and ``fork_us`` after the beginning if it waits for ``FORK``, whichever is latest, and
    when the front end gets to it. Edges between streams grow with the number of streams.

    Args:
        schedule: what to run.
        costs: of each op.
        profile: the device.
        captured: whether it runs as a CUDA graph, or launched op by op.

    Returns:
        One slice per launch, in launch order. Two empty slices on stream 0 mark the moments of ``FORK`` (time 0), if a
        launch waits for it, and of ``JOIN``, if that waits for any op: the end of stream 0's last op, or ``join_us``
        after the last end that the join waits for, whichever is later. The makespan thus includes both.

    Raises:
        ScheduleError: ops wait for each other, or for an op that is not launched.

    Example:
        >>> from autostream.ir import Launch
        >>> profile = DeviceProfile("GPU", 132, 4.8e6, {}, 2.0, 1.0, 2.0, 0.5, 0.5, "table")
        >>> costs = {name: OpCost(10.0, 0.4, 0.1, "roofline") for name in "ab"}
        >>> alone = Schedule("sequential", 1, (Launch("a", 0), Launch("b", 0)))
        >>> simulate(alone, costs, profile).makespan_us
        21.0
        >>> beside = Schedule("critical_path", 2, (Launch("a", 0), Launch("b", 1, waits=(FORK,))), join_waits=("b",))
        >>> simulate(beside, costs, profile).makespan_us
        11.0
    """
    edges = _edges(schedule, profile.over(schedule.streams))
    device = _Device(costs, dispatch_us=profile.dispatch_us if captured else 0.0)
    device.run(edges, {} if captured else _issued(schedule, profile))
    for name, before in edges.items():
        never = [other for other in before if other not in device.ends]
        if never:
            raise ScheduleError(f"{name} would never start: it waits for {never[0]}, which is not launched earlier")
    streams = schedule.stream_of
    return Timeline(tuple(Slice(name, streams.get(name, 0), device.starts[name], device.ends[name]) for name in edges))


def run_us(schedule: Schedule, costs: Costs, profile: DeviceProfile, *, captured: bool = True) -> float:
    """What a run takes, µs: the makespan and, as a CUDA graph, what a replay takes besides.

    Example:
        >>> from autostream.ir import Launch
        >>> profile = DeviceProfile("GPU", 132, 4.8e6, {}, 2.0, 1.0, 2.0, 0.5, 0.5, "table", replay_us=1.5)
        >>> run_us(Schedule("sequential", 1, (Launch("a", 0),)), {"a": OpCost(10.0, 0.4, 0.1, "roofline")}, profile)
        11.5
    """
    makespan_us = simulate(schedule, costs, profile, captured=captured).makespan_us
    return makespan_us + replay_us(profile, captured)


def replay_us(profile: DeviceProfile, captured: bool) -> float:
    """What a run takes whatever its ops are, µs."""
    return profile.replay_us if captured else 0.0


def _edges(schedule: Schedule, profile: DeviceProfile) -> dict[str, dict[str, float]]:
    """The launches in order, between ``FORK`` and ``JOIN`` where there are side streams to fork and join."""
    edges: dict[str, dict[str, float]] = {}
    if any(FORK in launch.waits for launch in schedule.launches):
        edges[FORK] = {}
    last: dict[int, str] = {}
    for launch in schedule.launches:
        before = {name: profile.fork_us if name == FORK else profile.cross_stream_edge_us for name in launch.waits}
        if launch.stream in last:
            before[last[launch.stream]] = profile.same_stream_edge_us
        edges[launch.op] = before
        last[launch.stream] = launch.op
    if schedule.join_waits:
        edges[JOIN] = dict.fromkeys(schedule.join_waits, profile.join_us) | ({last[0]: 0.0} if 0 in last else {})
    return edges


def _issued(schedule: Schedule, profile: DeviceProfile) -> Mapping[str, float]:
    """When the host has launched each op, µs."""
    return {launch.op: at * profile.launch_us for at, launch in enumerate(schedule.launches)}


_MARK = OpCost(0.0, 0.0, 0.0, "roofline")
"""What ``FORK`` and ``JOIN`` take."""

_MARKS = frozenset({FORK, JOIN})


@dataclass(slots=True)
class _Device:
    """Runs ops that are ready, together. ``now`` is the time, ``done`` the work each running op has seen done, µs.

    ``free`` is when the front end can start the next kernel, ``dispatch_us`` what it needs for one.
    """

    costs: Costs
    dispatch_us: float
    now: float = 0.0
    free: float = 0.0
    done: float = 0.0
    starting: list[tuple[float, int, str]] = field(default_factory=list)
    running: list[tuple[float, int, str]] = field(default_factory=list)
    starts: dict[str, float] = field(default_factory=dict)
    ends: dict[str, float] = field(default_factory=dict)

    def run(self, edges: Edges, issued: Mapping[str, float]) -> None:
        """Run everything in ``edges`` that becomes ready; earlier entries go first where moments coincide.

        Nothing starts before it is ``issued``, where it is.
        """
        place = {name: at for at, name in enumerate(edges)}
        missing = {name: len(before) for name, before in edges.items()}
        after: dict[str, list[str]] = {name: [] for name in edges}
        for name, before in edges.items():
            for other in before:
                after.setdefault(other, []).append(name)
        for name, count in missing.items():
            if not count:
                heappush(self.starting, (issued.get(name, 0.0), place[name], name))
        while self.starting or self.running:
            ended = self._next_event()
            for name in after[ended] if ended else ():
                missing[name] -= 1
                if not missing[name]:
                    start = max(self.ends[other] + edge_us for other, edge_us in edges[name].items())
                    heappush(self.starting, (max(start, issued.get(name, 0.0)), place[name], name))

    def _next_event(self) -> str | None:
        """Let the next op end, and return it, or the next one start."""
        slowdown = self._slowdown()
        end = self.now + (self.running[0][0] - self.done) * slowdown if self.running else inf
        if self.starting and (start := self._next_start()) < end:
            _, place, name = heappop(self.starting)
            # alone, an op takes exactly its duration, whatever was before: the clock of work restarts
            self.done = self.done + (start - self.now) / slowdown if self.running else 0.0
            self.now = self.starts[name] = start
            if name not in _MARKS:
                self.free = start + self.dispatch_us
            heappush(self.running, (self.done + self._cost(name).duration_us, place, name))
            return None
        self.done, _, name = heappop(self.running)
        self.now = self.ends[name] = max(self.now, end)
        return name

    def _next_start(self) -> float:
        ready, _, name = self.starting[0]
        return ready if name in _MARKS else max(ready, self.free)

    def _slowdown(self) -> float:
        running = [self._cost(name) for _, _, name in self.running]
        return max(1.0, sum(cost.sm_share for cost in running), sum(cost.bandwidth_share for cost in running))

    def _cost(self, name: str) -> OpCost:
        return _MARK if name in _MARKS else self.costs[name]
