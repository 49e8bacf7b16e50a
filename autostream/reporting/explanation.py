"""What a report answers, as values: every face of it says the same.

how much faster, against what      Gain, Spread
the most that streams could give   Ceiling
why not more                       Reason, with its share of the lost time
what runs beside what              Company
why on this stream                 placements
what holds the memory              Memory
what the memory budget costs       KeptOut, and a Reason
what to try                        advice
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING

from autostream.ir import Candidate, Costs, DeviceProfile, Limit, Schedule
from autostream.reporting.advice import advise
from autostream.reporting.layout import count, few, us
from autostream.reporting.memory import KeptOut, Memory, best_kept_out, kept_out, memory_of
from autostream.reporting.placements import placements
from autostream.reporting.summary import Summary, baselines, gain, named
from autostream.scheduling.losses import Breakdown, Cause, Chain, break_down, gap_us, wait_us
from autostream.scheduling.overlap import Company, companies, concurrency
from autostream.scheduling.policies.sequential import one_stream
from autostream.scheduling.simulate import replay_us, run_us

if TYPE_CHECKING:
    from autostream.reporting.report import Report

FULL = 0.95
"""An op with this share of the multiprocessors leaves no room for another."""

ERRORS = {"measured": 0.10, "roofline": 0.35}
"""How far predictions are off, by the source of the costs: four of five workloads of the inference suite stayed within
this on an H200 (``docs/cost-model.md``)."""

REALIZED = {"measured": 0.6, "roofline": 0.4}
"""How much of a predicted gain over one stream, of what it is above 1×, comes true at least: likewise. Ops disturb each
other more than the model knows."""

_COMPANIES = 5


@dataclass(frozen=True, slots=True)
class Gain:
    """How many times faster than another way to run the same.

    Attributes:
        against: that way.
        times: its time over ours.
        own_us: our time, µs.
        other_us: its time, µs.
        measured: whether a clock has shown both, or the simulator.
    """

    against: str
    times: float
    own_us: float
    other_us: float
    measured: bool


@dataclass(frozen=True, slots=True)
class Spread:
    """What a prediction comes to if what it is made of is less or more than was estimated.

    Attributes:
        error: by this share less or more.
        costs: where the ops' times and their room on the device are from.
        edges: where the times of edges, forks, joins, launches and replays are from; measured ones are not varied.
        realized: the share of the gain over one stream that comes true at least.
        us: the least and the most time, µs.
        times: the least and the most gain over one stream; ``None`` where one stream is what was chosen.
    """

    error: float
    costs: str
    edges: str
    realized: float
    us: tuple[float, float]
    times: tuple[float, float] | None


@dataclass(frozen=True, slots=True)
class Ceiling:
    """A reason why no schedule can be faster than so much.

    Attributes:
        why: what it is.
        us: what that takes at least, µs; what a replay takes besides is no part of it.
        times: how many times faster than one stream a run would then be.
    """

    why: str
    us: float
    times: float


@dataclass(frozen=True, slots=True)
class Reason:
    """A part of what keeps K streams from being K times as fast as one.

    Attributes:
        cause: what it is.
        us: what it adds, µs; below 0 where the device is faster than predicted.
        share: of all that is lost.
        why: which ops, and how many.
    """

    cause: str
    us: float
    share: float
    why: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """The answers to what users ask.

    Attributes:
        gains: how much faster the chosen schedule is, against what; measured ones first.
        spread: how far the prediction may be off; ``None`` where the chosen schedule was measured.
        ceilings: the most that streams could give, the tightest first.
        explained: the schedule that the reasons are about: a faster one that the memory budget does not allow, if there
            is one; else the chosen one, or the best over several streams where one stream was chosen; ``None`` where
            there is none.
        ideal_us: what that schedule would take if nothing was lost: all its streams always busy, µs.
        reasons: why it takes longer, the greatest first; their sum and ``ideal_us`` make up its time. Where the memory
            budget does not allow it, that is one of them: they make up the time of what runs instead.
        concurrency: µs of the chosen schedule's simulated time by the number of ops that run at once.
        companies: which of its ops run beside which, those that do longest.
        placements: why each op is on its stream, by name; empty where there is one stream.
        memory: what the chosen schedule allocates, and what for.
        kept_out: a faster schedule that the memory budget does not allow, if there is one.
        advice: what to try, the most promising first.
    """

    gains: tuple[Gain, ...]
    spread: Spread | None
    ceilings: tuple[Ceiling, ...]
    explained: str | None
    ideal_us: float | None
    reasons: tuple[Reason, ...]
    concurrency: Mapping[int, float]
    companies: tuple[Company, ...]
    placements: Mapping[str, str]
    memory: Memory
    kept_out: KeptOut | None
    advice: tuple[str, ...]


def explanation_of(report: Report, numbers: Summary | None) -> Explanation | None:
    """Answer for a report; ``None`` where nothing was scheduled.

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
        spread=_spread(chosen, alone, costs, profile),
        ceilings=ceilings,
        explained=named(explained.schedule) if explained else None,
        ideal_us=parts.ideal_us if parts else None,
        reasons=_reasons(report, explained, parts, chain, numbers) if explained and parts else (),
        concurrency=concurrency(report.timeline) if report.timeline else {},
        companies=companies(report.timeline, _COMPANIES) if report.timeline else (),
        placements=placements(graph, chosen, report.timeline),
        memory=memory_of(report, graph, chosen),
        kept_out=kept_out(report),
        advice=advise(report, numbers, chain, parts, sequential_us, ceilings[0].times if ceilings else None),
    )


def best_rival(report: Report, chosen: Candidate) -> Candidate | None:
    """The best candidate over several streams that is captured like the chosen one."""
    rivals = [c for c in report.candidates if c.schedule.streams > 1 and c.captured == chosen.captured]
    return max(rivals, key=lambda candidate: gain(candidate, chosen), default=None)


def _gains(report: Report, chosen: Candidate) -> Iterator[Gain]:
    for measured in (True, False):
        for other in baselines(report):
            own_us, other_us = (c.measured_us if measured else c.predicted_us for c in (chosen, other))
            if own_us and other_us is not None:
                against = "sequential in a CUDA graph" if other.captured else "sequential"
                yield Gain(against, other_us / own_us, own_us, other_us, measured)


def _spread(chosen: Candidate, alone: Schedule, costs: Costs, profile: DeviceProfile) -> Spread | None:
    """By simulation with all costs scaled: errors of an estimate are alike for all ops, and do not cancel out.

    The edges of a profile that was looked up are estimates as well: mostly they were measured on another GPU.
    """
    if chosen.measured_us is not None or not costs:
        return None
    sources = sorted({cost.source for cost in costs.values()})
    error = max(ERRORS.get(source, ERRORS["roofline"]) for source in sources)
    realized = min(REALIZED.get(source, REALIZED["roofline"]) for source in sources)
    off = (1 - error, 1 + error)
    edges = (1.0,) if profile.source == "measured" else off
    corners = [
        (costs, profile),  # for on some schedules both less and more work take longer (Graham 1966)
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
    """The device with edges, forks, joins, launches and replays that take so many times as long."""
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
    """Each is a floor under the time of any schedule; ops that fill the device gain nothing from company."""
    if numbers.work_us <= 0:
        return ()
    ops, always_us = len(numbers.slack_us), replay_us(profile, captured)
    if numbers.width <= 1:
        why = "the ops form a chain (width 1): nothing can run beside anything else"
        return (Ceiling(why, sequential_us - always_us, 1.0),)
    launch_us = profile.dispatch_us if captured else profile.launch_us
    # So many chains hold all ops (Dilworth), and there is no gap between the end of one and the start of the next.
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
        Ceiling(why, floor_us, sequential_us / (floor_us + always_us))
        for why, floor_us in floors.items()
        if floor_us > 0
    )
    return tuple(sorted(ceilings, key=lambda ceiling: ceiling.times))


def _reasons(
    report: Report, explained: Candidate, parts: Breakdown, chain: Chain, numbers: Summary
) -> tuple[Reason, ...]:
    """What the budget costs is told as if it was one more step of ``losses``, before all others: what they add, the
    schedule that it keeps out would lose as well. Predictions are compared, for what is too large is not measured.
    """
    found = {cause.value: (parts.losses_us[cause], why) for cause, why in _whys(report, explained, chain, numbers)}
    runs, predicted_us = explained, parts.predicted_us
    if (budget := kept_out(report)) and report.chosen:
        instead = f"the best within it takes {us(budget.within_us)} instead of {us(budget.predicted_us)}, as predicted"
        found[Limit.BUDGET.value] = budget.cost_us, f"{budget.why}: {instead}"
        runs, predicted_us = report.chosen, predicted_us + budget.cost_us
    if runs.measured_us is not None:
        found["not explained by the model"] = runs.measured_us - predicted_us, "measured less predicted"
    lost_us = sum(us for us, _ in found.values())
    reasons = (Reason(cause, us, us / lost_us if lost_us > 0 else 0.0, why) for cause, (us, why) in found.items() if us)
    return tuple(sorted(reasons, key=lambda reason: -reason.us))


def _whys(report: Report, explained: Candidate, chain: Chain, numbers: Summary) -> Iterator[tuple[Cause, str]]:
    assert report.graph is not None
    assert report.profile is not None
    ops, costs, schedule = report.graph.ops, report.costs, explained.schedule
    gaps = f", {us(chain.us - chain.work_us)} of it gaps between them" if chain.us > chain.work_us else ""
    in_line = f"{count(len(chain.ops), 'op')} in line take" if len(chain.ops) > 1 else "the longest op takes"
    yield Cause.CHAIN, f"{in_line} {us(chain.us)}{gaps}"
    beside = f"{count(schedule.streams, 'stream')}, and up to {numbers.width} ops are independent"
    yield Cause.TURNS, f"ops wait until their stream is free: {beside}"
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
