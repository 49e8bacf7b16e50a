"""Local search: changes to the best schedule of the other policies, as long as the simulator says it gets no slower.

    for 2, 3, 4, … streams:  the best so far, critical_path, path_cover ─▶ the fastest ─▶ change, simulate, accept? ─▶ …
                                                                                             ▲                   │
                                                                                             └───────────────────┘

1. Coarsen: chains of short ops move as one (:mod:`~autostream.scheduling.coarsen`). Collectives stay on a stream of
   their own (:mod:`~autostream.scheduling.communication`).
2. Start from the fastest schedule known for this number of streams or fewer.
3. Make a random change: give a chain the stream of another, or any stream; swap the streams of two chains, or of all
   chains of two streams after some point; launch a chain earlier or later. Half of the changes are at random chains,
   half on the *critical path* of the run: at a chain and the one it waited for, back from the last end. Only these can
   make the run shorter (Van Laarhoven, Aarts & Lenstra 1992, "Job shop scheduling by simulated annealing"), unless
   critical ops share the device with others, hence the other half.
4. Accept the change if the run becomes no longer. So the search crosses plateaus, which is what matters (Selman,
   Levesque & Mitchell 1992, "A new method for solving hard satisfiability problems"); on graphs of this size neither
   annealing nor late acceptance found better schedules in as many steps.

With a memory budget, the bytes above it are compared before the time, and the search also starts from launch orders
that need less memory (:mod:`~autostream.scheduling.postpone`).

The same arguments give the same result. So effort is counted in simulated events, :data:`EVENTS_PER_S` for each second,
which a current machine does in less time; only a slower one stops by the clock, and none does with collectives, as all
processes have to make the same schedule. The effort for a number of streams does not depend on how many more are
allowed, and the search for more streams starts from the result for fewer, so more streams never give a slower schedule.
Only if a graph is so large that there is no time for all numbers of streams, the largest alone is searched.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import inf, isinf
from random import Random

from autostream.ir import FORK, Assignment, Costs, Decision, DeviceProfile, OpGraph, Schedule, Timeline
from autostream.scheduling.coarsen import Coarse, coarsen, expand
from autostream.scheduling.communication import followers_last, hold_back, placed_apart, set_apart
from autostream.scheduling.peak import Footprint
from autostream.scheduling.policies.critical_path import critical_path
from autostream.scheduling.policies.path_cover import path_cover
from autostream.scheduling.policies.sequential import sequential
from autostream.scheduling.postpone import MAX_SLACK_SHARE, delayed, in_program_order, postponed
from autostream.scheduling.simulate import simulate
from autostream.scheduling.synchronize import synchronize

STEPS = (2, 3, 4, 6, 8, 12, 16)
"""The numbers of streams that are searched, up to the number allowed and to the most that a policy would use.

For the numbers between, only the schedules of the other policies are compared."""

EVENTS_PER_S = 100_000
"""Launches and dependencies to synchronize and simulate for each second of effort: a third of what a core of 2020
does."""

SECONDS = 3.0

_PATIENCE = 400
"""Changes in a row without a gain after which the search stops; the number of chains, if there are more."""

_POLICIES = (critical_path, path_cover)

_LEAST = len(_POLICIES) * (STEPS[-1] - 1)
"""Simulations that the schedules of the other policies take, over all numbers of streams."""

_REORDERED = 2
"""Simulations that one more launch order with less memory costs: to find it, and to simulate it."""

SLACK = 0.03
"""How much longer than its original a variant may take, as a share: the simulator is no more exact."""

_MOST_CHANGES = 4
_MISSES = 200
"""Attempts in a row without a new variant after which no more are generated."""

Placement = tuple[Sequence[str], Mapping[str, int]]
"""The launch order of chains, and their streams."""


def search(
    graph: OpGraph,
    costs: Costs,
    profile: DeviceProfile,
    streams: int,
    pinned: frozenset[str],
    seconds: float = SECONDS,
    seed: int = 0,
    captured: bool = True,
    room_bytes: float = inf,
) -> tuple[Assignment, ...]:
    """The fastest assignment found for one stream, for two, and so on: only those better than the one before.

    As simulated, the last is never slower than those of the other policies that fit into ``room_bytes``.

    Args:
        graph: V ops and E dependencies.
        costs: of each op.
        profile: of the device.
        streams: the largest number of streams.
        pinned: ops that must be on stream 0.
        seconds: effort: ``seconds * EVENTS_PER_S / (V + E)`` simulations for all numbers of streams together, or
            ``seconds * EVENTS_PER_S / (2 V + E)`` with a limit on memory. If these are too few for all numbers,
            ``streams`` alone is searched.
        seed: of the random choices.
        captured: whether the result will run as a CUDA graph, or launched op by op.
        room_bytes: the most memory in use at a time, as simulated with launches that use up their slack; the result
            needs more only if no schedule was found that does not.

    Example:
        >>> from autostream.ir import Op, OpCost
        >>> ops = {name: Op(name, "f", (name,), frozenset(), frozenset({name})) for name in "abcd"}
        >>> costs = {name: OpCost(9.0, 0.1, 0.1, "roofline") for name in ops}
        >>> profile = DeviceProfile("GPU", 132, 4.8e6, {}, 2.0, 1.0, 2.0, 1.0, 1.0, "table")
        >>> *_, found = search(OpGraph(ops, (), {}, (), "cuda:0"), costs, profile, 2, frozenset())
        >>> found.streams, sorted(found.stream.values())
        (2, [0, 0, 1, 1])
    """
    space = _Space(graph, costs, profile, coarsen(graph, costs, profile, pinned), captured, room_bytes)
    best = start = space.by_policy(sequential, 1)
    found = [space.assignment(best, _gain(best, start))]
    deadline = inf if graph.collectives else time.perf_counter() + seconds
    events = len(graph.ops) + len(graph.dependencies) + (0 if isinf(room_bytes) else len(graph.ops))
    simulations = int(seconds * EVENTS_PER_S / max(events, 1))
    steps = space.steps() if simulations >= _LEAST else (streams,)
    counts = range(steps[0], steps[-1] + 1) if steps else ()
    left = simulations - len(_POLICIES) * len(counts)
    changes, owed = left // max(len(steps), 1), 0  # orders that need less memory take their effort from the changes
    for count in (count for count in counts if count <= streams):
        pairs = [(best, start)]
        for policy in _POLICIES:
            plan = space.by_policy(policy, count)
            smaller = list(space.with_less_memory(plan)) if left > 0 else []
            left, owed = left - _REORDERED * len(smaller), owed + _REORDERED * len(smaller)
            pairs += ((each, each) for each in (plan, *smaller))
        plan, origin = min(pairs, key=lambda pair: pair[0].rank)
        if count in steps:
            effort = max(0, min(changes - owed, left))
            left, owed = left - effort, max(0, owed - changes)
            plan = space.climb(plan, count, effort, Random(f"{seed}, {count} streams"), deadline)
        if plan.rank < best.rank:
            best, start = plan, origin
            found.append(space.assignment(best, _gain(best, start)))
    return tuple(found)


def variants(
    graph: OpGraph,
    costs: Costs,
    profile: DeviceProfile,
    schedule: Schedule,
    streams: int,
    pinned: frozenset[str],
    seed: int = 0,
    captured: bool = True,
    room_bytes: float = inf,
) -> Iterator[Assignment]:
    """Assignments that differ from a schedule in a few changes and may be faster when measured, each once.

    Args:
        graph: of the ops.
        costs: of each op.
        profile: of the device.
        schedule: the schedule to change.
        streams: the largest number of streams.
        pinned: ops that must be on stream 0.
        seed: of the random choices.
        captured: whether the results will run as CUDA graphs.
        room_bytes: the most memory in use at a time, as for :func:`search`, unless the schedule itself needs more.

    Example:
        >>> from autostream.ir import Op, OpCost
        >>> ops = {name: Op(name, "f", (name,), frozenset(), frozenset({name})) for name in "abcd"}
        >>> graph = OpGraph(ops, (), {}, (), "cuda:0")
        >>> costs = {name: OpCost(9.0, 0.1, 0.1, "roofline") for name in ops}
        >>> profile = DeviceProfile("GPU", 132, 4.8e6, {}, 2.0, 1.0, 2.0, 1.0, 1.0, "table")
        >>> pairs = synchronize(graph, critical_path(graph, costs, profile, 2, frozenset()))
        >>> found = variants(graph, costs, profile, pairs, 3, frozenset())
        >>> sorted(next(found).stream.values())[-1] <= 2
        True
    """
    space = _Space(graph, costs, profile, coarsen(graph, costs, profile, pinned), captured, room_bytes)
    start = space.plan_of(schedule)
    random, seen, misses = Random(f"{seed}, variants"), {_key(start.order, start.stream)}, 0
    while misses < _MISSES:
        misses += 1
        draft = start
        for _ in range(random.randint(1, _MOST_CHANGES)):
            order, stream = space.changed(draft, streams, random)
            draft = replace(draft, order=tuple(order), by_start=tuple(order), stream=stream)
        if (key := _key(draft.order, draft.stream)) in seen:
            continue
        seen.add(key)
        plan = space.simulated(Assignment("search", draft.streams, draft.order, draft.stream))
        if plan.makespan_us <= (1 + SLACK) * start.makespan_us and plan.excess_bytes <= start.excess_bytes:
            misses = 0
            yield space.assignment(plan, f"{start.policy} with a few changes: measured, not predicted, to be faster")


@dataclass(frozen=True, slots=True)
class _Plan:
    """One assignment of chains, and its simulated run.

    Attributes:
        policy: the policy of the assignment that the search started from.
        order, stream: of the chains.
        by_start: the chains in the order in which they start, an equally good launch order.
        makespan_us: how long the run takes, µs.
        waits: the number of waits.
        critical: the chains on the critical path of the run, from the last back, each with the chain it waited for.
        excess_bytes: the memory that it needs above the limit.
    """

    policy: str
    order: tuple[str, ...]
    by_start: tuple[str, ...]
    stream: Mapping[str, int]
    makespan_us: float
    waits: int
    critical: tuple[tuple[str, str], ...]
    excess_bytes: float = 0.0

    @property
    def streams(self) -> int:
        return max(self.stream.values(), default=0) + 1

    @property
    def cost(self) -> tuple[float, float]:
        """What no accepted change makes larger: the excess, then the makespan."""
        return self.excess_bytes, self.makespan_us

    @property
    def rank(self) -> tuple[float, float, int]:
        """What the search minimizes: the cost, then the number of waits."""
        return *self.cost, self.waits


@dataclass(frozen=True)
class _Space:
    """The search space: makes, changes and simulates plans for a graph."""

    graph: OpGraph
    costs: Costs
    profile: DeviceProfile
    coarse: Coarse
    captured: bool
    room_bytes: float = inf

    @cached_property
    def footprint(self) -> Footprint:
        """The memory of the ops."""
        return Footprint(self.graph)

    @cached_property
    def apart(self) -> tuple[frozenset[str], frozenset[str]]:
        """Chains of collectives, and those that follow them, with several streams."""
        return placed_apart(self.coarse.graph, 2, self.coarse.pinned)

    def steps(self) -> Sequence[int]:
        """The numbers of streams up to the most that a policy would use, whatever is allowed."""
        used = max(self._assigned(policy, STEPS[-1]).streams for policy in _POLICIES)
        return [count for fewer, count in pairwise((1, *STEPS)) if fewer < used]

    def by_policy(self, policy: Callable[..., Assignment], streams: int) -> _Plan:
        """The plan of another policy."""
        return self.simulated(self._assigned(policy, streams))

    def _assigned(self, policy: Callable[..., Assignment], streams: int) -> Assignment:
        return policy(self.coarse.graph, self.coarse.costs, self.profile, streams, self.coarse.pinned)

    def with_less_memory(self, plan: _Plan) -> Iterator[_Plan]:
        """If a plan exceeds the memory limit, plans with the same streams in launch orders that may need less."""
        if plan.excess_bytes > 0:
            schedule, timeline = self.run(Assignment(plan.policy, plan.streams, plan.order, plan.stream))
            edge_us = self.profile.over(plan.streams).cross_stream_edge_us
            for late in (postponed(self.graph, schedule, timeline, edge_us), in_program_order(self.graph, schedule)):
                yield self.plan_of(synchronize(self.graph, late))

    def plan_of(self, schedule: Schedule) -> _Plan:
        """The plan of a schedule of ops; each chain is where its first op is."""
        stream = {launch.op: launch.stream for launch in schedule.launches if launch.op in self.coarse.chains}
        return self.simulated(Assignment(schedule.policy, schedule.streams, tuple(stream), stream))

    def run(self, chains: Assignment) -> tuple[Schedule, Timeline]:
        """The schedule of an assignment of chains, and its simulated run."""
        schedule = synchronize(self.graph, expand(self.coarse, chains))
        return schedule, simulate(schedule, self.costs, self.profile, captured=self.captured)

    def needed_bytes(self, schedule: Schedule, timeline: Timeline) -> int:
        """The most memory in use at a time if launches use up their slack."""
        edge_us = self.profile.over(schedule.streams).cross_stream_edge_us
        return self.footprint.live_bytes(delayed(schedule, timeline, edge_us, MAX_SLACK_SHARE))

    def simulated(self, chains: Assignment, worth_us: float = inf) -> _Plan:
        """The plan of an assignment of chains; its memory is not computed if it takes longer than ``worth_us``."""
        schedule, timeline = self.run(chains)
        excess = inf
        if isinf(self.room_bytes):
            excess = 0.0
        elif timeline.makespan_us <= worth_us:  # computing its memory takes about as long as the simulation
            excess = max(0.0, self.needed_bytes(schedule, timeline) - self.room_bytes)
        start = timeline.starts
        by_start = tuple(sorted(chains.order, key=start.__getitem__))
        critical = tuple(_critical(schedule, timeline, self.coarse))
        return _Plan(
            policy=chains.policy,
            order=chains.order,
            by_start=by_start,
            stream=chains.stream,
            makespan_us=timeline.makespan_us,
            waits=schedule.wait_count,
            critical=critical,
            excess_bytes=excess,
        )

    def climb(self, plan: _Plan, streams: int, changes: int, random: Random, deadline: float) -> _Plan:
        """The best plan after a number of changes, each accepted if it made the cost no larger."""
        best, seen = plan, {_key(plan.order, plan.stream): plan}
        idle = 0
        for _ in range(changes):
            if idle == max(_PATIENCE, len(plan.order)) or time.perf_counter() > deadline:
                break
            idle += 1
            order, stream = self.changed(plan, streams, random)
            other = seen.get(key := _key(order, stream))
            if other is None:
                chains = Assignment(plan.policy, max(stream.values()) + 1, tuple(order), stream)
                other = seen[key] = self.simulated(chains, inf if plan.excess_bytes else plan.makespan_us)
            if other.cost <= plan.cost:
                plan = other
            if other.rank < best.rank:
                best, idle = other, 0
        return best

    def changed(self, plan: _Plan, streams: int, random: Random) -> Placement:
        """The launch order and streams of a plan after one random change."""
        apart, following = self.apart if streams > 1 else (frozenset(), frozenset())
        guided = plan.critical and random.random() < 0.5
        one, other = random.choice(plan.critical) if guided else random.choices(plan.order, k=2)
        change = random.choice((_follow, _lead, _swap, _swap_streams, _shift))
        order, stream = change(plan, self.coarse.graph, one, other, streams - bool(apart), random)
        stream = {**stream, **dict.fromkeys(self.coarse.pinned, 0)}
        if apart:  # a change may have taken an op to their stream, or brought back one more
            stream = {name: min(at, streams - 2) for name, at in stream.items()}
            if not hold_back(plan.order, plan.stream, following):
                order = followers_last(order, following)
            return order, set_apart(stream, apart)
        return order, _without_gaps(stream)

    def assignment(self, plan: _Plan, reason: str) -> Assignment:
        """A plan as the policy's result, with one decision for the whole: reasons for single ops no longer hold."""
        whole = Decision("", f"{plan.streams} stream{'s' * (plan.streams > 1)}", reason)
        return expand(self.coarse, Assignment("search", plan.streams, plan.order, plan.stream, (whole,)))


def _gain(plan: _Plan, start: _Plan) -> str:
    """How much better a plan is than the one that the search started from."""
    if plan.excess_bytes < start.excess_bytes:
        return f"needs less memory than by {start.policy}, which exceeds the budget"
    if (gain_us := round(start.makespan_us - plan.makespan_us, 1)) > 0:
        return f"{gain_us:.1f} µs less than by {start.policy}"
    fewer = f", with {plan.waits} waits instead of {start.waits}" if plan.waits < start.waits else ""
    return f"as fast as by {start.policy}{fewer}"


def _critical(schedule: Schedule, timeline: Timeline, coarse: Coarse) -> Iterator[tuple[str, str]]:
    """The critical path of a run, from the last end back: each chain with the one that it waited for last."""
    end = timeline.ends
    before: dict[str, list[str]] = {}
    last: dict[int, str] = {}
    for launch in schedule.launches:
        before[launch.op] = [op for op in (*launch.waits, last.get(launch.stream, FORK)) if op != FORK]
        last[launch.stream] = launch.op
    first = {name: head for head, chain in coarse.chains.items() for name in chain}
    name = max(before, key=end.__getitem__, default="")
    while name:
        producer = max(before[name], key=end.__getitem__, default="")
        if producer and first[producer] != first[name]:
            yield first[name], first[producer]
        name = producer


def _follow(plan: _Plan, graph: OpGraph, one: str, other: str, streams: int, random: Random) -> Placement:
    """Give a chain the stream of another; a random one, if they have the same."""
    same = plan.stream[one] == plan.stream[other]
    return plan.by_start, {**plan.stream, one: random.randrange(streams) if same else plan.stream[other]}


def _lead(plan: _Plan, graph: OpGraph, one: str, other: str, streams: int, random: Random) -> Placement:
    """Give the other chain the stream of the first."""
    return _follow(plan, graph, other, one, streams, random)


def _swap(plan: _Plan, graph: OpGraph, one: str, other: str, streams: int, random: Random) -> Placement:
    """Swap the streams of two chains."""
    return plan.by_start, {**plan.stream, one: plan.stream[other], other: plan.stream[one]}


def _swap_streams(plan: _Plan, graph: OpGraph, one: str, other: str, streams: int, random: Random) -> Placement:
    """Swap the chains of two streams from some chain on."""
    here, there = plan.stream[one], random.randrange(streams)
    swap = {here: there, there: here}
    later = plan.by_start[plan.by_start.index(one) :]
    return plan.by_start, {**plan.stream, **{name: swap.get(plan.stream[name], plan.stream[name]) for name in later}}


def _shift(plan: _Plan, graph: OpGraph, one: str, other: str, streams: int, random: Random) -> Placement:
    """Launch a chain at a random position between the last that it depends on and the first that depends on it."""
    rest = [name for name in plan.by_start if name != one]
    position = {name: at for at, name in enumerate(rest)}
    last = max((position[name] for name in graph.digraph.predecessors(one)), default=-1)
    first = min((position[name] for name in graph.digraph.successors(one)), default=len(rest))
    rest.insert(random.randint(last + 1, first), one)
    return rest, plan.stream


def _without_gaps(stream: Mapping[str, int]) -> dict[str, int]:
    """The same streams, numbered without gaps."""
    number = {used: at for at, used in enumerate(sorted(set(stream.values())))}
    return {name: number[at] for name, at in stream.items()}


def _key(order: Sequence[str], stream: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple((name, stream[name]) for name in order)
