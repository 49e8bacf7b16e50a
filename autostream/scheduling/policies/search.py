"""Local search: change the best schedule that the other policies find, and keep what the simulator says is no slower.

    for 2, 3, 4, … streams:  the best so far, critical_path, path_cover ─▶ the fastest ─▶ change, simulate, keep? ─▶ …
                                                                                             ▲                 │
                                                                                             └─────────────────┘

1. Coarsen: chains of short ops move as one (:mod:`~autostream.scheduling.coarsen`).
2. Start from the fastest of all that is known for as many streams.
3. Make a change: give a chain the stream of another, or any; let two chains trade streams, or two streams trade what
   comes after some point; launch a chain earlier or later. Half of the time at a random place, half of the time where
   the run is *critical*: at a chain and what it waited for, going back from the last end. Nothing else can make the run
   shorter (Van Laarhoven, Aarts & Lenstra 1992, "Job shop scheduling by simulated annealing"), unless the critical ops
   share the device with others, hence the other half.
4. Keep the change if the run becomes no longer. Plateaus are thus crossed, which is what matters (Selman, Levesque &
   Mitchell 1992, "A new method for solving hard satisfiability problems"); on graphs of this size neither annealing nor
   late acceptance found better schedules in as many steps.

Where room is limited, what a plan needs above that comes before its time in all comparisons, and the search starts from
plans in orders that need less (``postpone.py``) as well.

The same arguments give the same result. Effort is therefore counted in simulated events, :data:`EVENTS_PER_S` for each
second asked for, which any machine of these years does in that time; the clock is but a last resort, for one that
does not. The effort for a number of streams does not depend on how many more are allowed, and the search for more
starts from what was found with fewer, so that more streams never make it worse. Only a graph so large that there is no
time to try all numbers gets what is best for the largest alone.
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
from autostream.scheduling.peak import Footprint
from autostream.scheduling.policies.critical_path import critical_path
from autostream.scheduling.policies.path_cover import path_cover
from autostream.scheduling.policies.sequential import sequential
from autostream.scheduling.postpone import MAX_SLACK_SHARE, delayed, in_program_order, postponed
from autostream.scheduling.simulate import simulate
from autostream.scheduling.synchronize import synchronize

STEPS = (2, 3, 4, 6, 8, 12, 16)
"""The numbers of streams that are searched, up to what is allowed and to what any policy would use.

For the numbers between, only the other policies are asked, which takes no search."""

EVENTS_PER_S = 100_000
"""What a second buys, in launches and dependencies that are synchronized and simulated: a third of what a core of 2020
does."""

SECONDS = 3.0

_PATIENCE = 400
"""Changes in a row without a gain after which a number of streams is given up; as many as there are chains, if more."""

_POLICIES = (critical_path, path_cover)

_LEAST = len(_POLICIES) * (STEPS[-1] - 1)
"""Simulations that starting at every number of streams takes."""

_FITTING = 2
"""Simulations' worth of effort that another order takes which may need less memory: to find it, and its own."""

SLACK = 0.03
"""What a variant may take longer than what it is made of, by the simulator, which is not exact to less."""

_MOST_CHANGES = 4
_MISSES = 200
"""Draws in a row that were no variants, after which no more are expected."""

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
) -> Assignment:
    """The fastest assignment found for at most ``streams`` streams; never slower than the other policies', simulated.

    That is, than those of them that fit into the room there is.

    Args:
        graph: V ops and E dependencies.
        costs: of each op.
        profile: of the device.
        streams: the largest number.
        pinned: ops that must be on stream 0.
        seconds: effort: that of ``seconds * EVENTS_PER_S / (V + E)`` simulations, or of fewer, ``/ (2 V + E)``, where
            room is limited, shared by the numbers of streams.
            Where these are too few to try all of these numbers, ``streams`` alone is tried.
        seed: of the random choices.
        captured: whether the result is to run as a CUDA graph, or launched op by op.
        room_bytes: what may be in use at a time, as simulated where launches use up their slack; the result needs more
            only if nothing was found that does not.

    Example:
        >>> from autostream.ir import Op, OpCost
        >>> ops = {name: Op(name, "f", (name,), frozenset(), frozenset({name})) for name in "abcd"}
        >>> costs = {name: OpCost(9.0, 0.1, 0.1, "roofline") for name in ops}
        >>> profile = DeviceProfile("GPU", 132, 4.8e6, {}, 2.0, 1.0, 2.0, 1.0, 1.0, "table")
        >>> found = search(OpGraph(ops, (), {}, (), "cuda:0"), costs, profile, 2, frozenset())
        >>> found.streams, sorted(found.stream.values())
        (2, [0, 0, 1, 1])
    """
    return search_by_streams(graph, costs, profile, streams, pinned, seconds, seed, captured, room_bytes)[-1]


def search_by_streams(
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
    """What :func:`search` finds for one stream, for two, and so on: each one better than the one before it."""
    space = _Space(graph, costs, profile, coarsen(graph, costs, profile, pinned), captured, room_bytes)
    best = start = space.known(sequential, 1)
    found = [space.assignment(best, _gain(best, start))]
    deadline = time.perf_counter() + seconds
    events = len(graph.ops) + len(graph.dependencies) + (0 if isinf(room_bytes) else len(graph.ops))
    simulations = int(seconds * EVENTS_PER_S / max(events, 1))
    steps = space.steps() if simulations >= _LEAST else (streams,)
    counts = range(steps[0], steps[-1] + 1) if steps else ()
    left = simulations - len(_POLICIES) * len(counts)
    changes, owed = left // max(len(steps), 1), 0  # orders that need less memory take their effort from the changes
    for count in (count for count in counts if count <= streams):
        pairs = [(best, start)]
        for policy in _POLICIES:
            known = space.known(policy, count)
            fitting = list(space.fitting(known)) if left > 0 else []
            left, owed = left - _FITTING * len(fitting), owed + _FITTING * len(fitting)
            pairs += ((plan, plan) for plan in (known, *fitting))
        plan, origin = min(pairs, key=lambda pair: pair[0].price)
        if count in steps:
            own = max(0, min(changes - owed, left))
            left, owed = left - own, max(0, owed - changes)
            plan = space.climb(plan, count, own, Random(f"{seed}, {count} streams"), deadline)
        if plan.price < best.price:
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
    """Assignments that a few changes make of a schedule and that may be faster, each once, for the clock to decide.

    Args:
        graph: of the ops.
        costs: of each op.
        profile: of the device.
        schedule: where to start.
        streams: the largest number.
        pinned: ops that must be on stream 0.
        seed: of the random choices.
        captured: whether the results are to run as CUDA graphs.
        room_bytes: what may be in use at a time, as for :func:`search`, unless the schedule itself needs more.

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
    """One assignment of chains, and what the simulator says of it.

    Attributes:
        policy: the policy that it was made by, or that what it was made of was made by.
        order, stream: of the chains.
        by_start: the chains in the order in which they start, which is as good an order.
        makespan_us: how long the run takes, µs.
        waits: how many of them there are.
        critical: chains whose starts decided the makespan, from the last back, each with what it waited for.
        excess_bytes: what it needs above the room there is.
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
    def burden(self) -> tuple[float, float]:
        """What no change may make larger: the excess, and where that is equal the makespan."""
        return self.excess_bytes, self.makespan_us

    @property
    def price(self) -> tuple[float, float, int]:
        """What is to be small: the burden, and of equal ones the number of waits."""
        return *self.burden, self.waits


@dataclass(frozen=True)
class _Space:
    """The plans that there are for a graph."""

    graph: OpGraph
    costs: Costs
    profile: DeviceProfile
    coarse: Coarse
    captured: bool
    room_bytes: float = inf

    @cached_property
    def footprint(self) -> Footprint:
        """Of the ops."""
        return Footprint(self.graph)

    def steps(self) -> Sequence[int]:
        """The numbers of streams up to the first that gives enough to every policy, whatever is allowed."""
        coarse = self.coarse
        given = (coarse.graph, coarse.costs, self.profile, STEPS[-1], coarse.pinned)
        used = max(policy(*given).streams for policy in _POLICIES)
        return [count for fewer, count in pairwise((1, *STEPS)) if fewer < used]

    def known(self, policy: Callable[..., Assignment], streams: int) -> _Plan:
        """The plan of another policy."""
        coarse = self.coarse
        return self.simulated(policy(coarse.graph, coarse.costs, self.profile, streams, coarse.pinned))

    def fitting(self, plan: _Plan) -> Iterator[_Plan]:
        """If a plan needs more than the room there is, the same streams in orders that may need less."""
        if plan.excess_bytes > 0:
            schedule, timeline = self.run(Assignment(plan.policy, plan.streams, plan.order, plan.stream))
            edge_us = self.profile.over(plan.streams).cross_stream_edge_us
            for late in (postponed(self.graph, schedule, timeline, edge_us), in_program_order(self.graph, schedule)):
                yield self.plan_of(synchronize(self.graph, late))

    def plan_of(self, schedule: Schedule) -> _Plan:
        """The plan that a schedule of ops is, with chains where their first ops are."""
        stream = {launch.op: launch.stream for launch in schedule.launches if launch.op in self.coarse.chains}
        return self.simulated(Assignment(schedule.policy, schedule.streams, tuple(stream), stream))

    def run(self, chains: Assignment) -> tuple[Schedule, Timeline]:
        """The schedule that an assignment of chains is, and how it runs."""
        schedule = synchronize(self.graph, expand(self.coarse, chains))
        return schedule, simulate(schedule, self.costs, self.profile, captured=self.captured)

    def needed_bytes(self, schedule: Schedule, timeline: Timeline) -> int:
        """The most that is in use at a time if launches wait for memory as long as they may."""
        edge_us = self.profile.over(schedule.streams).cross_stream_edge_us
        return self.footprint.live_bytes(delayed(schedule, timeline, edge_us, MAX_SLACK_SHARE))

    def simulated(self, chains: Assignment, worth_us: float = inf) -> _Plan:
        """The plan that an assignment of chains is; what takes longer than is worth it is taken to need too much."""
        schedule, timeline = self.run(chains)
        excess = inf
        if isinf(self.room_bytes):
            excess = 0.0
        elif timeline.makespan_us <= worth_us:  # to find out what it needs takes about as long as the simulation
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
        """The best plan that a number of changes lead to, each of which made the burden no larger."""
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
            if other.burden <= plan.burden:
                plan = other
            if other.price < best.price:
                best, idle = other, 0
        return best

    def changed(self, plan: _Plan, streams: int, random: Random) -> Placement:
        """What one change makes of a plan."""
        guided = plan.critical and random.random() < 0.5
        one, other = random.choice(plan.critical) if guided else random.choices(plan.order, k=2)
        change = random.choice((_follow, _lead, _swap, _trade, _shift))
        order, stream = change(plan, self.coarse.graph, one, other, streams, random)
        return order, _without_gaps({**stream, **dict.fromkeys(self.coarse.pinned, 0)})

    def assignment(self, plan: _Plan, reason: str) -> Assignment:
        """A plan as the policy's result. The reasons for each op are gone: they held for what it was made of."""
        whole = Decision("", f"{plan.streams} stream{'s' * (plan.streams > 1)}", reason)
        return expand(self.coarse, Assignment("search", plan.streams, plan.order, plan.stream, (whole,)))


def _gain(plan: _Plan, start: _Plan) -> str:
    """What a plan is better by than the one that it was made of."""
    if plan.excess_bytes < start.excess_bytes:
        return f"needs less memory than by {start.policy}, which exceeds the budget"
    if (gain_us := round(start.makespan_us - plan.makespan_us, 1)) > 0:
        return f"{gain_us:.1f} µs less than by {start.policy}"
    fewer = f", with {plan.waits} waits instead of {start.waits}" if plan.waits < start.waits else ""
    return f"as fast as by {start.policy}{fewer}"


def _critical(schedule: Schedule, timeline: Timeline, coarse: Coarse) -> Iterator[tuple[str, str]]:
    """Chains back from the last end, each with the chain that it started behind: that of its last producer to end."""
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
    """Give a chain another one's stream; any stream, if they have the same."""
    same = plan.stream[one] == plan.stream[other]
    return plan.by_start, {**plan.stream, one: random.randrange(streams) if same else plan.stream[other]}


def _lead(plan: _Plan, graph: OpGraph, one: str, other: str, streams: int, random: Random) -> Placement:
    """The other way round."""
    return _follow(plan, graph, other, one, streams, random)


def _swap(plan: _Plan, graph: OpGraph, one: str, other: str, streams: int, random: Random) -> Placement:
    """Give two chains each other's stream."""
    return plan.by_start, {**plan.stream, one: plan.stream[other], other: plan.stream[one]}


def _trade(plan: _Plan, graph: OpGraph, one: str, other: str, streams: int, random: Random) -> Placement:
    """From a chain on, let its stream and another have each other's chains."""
    here, there = plan.stream[one], random.randrange(streams)
    swap = {here: there, there: here}
    behind = plan.by_start[plan.by_start.index(one) :]
    return plan.by_start, {**plan.stream, **{name: swap.get(plan.stream[name], plan.stream[name]) for name in behind}}


def _shift(plan: _Plan, graph: OpGraph, one: str, other: str, streams: int, random: Random) -> Placement:
    """Launch a chain anywhere between the last that it depends on and the first that depends on it."""
    rest = [name for name in plan.by_start if name != one]
    place = {name: at for at, name in enumerate(rest)}
    after = max((place[name] for name in graph.digraph.predecessors(one)), default=-1)
    until = min((place[name] for name in graph.digraph.successors(one)), default=len(rest))
    rest.insert(random.randint(after + 1, until), one)
    return rest, plan.stream


def _without_gaps(stream: Mapping[str, int]) -> dict[str, int]:
    """The same streams, numbered without gaps."""
    number = {used: at for at, used in enumerate(sorted(set(stream.values())))}
    return {name: number[at] for name, at in stream.items()}


def _key(order: Sequence[str], stream: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple((name, stream[name]) for name in order)
