"""Advice on what to try next, by rules on a report's numbers; each says what to do and why it may help."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from autostream.ir import Candidate, Limit
from autostream.options import MAX_STREAMS
from autostream.reporting.memory import kept_out
from autostream.reporting.summary import Summary, named
from autostream.reporting.tables import count, us
from autostream.scheduling.lost_time import Breakdown, Cause, Chain
from autostream.scheduling.simulate import replay_us, run_us

if TYPE_CHECKING:
    from autostream.reporting.report import Report

_LARGE = 0.25
"""Share of the time above which a loss is worth fixing."""

_WORTH = 0.1
"""Share of the time above which an option is worth trying."""

_SOME = 0.02
"""Share of the time above which a difference is not noise."""

_FULL = 0.7
"""Utilization above which a resource leaves little room for concurrent ops."""


def advise(
    report: Report, numbers: Summary, chain: Chain, parts: Breakdown | None, sequential_us: float, most: float | None
) -> tuple[str, ...]:
    """What to try, the most promising first, or that little is left to gain.

    Args:
        report: of a signature that was scheduled.
        numbers: of its graph.
        chain: its longest chain.
        parts: where the time of the explained schedule goes, if there is one.
        sequential_us: the time of one stream, µs.
        most: how many times faster than one stream any schedule can be; ``None`` where nothing is known to bound it.
    """
    advice = (
        *_capture(report),
        *_fuse(report, numbers, sequential_us),
        *_lighten(report, numbers),
        *_widen(numbers, chain, parts),
        *_spread_out(report, numbers, parts),
        *_free(report),
        *_wait(report),
        *_allow(report),
        *_measure(report),
        *_calibrate(report),
    )
    return advice or tuple(_nothing(report, sequential_us, most))


def _capture(report: Report) -> Iterator[str]:
    """One op that cannot be captured keeps all ops out of the CUDA graph."""
    uncapturable = [refusal for refusal in report.refusals if refusal.choice == "not captured" and refusal.op]
    if uncapturable:
        more = f" (and {len(uncapturable) - 1} more like it)" if len(uncapturable) > 1 else ""
        yield f"take {uncapturable[0].op}{more} out of the model, so that it can be captured: {uncapturable[0].reason}"


def _fuse(report: Report, numbers: Summary, sequential_us: float) -> Iterator[str]:
    """Fused kernels leave fewer gaps, where they were not tried."""
    assert report.graph is not None
    assert report.profile is not None
    assert report.chosen is not None
    gaps_us = sequential_us - replay_us(report.profile, report.chosen.captured) - numbers.work_us
    tried = report.mode != "dry run" and any(refusal.choice == "not fused" for refusal in report.refusals)
    if report.level == "aten" and report.graph.device != "cpu" and not tried and gaps_us > _WORTH * sequential_us:
        # Kernels are fused for the GPU that is there.
        where = "on the device itself, " if report.mode == "dry run" else ""
        ops = count(len(report.graph.ops), "kernel")
        idle = f"gaps between {ops}" if report.chosen.captured else f"spent waiting for the host to launch {ops}"
        yield f'{where}kernels="inductor": on one stream, {us(gaps_us)} of {us(sequential_us)} are {idle}'


def _lighten(report: Report, numbers: Summary) -> Iterator[str]:
    """On a busy device only less work helps."""
    if numbers.work_us <= 0:
        return
    assert report.graph is not None
    on_gpu, ops = report.graph.device != "cpu", report.graph.ops.values()
    units = "multiprocessors" if on_gpu else "cores"
    busy, what = max((numbers.sm_us, units), (numbers.bandwidth_us, "memory bandwidth"))
    if busy < _FULL * numbers.work_us:
        return
    remedies = [
        *(["float16 or bfloat16"] if on_gpu and any(op.dtype == "float32" for op in ops) else []),
        *(["fused kernels"] if on_gpu and report.level == "aten" else []),
        "a smaller model",
    ]
    use = f"one after the other, the ops use {busy / numbers.work_us:.0%} of the {what}"
    yield f"less work rather than more streams, by {' or '.join(remedies)}: {use}"


def _widen(numbers: Summary, chain: Chain, parts: Breakdown | None) -> Iterator[str]:
    """A long chain of dependent ops leaves the device idle; independent work fills it."""
    lost = parts is None or parts.share(Cause.CHAIN) > 0.5
    if chain.us <= 0 or not lost:
        return
    busy = max(numbers.sm_us, numbers.bandwidth_us) / chain.us
    if busy < 1 - _LARGE:
        yield (
            f"a larger batch, or several inputs or models in one module: the chain keeps the device {busy:.0%} busy, "
            "and no schedule makes it shorter"
        )


def _spread_out(report: Report, numbers: Summary, parts: Breakdown | None) -> Iterator[str]:
    """More streams, where all that were allowed are used and ops still wait for one."""
    most = max((candidate.schedule.streams for candidate in report.candidates), default=1)
    streams = min(numbers.width, MAX_STREAMS)
    used = report.chosen.schedule.streams if report.chosen else 1
    if parts and parts.share(Cause.BUSY) > _LARGE and used == most < streams:
        yield f"streams={streams}: ops wait for their turn on {used}, and up to {numbers.width} are independent"


def _free(report: Report) -> Iterator[str]:
    """A faster schedule did not fit into the device's memory."""
    for best, gain in _faster(report, Limit.DEVICE):
        yield f"more free memory: {named(best.schedule)} did not fit, and {gain}"


def _wait(report: Report) -> Iterator[str]:
    """There was no time to measure a schedule that may be faster."""
    for best, gain in _faster(report, Limit.TIME):
        yield f"a larger tuning_seconds: there was no time to measure {named(best.schedule)}, which {gain}"


def _faster(report: Report, limit: Limit) -> Iterator[tuple[Candidate, str]]:
    """The best schedule that this limit has kept out, and by how much, if it is predicted to be faster."""
    refused = [candidate for candidate in report.candidates if candidate.limit is limit]
    best = min(refused, key=lambda candidate: candidate.predicted_us, default=None)
    if best and report.chosen and best.predicted_us < report.chosen.predicted_us:
        yield best, f"is predicted to take {us(report.chosen.predicted_us - best.predicted_us)} less"


def _allow(report: Report) -> Iterator[str]:
    """A larger memory budget, where it allows a faster schedule."""
    best = kept_out(report)
    if best and best.cost_us > _SOME * best.within_us:
        needed = "at least that" if best.incomplete else "that"
        gain = f"is predicted to take {us(best.cost_us)} less"
        yield f"memory_budget={best.budget}: {best.schedule} needs {needed}, and {gain}"


def _measure(report: Report) -> Iterator[str]:
    if report.mode == "dry run" and report.graph and report.graph.ops and report.graph.device != "cpu":
        yield "autostream bench on the device itself: this is a prediction"


def _calibrate(report: Report) -> Iterator[str]:
    """Measured costs, where the estimates are far off."""
    chosen, estimated = report.chosen, any(cost.source == "roofline" for cost in report.costs.values())
    if chosen and chosen.measured_us and estimated:
        times = chosen.measured_us / chosen.predicted_us if chosen.predicted_us > 0 else 1.0
        if abs(times - 1) > _LARGE:
            yield f'costs="measured": it takes {times:.2f} times what was estimated, so the shares are a hint at most'


def _nothing(report: Report, sequential_us: float, most: float | None) -> Iterator[str]:
    assert report.chosen is not None
    assert report.profile is not None
    chosen = report.chosen
    if most is not None and sequential_us > 0:
        own_us = run_us(chosen.schedule, report.costs, report.profile, captured=chosen.captured)
        yield f"nothing: no schedule of these ops would be more than {most * own_us / sequential_us:.2f}× as fast"
