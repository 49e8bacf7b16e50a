"""Explanation of a report as values, which text, JSON and the HTML page show alike.

speedup, and against what          Gain, Spread
upper bounds of the speedup        Ceiling
where the time is lost             Reason, with its share of the lost time
which ops overlap                  Overlap
why an op is on its stream         placements
peak memory                        Memory
cost of the memory budget          KeptOut, and a Reason
what to try                        advice
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING

from autostream.ir import Candidate, Costs, DeviceProfile, Limit, Schedule
from autostream.reporting.advice import advise
from autostream.reporting.memory import KeptOut, Memory, best_kept_out, kept_out, memory_of
from autostream.reporting.placements import placements
from autostream.reporting.summary import Summary, baselines, gain, named
from autostream.reporting.tables import count, few, us
from autostream.scheduling.lost_time import Breakdown, Cause, Chain, break_down, gap_us, wait_us
from autostream.scheduling.overlap import Overlap, concurrency, longest_overlaps
from autostream.scheduling.policies.sequential import one_stream
from autostream.scheduling.simulate import replay_us, run_us

if TYPE_CHECKING:
    from autostream.reporting.report import Report

FULL = 0.95
"""An op with this share of the multiprocessors leaves no room for a concurrent one."""

ERRORS = {"measured": 0.10, "roofline": 0.35}
"""Relative error of predictions by the source of the costs: four of five workloads of the inference suite were within
it on an H200 (``docs/cost-model.md``)."""

REALIZED = {"measured": 0.6, "roofline": 0.4}
"""The least share of a predicted gain over one stream (of what exceeds 1×) that was measured, likewise. Concurrent ops
slow each other down more than the model predicts."""

_COMPANIES = 5


@dataclass(frozen=True, slots=True)
class Gain:
    """Speedup of the chosen schedule over another candidate.

    Attributes:
        against: the other one.
        times: the speedup.
        own_us: time of the chosen schedule, µs.
        other_us: time of the other one, µs.
        measured: whether both were measured; else both are simulated.
    """

    against: str
    times: float
    own_us: float
    other_us: float
    measured: bool


@dataclass(frozen=True, slots=True)
class Spread:
    """The range of a prediction, given the errors of the estimates.

    Attributes:
        error: the relative error.
        costs: source of the ops' costs.
        edges: source of the times of edges, forks, joins, launches and replays; measured ones are not varied.
        realized: the least share of the gain over one stream that is realized.
        us: the least and the largest time, µs.
        times: the least and the largest speedup over one stream; ``None`` where one stream was chosen.
    """

    error: float
    costs: str
    edges: str
    realized: float
    us: tuple[float, float]
    times: tuple[float, float] | None


@dataclass(frozen=True, slots=True)
class Ceiling:
    """An upper bound of the speedup of any schedule.

    Attributes:
        why: the reason.
        us: lower bound of the time, µs, without the constant cost of a replay.
        times: the speedup over one stream at that time.
    """

    why: str
    us: float
    times: float


@dataclass(frozen=True, slots=True)
class Reason:
    """One cause of the time by which a schedule over K streams exceeds 1/K of the time of one.

    Attributes:
        cause: its name.
        us: the time that it adds, µs; negative where the device is faster than predicted.
        share: of all lost time.
        why: which ops, and how many.
    """

    cause: str
    us: float
    share: float
    why: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """The explanation of one report.

    Attributes:
        gains: speedups of the chosen schedule over the sequential ones; measured ones first.
        spread: range of the prediction; ``None`` where the chosen schedule was measured.
        ceilings: upper bounds of the speedup, the tightest first.
        explained: the schedule that the reasons are about: a faster one that the memory budget excludes, if there is
            one; else the chosen one, or the best over several streams where one stream was chosen; ``None`` where there
            is none.
        ideal_us: time of that schedule if all its streams were always busy, µs.
        reasons: why it takes longer, the greatest first; with ``ideal_us`` they add up to its time. Where the memory
            budget excludes it, the budget is one of them, and they add up to the time of what runs instead.
        concurrency: simulated µs by the number of ops that run at once.
        companies: the ops that overlap the longest, and with which.
        placements: why each op is on its stream, by name; empty for one stream.
        memory: peak memory of the chosen schedule.
        kept_out: a faster schedule that the memory budget excludes, if there is one.
        advice: what to try, the most promising first.
    """

    gains: tuple[Gain, ...]
    spread: Spread | None
    ceilings: tuple[Ceiling, ...]
    explained: str | None
    ideal_us: float | None
    reasons: tuple[Reason, ...]
    concurrency: Mapping[int, float]
    companies: tuple[Overlap, ...]
    placements: Mapping[str, str]
    memory: Memory
    kept_out: KeptOut | None
    advice: tuple[str, ...]


def explanation_of(report: Report, numbers: Summary | None) -> Explanation | None:
    """Explain a report; ``None`` where nothing was scheduled.

    Args:
        report: of one signature.
        numbers: its summary.
    """
    graph, chosen, profile, costs = report.graph, report.chosen, report.profile, report.costs
    if graph is None or chosen is None or profile is None or numbers is None:
        return None
    explained = best_kept_out(report) or (chosen if chosen.schedule.streams > 1 else best_rival(report, chosen))
    chain, alone = numbers.critical_path, one_stream(graph)
    sequential_us = run_us(alone, costs, profile, captured=chosen.captured)
    ceilings = _ceilings(numbers, chain, sequential_us, profile, chosen.captured)
    parts = None
    if explained:
        parts = break_down(graph, explained.schedule, costs, profile, captured=explained.captured)
    return Explanation(
        gains=tuple(_gains(report, chosen)),
        spread=spread_of(chosen, alone, costs, profile),
        ceilings=ceilings,
        explained=named(explained.schedule) if explained else None,
        ideal_us=parts.ideal_us if parts else None,
        reasons=_reasons(report, explained, parts, chain, numbers) if explained and parts else (),
        concurrency=concurrency(report.timeline) if report.timeline else {},
        companies=longest_overlaps(report.timeline, _COMPANIES) if report.timeline else (),
        placements=placements(graph, chosen, report.timeline),
        memory=memory_of(report, graph, chosen),
        kept_out=kept_out(report),
        advice=advise(report, numbers, chain, parts, sequential_us, ceilings[0].times if ceilings else None),
    )


def best_rival(report: Report, chosen: Candidate) -> Candidate | None:
    """The best candidate over several streams, captured if the chosen one is, uncaptured if not."""
    rivals = [c for c in report.candidates if c.schedule.streams > 1 and c.captured == chosen.captured]
    return max(rivals, key=lambda candidate: gain(candidate, chosen), default=None)


def _gains(report: Report, chosen: Candidate) -> Iterator[Gain]:
    for measured in (True, False):
        for other in baselines(report):
            own_us, other_us = (c.measured_us if measured else c.predicted_us for c in (chosen, other))
            if own_us and other_us is not None:
                against = "sequential in a CUDA graph" if other.captured else "sequential"
                yield Gain(against, other_us / own_us, own_us, other_us, measured)


def spread_of(chosen: Candidate, alone: Schedule, costs: Costs, profile: DeviceProfile) -> Spread | None:
    """The range of a prediction; ``None`` where the schedule was measured.

    By simulation with all costs scaled alike: errors of estimates are systematic and do not cancel out. Edges of a
    profile that was not measured here are estimates as well.

    Args:
        chosen: what is predicted.
        alone: the same ops on one stream.
        costs: of the ops.
        profile: of the device.
    """
    if chosen.measured_us is not None or not costs:
        return None
    sources = sorted({cost.source for cost in costs.values()})
    error = max(ERRORS.get(source, ERRORS["roofline"]) for source in sources)
    realized = min(REALIZED.get(source, REALIZED["roofline"]) for source in sources)
    off = (1 - error, 1 + error)
    edges = (1.0,) if profile.source == "measured" else off
    corners = [
        (costs, profile),  # a schedule may take longer with less work as well as with more (Graham 1966)
        *((_scaled(costs, time, room), _slowed(profile, edge)) for time, room, edge in product(off, off, edges)),
    ]
    own_us, one_us = (
        [run_us(schedule, *corner, captured=chosen.captured) for corner in corners]
        for schedule in (chosen.schedule, alone)
    )
    times = [one / own if own else 1.0 for one, own in zip(one_us, own_us, strict=True)]
    least = min(1 + realized * (min(times) - 1), min(times))
    gains = (least, max(times)) if chosen.schedule.streams > 1 else None
    return Spread(error, "/".join(sources), profile.source, realized, (min(own_us), max(own_us)), gains)


def _scaled(costs: Costs, time: float, room: float) -> Costs:
    return {
        name: replace(
            cost,
            duration_us=cost.duration_us * time,
            sm_share=min(cost.sm_share * room, 1.0),
            bandwidth_share=min(cost.bandwidth_share * room, 1.0),
        )
        for name, cost in costs.items()
    }


def _slowed(profile: DeviceProfile, times: float) -> DeviceProfile:
    """The device with the times of edges, forks, joins, launches and replays scaled."""
    return replace(
        profile,
        same_stream_edge_us=profile.same_stream_edge_us * times,
        cross_stream_edge_us=profile.cross_stream_edge_us * times,
        per_stream_us=profile.per_stream_us * times,
        fork_us=profile.fork_us * times,
        join_us=profile.join_us * times,
        dispatch_us=profile.dispatch_us * times,
        launch_us=profile.launch_us * times,
        replay_us=profile.replay_us * times,
    )


def _ceilings(
    numbers: Summary, chain: Chain, sequential_us: float, profile: DeviceProfile, captured: bool
) -> tuple[Ceiling, ...]:
    """From lower bounds of the time of any schedule."""
    if numbers.work_us <= 0:
        return ()
    ops, constant_us = len(numbers.slack_us), replay_us(profile, captured)
    if numbers.width <= 1:
        why = "the ops form a chain (width 1): nothing can run beside anything else"
        return (Ceiling(why, sequential_us - constant_us, 1.0),)
    launch_us = profile.dispatch_us if captured else profile.launch_us
    # ``width`` chains cover all ops (Dilworth); gaps are within chains only.
    chains_us = numbers.work_us + (ops - numbers.width) * gap_us(profile)
    in_line = f"{count(len(chain.ops), 'op')} are in line, each of which needs the one before"
    floors = {
        in_line if len(chain.ops) > 1 else "the longest op alone": chain.us,
        f"the ops keep {numbers.sm_us / numbers.work_us:.0%} of the device busy one after the other": numbers.sm_us,
        f"they use {numbers.bandwidth_us / numbers.work_us:.0%} of the memory bandwidth": numbers.bandwidth_us,
        f"at most {numbers.width} ops are independent (width)": chains_us / numbers.width,
        f"{count(ops, 'kernel')} start one after the other, {launch_us:.2f} µs apart": (ops - 1) * launch_us,
    }
    ceilings = (
        Ceiling(why, floor_us, sequential_us / (floor_us + constant_us))
        for why, floor_us in floors.items()
        if floor_us > 0
    )
    return tuple(sorted(ceilings, key=lambda ceiling: ceiling.times))


def _reasons(
    report: Report, explained: Candidate, parts: Breakdown, chain: Chain, numbers: Summary
) -> tuple[Reason, ...]:
    """The losses of the explained schedule, and the cost of the memory budget as one more.

    That cost is a difference of predictions: schedules above the budget are not measured.
    """
    losses = {cause.value: (parts.losses_us[cause], why) for cause, why in _whys(report, explained, chain, numbers)}
    runs, predicted_us = explained, parts.predicted_us
    if (budget := kept_out(report)) and report.chosen:
        instead = f"the best within it takes {us(budget.within_us)} instead of {us(budget.predicted_us)}, as predicted"
        losses[Limit.BUDGET.value] = budget.cost_us, f"{budget.why}: {instead}"
        runs, predicted_us = report.chosen, predicted_us + budget.cost_us
    if runs.measured_us is not None:
        losses["not explained by the model"] = runs.measured_us - predicted_us, "measured less predicted"
    lost_us = sum(us for us, _ in losses.values())
    reasons = (
        Reason(cause, us, us / lost_us if lost_us > 0 else 0.0, why) for cause, (us, why) in losses.items() if us
    )
    return tuple(sorted(reasons, key=lambda reason: -reason.us))


def _whys(report: Report, explained: Candidate, chain: Chain, numbers: Summary) -> Iterator[tuple[Cause, str]]:
    assert report.graph is not None
    assert report.profile is not None
    ops, costs, schedule = report.graph.ops, report.costs, explained.schedule
    gaps = f", {us(chain.us - chain.work_us)} of it gaps between them" if chain.us > chain.work_us else ""
    in_line = f"{count(len(chain.ops), 'op')} in line take" if len(chain.ops) > 1 else "the longest op takes"
    yield Cause.CHAIN, f"{in_line} {us(chain.us)}{gaps}"
    beside = f"{count(schedule.streams, 'stream')}, and up to {numbers.width} ops are independent"
    yield Cause.BUSY, f"ops wait until their stream is free: {beside}"
    edge_us = wait_us(report.profile, schedule.streams)
    short = [name for name in ops if costs[name].duration_us < edge_us]
    shorter = f"; {len(short)} of {count(len(ops), 'op')} are shorter than one ({few(short)})" if short else ""
    yield Cause.WAITS, f"{count(schedule.wait_count, 'wait')}, {us(edge_us)} each{shorter}"
    full = [name for name in ops if costs[name].sm_share >= FULL]
    share = sum(costs[name].duration_us for name in full) / numbers.work_us if numbers.work_us else 0.0
    alone = (
        f"{len(full)} of {count(len(ops), 'op')} alone, {share:.0%} of the work ({few(full)})" if full else "none alone"
    )
    yield Cause.MULTIPROCESSORS, f"{alone}; side by side, they ask for more than all of it"
    yield Cause.LAUNCHES, _launches(report, explained, len(ops))
    yield Cause.BANDWIDTH, f"ops side by side ask for more than {report.profile.bandwidth / 1e3:,.0f} GB/s"


def _launches(report: Report, explained: Candidate, ops: int) -> str:
    assert report.profile is not None
    if explained.captured:
        return f"{count(ops, 'kernel')} start {report.profile.dispatch_us:.2f} µs apart, on whatever streams"
    refused = next((f": {refusal.reason}" for refusal in report.refusals if refusal.choice == "not captured"), "")
    return f"the host launches {count(ops, 'op')}, {us(report.profile.launch_us)} each; not captured{refused}"
