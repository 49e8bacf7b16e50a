"""The simulator: when each op of a schedule would run, by the cost model and without a device.

A discrete-event simulation of two shared resources, the multiprocessors and the memory bandwidth. Ops that run at the
same time need their ``sm_share`` of the one and their ``bandwidth_share`` of the other. Where either sum is above 1,
all these ops slow down by the same factor, the larger of the two sums (a fluid model: processor sharing over the
bottleneck). As the factor is common, one clock of *work done* serves all running ops: each ends when that clock has
advanced by its duration (the virtual time of Parekh & Gallager 1993, "A generalized processor sharing approach to flow
control in integrated services networks").

A third resource is the device's front end, which starts one kernel after the other: in a CUDA graph in the order in
which they become ready, otherwise in the order in which the host launches them.

O(L·(K + log L)) for L launches and waits and K streams.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import inf

from autostream.errors import ScheduleError
from autostream.ir import FORK, JOIN, Costs, DeviceProfile, OpCost, Schedule, Slice, Timeline


def simulate(schedule: Schedule, costs: Costs, profile: DeviceProfile, *, captured: bool = True) -> Timeline:
    """Run a schedule on the cost model.

    An op starts ``same_stream_edge_us`` after its predecessor on the stream, ``cross_stream_edge_us`` after each
    producer that it waits for, and ``fork_us`` after the start of the run if it waits for ``FORK``, whichever is
    latest, and not before the front end is free. Edges between streams grow with the number of streams.

    Args:
        schedule: what to run.
        costs: of each op.
        profile: the device.
        captured: whether it runs as a CUDA graph, or launched op by op.

    Returns:
        One slice per launch, in launch order. Empty slices on stream 0 mark ``FORK`` (time 0), if a launch waits for
        it, and ``JOIN``, if that waits for any op: the end of stream 0's last op, or ``join_us`` after the last end
        that the join waits for, whichever is later. So the makespan includes both.

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
    points = _points(schedule, profile.over(schedule.streams), 0.0 if captured else profile.launch_us)
    ops = [_MARK if name in _MARKS else costs[name] for name in points.names]
    starts, ends, missing = _times(points, ops, profile.dispatch_us if captured else 0.0)
    if any(missing):
        raise ScheduleError(_deadlock(points, missing))
    return Timeline(tuple(map(Slice, points.names, points.streams, starts, ends)))


def run_us(schedule: Schedule, costs: Costs, profile: DeviceProfile, *, captured: bool = True) -> float:
    """The time of a run, µs: the makespan and, for a CUDA graph, the overhead of a replay.

    Example:
        >>> from autostream.ir import Launch
        >>> profile = DeviceProfile("GPU", 132, 4.8e6, {}, 2.0, 1.0, 2.0, 0.5, 0.5, "table", replay_us=1.5)
        >>> run_us(Schedule("sequential", 1, (Launch("a", 0),)), {"a": OpCost(10.0, 0.4, 0.1, "roofline")}, profile)
        11.5
    """
    makespan_us = simulate(schedule, costs, profile, captured=captured).makespan_us
    return makespan_us + replay_us(profile, captured)


def replay_us(profile: DeviceProfile, captured: bool) -> float:
    """The overhead of a run besides its ops, µs."""
    return profile.replay_us if captured else 0.0


@dataclass(frozen=True, slots=True)
class _Points:
    """The launches in order, between ``FORK`` and ``JOIN`` where there are side streams to fork and join.

    Attributes:
        names: of the points.
        streams: of each.
        issued: when the host has launched each, µs.
        before: for each, the positions of the points that must have ended when it starts, with the time from that end
            to this start, µs.
        position: by name; points that are waited for but not launched have positions after all others.
    """

    names: Sequence[str]
    streams: Sequence[int]
    issued: Sequence[float]
    before: Sequence[Mapping[int, float]]
    position: Mapping[str, int]


_MARK = OpCost(0.0, 0.0, 0.0, "roofline")
"""The cost of ``FORK`` and ``JOIN``."""

_MARKS = frozenset({FORK, JOIN})


def _points(schedule: Schedule, profile: DeviceProfile, launch_us: float) -> _Points:
    launches, fork_us, cross_us = schedule.launches, profile.fork_us, profile.cross_stream_edge_us
    forks, joins = any(FORK in launch.waits for launch in launches), bool(schedule.join_waits)
    names = [FORK] * forks + [launch.op for launch in launches] + [JOIN] * joins
    streams = [0] * forks + [launch.stream for launch in launches] + [0] * joins
    issued = [0.0] * forks + [at * launch_us for at in range(len(launches))] + [0.0] * joins
    position = {name: at for at, name in enumerate(names)}

    def positions(waits: Sequence[str]) -> Iterable[int]:
        return [position.setdefault(name, len(position)) for name in waits]

    before: list[dict[int, float]] = [{}] * forks
    last: dict[int, int] = {}
    for at, launch in enumerate(launches, forks):
        edges = dict.fromkeys(positions(launch.waits), cross_us)
        if forks and 0 in edges:
            edges[0] = fork_us
        if launch.stream in last:
            edges[last[launch.stream]] = profile.same_stream_edge_us
        before.append(edges)
        last[launch.stream] = at
    if joins:
        before.append(
            dict.fromkeys(positions(schedule.join_waits), profile.join_us) | ({last[0]: 0.0} if 0 in last else {})
        )
    return _Points(names, streams, issued, before, position)


def _times(
    points: _Points, costs: Sequence[OpCost], dispatch_us: float
) -> tuple[list[float], list[float], Sequence[int]]:
    """When each point starts and ends, µs, and for how many others it still waits at the end of the simulation.

    ``done`` is the clock of work done; ``free`` is when the front end can start the next kernel. At equal times, points
    start in launch order.

    Args:
        points: the points to run.
        costs: of each.
        dispatch_us: how long the front end takes to start one.
    """
    before, issued = points.before, points.issued
    sm, bandwidth = [c.sm_share for c in costs], [c.bandwidth_share for c in costs]
    after: list[list[int]] = [[] for _ in points.position]
    for at, edges in enumerate(before):
        for other in edges:
            after[other].append(at)
    missing = list(map(len, before))
    starts, ends = [inf] * len(after), [inf] * len(after)
    starting = [(issued[at], at) for at, count in enumerate(missing) if not count]
    heapify(starting)
    running: list[tuple[float, int]] = []
    now = free = done = 0.0
    while starting or running:
        slowdown = _slowdown(running, sm, bandwidth)
        end = now + (running[0][0] - done) * slowdown if running else inf
        if starting:
            start, at = starting[0]
            dispatched = costs[at] is not _MARK
            if dispatched and start < free:
                start = free
            if start < end:
                heappop(starting)
                # the clock restarts when nothing runs, so an op alone takes exactly its duration
                done = done + (start - now) / slowdown if running else 0.0
                now = starts[at] = start
                if dispatched:
                    free = start + dispatch_us
                heappush(running, (done + costs[at].duration_us, at))
                continue
        done, ended = heappop(running)
        now = ends[ended] = max(now, end)
        for at in after[ended]:
            missing[at] -= 1
            if not missing[at]:
                start = max([ends[other] + edge_us for other, edge_us in before[at].items()])
                heappush(starting, (max(start, issued[at]), at))
    return starts, ends, missing


def _slowdown(running: Sequence[tuple[float, int]], sm: Sequence[float], bandwidth: Sequence[float]) -> float:
    """The factor by which the running ops are slower than alone."""
    if len(running) == 1:
        at = running[0][1]
        return max(1.0, sm[at], bandwidth[at])
    return max(1.0, sum([sm[at] for _, at in running]), sum([bandwidth[at] for _, at in running]))


def _deadlock(points: _Points, missing: Sequence[int]) -> str:
    """The message about the first point that never starts."""
    names, launched = list(points.position), len(missing)
    at = next(at for at, count in enumerate(missing) if count)
    never = next(other for other in points.before[at] if other >= launched or missing[other])
    return f"{names[at]} would never start: it waits for {names[never]}, which is not launched earlier"
