"""Why K streams are not K times as fast as one: what each cause adds to the time of a schedule.

The schedule is simulated several times, each time without one more cause, down to K streams that are never idle. The
difference between two simulations is the cost of one cause, so the costs add up to the whole:

    predicted ─▶ launches cost ─▶ no contention ─▶ no contention for ─▶ waits as cheap ─▶ as soon as the ─▶ K streams,
                 nothing          for bandwidth    multiprocessors      as gaps           data allow        always busy
             LAUNCHES        BANDWIDTH      MULTIPROCESSORS         WAITS             BUSY             CHAIN

Time that two causes share counts for the one that is removed first. Gaps between the kernels of a stream are no cause,
since one stream has them as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from itertools import accumulate, pairwise

from autostream.ir import Costs, DeviceProfile, OpGraph, Schedule
from autostream.scheduling import structure
from autostream.scheduling.policies.sequential import one_stream
from autostream.scheduling.simulate import replay_us, simulate


class Cause(Enum):
    """Why a schedule takes longer than it might."""

    CHAIN = "chain of data"
    BUSY = "streams are busy"
    WAITS = "waits between streams"
    MULTIPROCESSORS = "ops that fill the device"
    BANDWIDTH = "memory bandwidth"
    LAUNCHES = "launches, one after the other"


@dataclass(frozen=True, slots=True)
class Chain:
    """Ops each of which depends on the one before.

    Attributes:
        ops: their names, in order.
        work_us: their duration, µs.
        us: their duration with the gaps between them, µs.
    """

    ops: tuple[str, ...]
    work_us: float
    us: float


@dataclass(frozen=True, slots=True)
class Breakdown:
    """The components of a schedule's predicted time: ``predicted_us`` is ``ideal_us`` plus the sum of ``losses_us``.

    Attributes:
        predicted_us: time of a run, µs.
        ideal_us: its time if every stream were always busy and ops did not slow each other down, µs.
        losses_us: what each cause adds, µs, 0 or more.
    """

    predicted_us: float
    ideal_us: float
    losses_us: Mapping[Cause, float]

    @property
    def lost_us(self) -> float:
        """All that is lost, µs."""
        return self.predicted_us - self.ideal_us

    def share(self, cause: Cause) -> float:
        """A cause's share of what is lost, 0 to 1."""
        return self.losses_us[cause] / self.lost_us if self.lost_us > 0 else 0.0


def break_down(
    graph: OpGraph, schedule: Schedule, costs: Costs, profile: DeviceProfile, *, captured: bool = True
) -> Breakdown:
    """What each cause adds to the time of a schedule, by six simulations.

    Args:
        graph: the ops.
        schedule: of all of them.
        costs: of all of them.
        profile: the device.
        captured: whether it runs as a CUDA graph.

    Example:
        Two ops that each need three quarters of the device take 12 µs at the same time instead of 8:

        >>> from autostream.ir import FORK, Launch, Op, OpCost
        >>> ops = {name: Op(name, "f", (name,), frozenset(), frozenset({name})) for name in "ab"}
        >>> costs = {name: OpCost(8.0, sm_share=0.75, bandwidth_share=0.1, source="roofline") for name in ops}
        >>> beside = Schedule("path_cover", 2, (Launch("a", 0), Launch("b", 1, waits=(FORK,))), join_waits=("b",))
        >>> free = DeviceProfile("GPU", 132, 4.8e6, {}, 2.0, 0.0, 0.0, 0.0, 0.0, "table")
        >>> parts = break_down(OpGraph(ops, (), {}, (), "cuda:0"), beside, costs, free)
        >>> parts.predicted_us, parts.ideal_us, parts.losses_us[Cause.MULTIPROCESSORS]
        (12.0, 8.0, 4.0)
    """
    no_launches, no_waits = _without_launches(profile), _without_waits(profile)
    no_bandwidth, no_contention = _without_bandwidth(costs), _without_contention(costs)
    ideal_us = simulate(one_stream(graph), costs, profile, captured=captured).makespan_us / schedule.streams
    levels = [
        simulate(schedule, costs, profile, captured=captured).makespan_us,
        *(simulate(schedule, each, no_launches).makespan_us for each in (costs, no_bandwidth, no_contention)),
        simulate(schedule, no_contention, no_waits).makespan_us,
        max(longest_chain(graph, costs, profile).us, ideal_us),
        ideal_us,
    ]
    # Without a cause, other ops may run at the same time and slow each other down: a time may even be longer.
    falling = [*accumulate(levels, min)]
    causes = (Cause.LAUNCHES, Cause.BANDWIDTH, Cause.MULTIPROCESSORS, Cause.WAITS, Cause.BUSY, Cause.CHAIN)
    saved = {cause: before - after for cause, (before, after) in zip(causes, pairwise(falling), strict=True)}
    overhead_us = replay_us(profile, captured)
    return Breakdown(overhead_us + levels[0], overhead_us + falling[-1], {cause: saved[cause] for cause in Cause})


def longest_chain(graph: OpGraph, costs: Costs, profile: DeviceProfile) -> Chain:
    """The longest path of the graph, with the cheapest edge between its ops: no schedule is faster."""
    ops = structure.critical_path(graph, with_gaps(costs, profile))
    work_us = sum(costs[name].duration_us for name in ops)
    return Chain(ops, work_us, work_us + gap_us(profile) * max(len(ops) - 1, 0))


def with_gaps(costs: Costs, profile: DeviceProfile) -> Costs:
    """The costs of ops that are each followed by the cheapest edge."""
    edge_us = gap_us(profile)
    return {name: replace(cost, duration_us=cost.duration_us + edge_us) for name, cost in costs.items()}


def wait_us(profile: DeviceProfile, streams: int) -> float:
    """The cost of a wait for another of so many streams, µs: a shorter op gains nothing on another stream."""
    return profile.over(streams).cross_stream_edge_us


def gap_us(profile: DeviceProfile) -> float:
    """The cheapest edge, µs: the least time from the end of an op to the start of one that depends on it."""
    return min(profile.same_stream_edge_us, profile.cross_stream_edge_us)


def _without_bandwidth(costs: Costs) -> Costs:
    return {name: replace(cost, bandwidth_share=0.0) for name, cost in costs.items()}


def _without_contention(costs: Costs) -> Costs:
    return {name: replace(cost, sm_share=_NONE, bandwidth_share=0.0) for name, cost in costs.items()}


def _without_launches(profile: DeviceProfile) -> DeviceProfile:
    """A device that starts any number of kernels at once."""
    return replace(profile, dispatch_us=0.0)


def _without_waits(profile: DeviceProfile) -> DeviceProfile:
    """A device on which waits cost no more than gaps within a stream, and forks and joins nothing."""
    edge_us = profile.same_stream_edge_us
    profile = _without_launches(profile)
    return replace(profile, cross_stream_edge_us=edge_us, per_stream_us=0.0, fork_us=0.0, join_us=0.0)


_NONE = 1e-9
"""A share of the multiprocessors that is small enough for any number of ops; a share must be above 0."""
