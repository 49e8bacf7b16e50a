"""A report as text for a terminal. Times are called predicted unless they were measured.

summary    what runs, and how fast; ``lines`` are the same as values
answers    also where time is lost, which ops overlap, why, and what to try: ``autostream.explain``
render     also all candidates and ops in tables: ``autostream inspect``
profile    a device profile: ``autostream profile``
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING

from autostream.ir import Candidate, Costs, Decision, DeviceProfile, OpGraph, Timeline
from autostream.reporting.explanation import Explanation, Gain, Spread, best_rival, explanation_of
from autostream.reporting.memory import KeptOut, Memory, is_hopper
from autostream.reporting.ops import EVERYTHING, FOLDED, Selection, ops_table, selected
from autostream.reporting.parts import captured_share, devices, time_us
from autostream.reporting.summary import Summary, gain, named, summary_of
from autostream.reporting.tables import count, few, line, pairs, size, source, table, us
from autostream.scheduling.communication import exposed_us

if TYPE_CHECKING:
    from autostream.reporting.report import Report

_MODES = {
    "plain": "the plain model",
    "one stream": "one op after another, uncaptured,",
    "graph breaks": "parts between graph breaks",
    "sections": "CUDA graphs, and between them the ops that none can hold",
    "forward and backward": "a forward and a backward, each scheduled for itself",
    "not run yet": "nothing yet: the first call makes the parts, or raises the model's own error",
    "streams": "ops on CUDA streams, uncaptured,",
    "threads": "CPU threads,",
    "cuda graph": "CUDA graph",
}

_CUT = ("sections",)

_LEVELS = {"aten": "ATen", "inductor": "fused by TorchInductor"}

_REFUSALS = 3
_CEILINGS = 2
_BESIDE = 5
_HOLDERS = 5
_REASONS = 10
_WORTH = 0.005
"""Smaller shares, which would read 0 %, are left out."""


def summary(report: Report) -> str:
    """A few lines: what runs, how fast, and the bounds of the speedup."""
    return _summary(report, *_derived(report))


def lines(report: Report) -> Iterator[tuple[str, str]]:
    """The lines of the summary as (key, value); keys may repeat."""
    return _lines(report, *_derived(report))


def answers(report: Report, selection: Selection = EVERYTHING) -> str:
    """Speedup, lost time, overlapping ops, reasons for streams, and what to try.

    Args:
        report: of one signature of one model.
        selection: the ops whose streams are explained.

    Raises:
        OptionError: the schedule has no such stream.

    Example:
        >>> from autostream.ir import Decision
        >>> from autostream.reporting.report import Report
        >>> refusal = Decision("", "not traced", "forward branches on the value of a tensor")
        >>> print(answers(Report("Net", "1x8:float32 on cpu, eval, no gradients", "plain", refusals=(refusal,))))
        model      Net
        signature  1x8:float32 on cpu, eval, no gradients
        runs as    the plain model
        refused    not traced: forward branches on the value of a tensor
    """
    numbers, explanation = _derived(report)
    parts = (
        _summary(report, numbers, explanation),
        _split_parts(report),
        *_answers(report, explanation, selected(report, numbers, selection)),
        *(f"{_name(part, number)}\n{answers(part, selection)}" for number, part in enumerate(report.parts)),
    )
    return "\n\n".join(part for part in parts if part)


def render(report: Report, selection: Selection = EVERYTHING) -> str:
    """The answers, then all candidates and ops.

    Args:
        report: of one signature of one model.
        selection: the ops to show. If they are more than fit on a screen, streams are explained for the costliest.

    Raises:
        OptionError: the schedule has no such stream.
    """
    numbers, explanation = _derived(report)
    shown = selected(report, numbers, selection)
    if selection.ops is None and len(shown) > FOLDED:
        shown = selected(report, numbers, replace(selection, ops=_REASONS))
    parts = (
        _summary(report, numbers, explanation),
        _split_parts(report),
        *_answers(report, explanation, shown),
        _candidates(report),
        ops_table(report, numbers, selection),
        *(f"{_name(part, number)}\n{render(part, selection)}" for number, part in enumerate(report.parts)),
    )
    return "\n\n".join(part for part in parts if part)


def profile(device: DeviceProfile) -> str:
    """What the cost model knows of a device.

    Example:
        >>> edges = {"same_stream_edge_us": 0.9, "cross_stream_edge_us": 1.6, "fork_us": 1.2, "join_us": 1.1}
        >>> gpu = DeviceProfile("GPU", 132, 4.8e6, {"float16": 700e6}, kernel_us=2.0, source="table", **edges)
        >>> print(profile(gpu))
        device      GPU: 132 SMs (table)
        bandwidth   4,800 GB/s
        TFLOP/s     float16 700.0
        kernel      2.00 µs at least
        edges       0.90 µs within a stream, 1.60 µs between two, 0.00 µs for each one more
        fork, join  1.20 µs, 1.10 µs
        launches    0.00 µs apart in a CUDA graph, 0.00 µs from the host
        replay      0.00 µs besides its kernels
    """
    near, far, more = device.same_stream_edge_us, device.cross_stream_edge_us, device.per_stream_us
    graph, host, replay = device.dispatch_us, device.launch_us, device.replay_us
    peaks = ", ".join(f"{dtype} {peak / 1e6:,.1f}" for dtype, peak in device.flops.items())
    return pairs(
        [
            ("device", f"{line(device.name)}: {device.multiprocessors} SMs ({device.source})"),
            ("bandwidth", f"{device.bandwidth / 1e3:,.0f} GB/s"),
            ("TFLOP/s", peaks),
            ("kernel", f"{device.kernel_us:.2f} µs at least"),
            ("edges", f"{near:.2f} µs within a stream, {far:.2f} µs between two, {more:.2f} µs for each one more"),
            ("fork, join", f"{device.fork_us:.2f} µs, {device.join_us:.2f} µs"),
            ("launches", f"{graph:.2f} µs apart in a CUDA graph, {host:.2f} µs from the host"),
            ("replay", f"{replay:.2f} µs besides its kernels"),
        ]
    )


def _derived(report: Report) -> tuple[Summary | None, Explanation | None]:
    numbers = summary_of(report)
    return numbers, explanation_of(report, numbers)


def _summary(report: Report, numbers: Summary | None, explanation: Explanation | None) -> str:
    return pairs(_lines(report, numbers, explanation))


def _lines(report: Report, numbers: Summary | None, explanation: Explanation | None) -> Iterator[tuple[str, str]]:
    yield "model", line(report.model)
    yield "signature", line(report.signature)
    if report.profile:
        yield "device", _device(report)
    yield "runs as", _runs_as(report)
    yield from _halves(report)
    yield from _captured(report)
    if report.chosen and explanation:
        yield from _times(report, report.chosen, explanation)
        yield from (("at most", f"{c.times:.2f}×: {c.why}, {us(c.us)}") for c in explanation.ceilings[:_CEILINGS])
    if report.chosen and report.chosen_on:
        beside = "only one stream" if report.chosen.schedule.streams > 1 else "nothing"
        yield "chosen", f"on {report.chosen_on}, among more: this time {beside} was measured beside it"
    if report.graph and numbers:
        yield "graph", _graph(report, report.graph, numbers)
    if report.costs and numbers:
        yield "work", _work(report.costs, numbers)
    if report.graph and report.graph.collectives and report.timeline:
        yield "communication", _communication(report.graph, report.timeline)
    if report.chosen and explanation:
        streams, hopper = report.chosen.schedule.streams, is_hopper(report.profile)
        yield from (("memory", said) for said in _memory(explanation.memory, streams, hopper))
        yield from (("budget", _cost_of_budget(best)) for best in [explanation.kept_out] if best)
    yield from (("refused", refusal) for refusal in _refusals(report))
    if report.seconds:
        yield "prepared in", ", ".join(f"{stage} {took:.2f} s" for stage, took in report.seconds.items())
    if report.versions:
        yield "with", ", ".join(f"{package} {version}" for package, version in report.versions.items())


def _split_parts(report: Report) -> str:
    """The parts of a model that was split."""
    parts = [part for part in report.parts if not part.half]
    if not parts:
        return ""
    several = len({device for part in parts for device in devices(part)}) > 1
    rows = []
    for number, part in enumerate(parts):
        took, ops = time_us(part), len(part.graph.ops) if part.graph else None
        numbers = ["" if took is None else f"{took:,.1f}", "" if ops is None else f"{ops:,}"]
        runs_as = _MODES.get(part.mode, part.mode).rstrip(",")
        where = [" and ".join(devices(part))] if several else []
        rows.append([str(number), *numbers, *where, runs_as, line(part.ended) or "the model returns"])
    on = ["on"] if several else []
    return table("Parts", ("part", "µs", "ops", *on, "runs as", "ends because"), rows, right="part µs ops")


def _name(part: Report, number: int) -> str:
    return part.half.capitalize() or f"Part {number}"


def _halves(report: Report) -> Iterator[tuple[str, str]]:
    """The forward and the backward of a call with gradients."""
    halves = [part for part in report.parts if part.half]
    yield from ((part.half, _half(part)) for part in halves)
    if halves and all(part.half != "backward" for part in halves):
        yield "backward", "not run yet: it is scheduled when it first runs"


def _half(part: Report) -> str:
    took_us, chosen, graph = time_us(part), part.chosen, part.graph
    if took_us is None or chosen is None or graph is None:
        return _runs_as(part)
    how = "" if chosen.measured_us is not None else ", as predicted"
    return f"{us(took_us)}{how}, {count(len(graph.ops), 'op')}: {_runs_as(part)}"


def _captured(report: Report) -> Iterator[tuple[str, str]]:
    share = captured_share(report)
    if share is not None:
        rest = "what no graph holds as predicted" if report.mode in _CUT else "what runs between them is not timed"
        yield "captured", f"{share:.0%} of the time of its parts, each run once; {rest}"


def _answers(report: Report, explanation: Explanation | None, shown: frozenset[str]) -> Iterator[str]:
    """The sections of the explanation."""
    if explanation is None:
        return
    yield from _why_not_more(explanation)
    yield from _side_by_side(explanation)
    yield from _placements(report, explanation, shown)
    yield from _holders(explanation.memory)
    if explanation.advice:
        yield "\n".join(["What to try", *(f"  {line(advice)}" for advice in explanation.advice)])


def _why_not_more(explanation: Explanation) -> Iterator[str]:
    if explanation.reasons:
        ideal = f"{us(explanation.ideal_us or 0.0)} if its streams were always busy"
        worth = [reason for reason in explanation.reasons if abs(reason.share) >= _WORTH]
        rows = [(f"{r.us:,.1f}", f"{r.share:.0%}", r.cause, line(r.why)) for r in worth]
        refused = ", which the memory budget keeps out," if explanation.kept_out else ""
        title = f"Why {explanation.explained}{refused} is not faster: {ideal}, and beyond that"
        yield table(title, ("µs", "lost", "cause", "which"), rows, right="µs lost")


def _side_by_side(explanation: Explanation) -> Iterator[str]:
    if explanation.companies:
        spent = ", ".join(
            f"{number} for {us(time_us)}" for number, time_us in explanation.concurrency.items() if number
        )
        rows = [
            (f"{c.shared_us:,.1f}", line(c.op), str(c.stream), few([*c.beside], most=_BESIDE))
            for c in explanation.companies
        ]
        title = f"Side by side, as predicted; ops at once: {spent}"
        yield table(title, ("µs", "op", "stream", "beside"), rows, right="µs stream")


def _holders(memory: Memory) -> Iterator[str]:
    if memory.holders:
        rows = [
            (size(h.bytes), line(h.storage), h.pool, line(h.op), source(h.source)) for h in memory.holders[:_HOLDERS]
        ]
        largest = f", the {len(rows)} largest of {len(memory.holders):,}" if len(rows) < len(memory.holders) else ""
        title = f"What holds the memory when most is in use{largest}"
        yield table(title, ("size", "storage", "in", "made by", "source"), rows, right="size")


def _device(report: Report) -> str:
    assert report.profile is not None
    known = report.profile
    units = "cores" if report.graph and report.graph.device == "cpu" else "SMs"
    bandwidth = f"{known.bandwidth / 1e3:,.0f} GB/s"
    return f"{line(known.name)}: {known.multiprocessors} {units}, {bandwidth} (profile: {known.source})"


def _runs_as(report: Report) -> str:
    if report.mode == "plain" or report.chosen is None:
        return _MODES.get(report.mode, report.mode)
    schedule = report.chosen.schedule
    over = "on 1 stream" if schedule.streams == 1 else f"over {schedule.streams} streams"
    how = f"{over} ({schedule.policy})"
    if report.mode != "dry run":
        return f"{_MODES.get(report.mode, report.mode)} {how}"
    on_cpu = report.graph is not None and report.graph.device == "cpu"
    mode = "cuda graph" if report.chosen.captured else "threads" if on_cpu else "streams"
    return f"nothing, this is a dry run; the best by prediction: {_MODES[mode]} {how}"


def _times(report: Report, chosen: Candidate, explanation: Explanation) -> Iterator[tuple[str, str]]:
    measured, predicted = ([g for g in explanation.gains if g.measured is kind] for kind in (True, False))
    if chosen.measured_us is not None:
        yield "measured", _compared(chosen.measured_us, measured)
    else:
        yield "measured", "nothing: the times below are predicted"
    yield "predicted", _compared(chosen.predicted_us, predicted)
    if spread := explanation.spread:
        yield "uncertain", _uncertain(spread)
    if chosen.schedule.streams == 1:
        yield "gain", _no_gain(report, chosen)


def _uncertain(spread: Spread) -> str:
    low, high = spread.us
    gains = f", {spread.times[0]:.2f}× to {spread.times[1]:.2f}× one stream" if spread.times else ""
    ops = f"if ops take {spread.error:.0%} less or more time and room ({spread.costs} costs)"
    edges = "what was measured" if spread.edges == "measured" else "as much less or more time"
    real = f"; at least {spread.realized:.0%} of the gain comes true" if spread.times else ""
    return f"{low:,.1f} to {us(high)}{gains}, {ops}, and edges and launches {edges} (profile: {spread.edges}){real}"


def _compared(own_us: float, gains: Sequence[Gain]) -> str:
    ratios = [f"{each.times:.2f}× the speed of {each.against} ({us(each.other_us)})" for each in gains]
    return ", ".join([us(own_us), *ratios])


def _no_gain(report: Report, chosen: Candidate) -> str:
    """Why one stream was chosen: the speed of the best schedule over several."""
    best = best_rival(report, chosen)
    if report.graph and not report.graph.ops:
        return "none: the model launches nothing, so there is nothing to schedule"
    if best is None:
        return "none from streams: no schedule over several streams was a candidate"
    measured = best.measured_us is not None and chosen.measured_us is not None
    how = "measured" if measured else "predicted"
    speed = f"{how} at {gain(best, chosen):.2f}× the speed of one"
    if best.refusal:
        return f"none: {named(best.schedule)}, {speed}, was refused: {line(best.refusal)}"
    return f"none from streams: the best, {named(best.schedule)}, is {speed}"


def _graph(report: Report, graph: OpGraph, numbers: Summary) -> str:
    ops = f"{count(len(graph.ops), 'op')} ({_LEVELS[report.level]})" if report.level else count(len(graph.ops), "op")
    facts = [ops, f"width {numbers.width}"]
    branches = max((len(region.branches) for region in numbers.regions), default=0)
    if branches >= numbers.width > 1:  # fewer branches than the width would say less
        facts.append(f"{count(len(numbers.regions), 'region')} of up to {branches} independent branches")
    if report.chosen:
        schedule = report.chosen.schedule
        facts += [count(schedule.streams, "stream"), count(schedule.wait_count, "wait")]
    return ", ".join(facts)


def _work(costs: Costs, numbers: Summary) -> str:
    chain = numbers.critical_path
    sources = "/".join(sorted({cost.source for cost in costs.values()}))
    gaps = f", {us(chain.us)} with its gaps" if chain.us > chain.work_us else ""
    return f"{us(numbers.work_us)} ({sources} costs), {us(chain.work_us)} of it on the critical path{gaps}"


def _communication(graph: OpGraph, timeline: Timeline) -> str:
    spent_us = sum(s.end_us - s.start_us for s in timeline.slices if s.op in graph.collectives)
    exposed = f"{us(exposed_us(timeline, graph))} of it exposed: nothing else runs then"
    return f"{us(spent_us)} in {count(len(graph.collectives), 'collective')} as predicted, {exposed}"


LESS_WORKSPACE = "; CUBLAS_WORKSPACE_CONFIG=:4096:2:16:8 in the environment makes that a quarter"
"""The workspace of GPUs before Hopper. PyTorch reads the variable once, before the first matrix product."""


_SEGMENTS = 2 * 2**20, 20 * 2**20
"""Segments that PyTorch's allocator takes from a GPU: for blocks up to 1 MiB, and up to 10 MiB."""


def _memory(memory: Memory, streams: int, hopper: bool) -> Iterator[str]:
    one = memory.sequential_bytes
    ratio = f", {memory.bytes / one:.2f}× one stream ({size(one)})" if one else ""
    yield f"{size(memory.bytes)} at most{ratio}, weights and inputs not included"
    if streams > 1 and memory.workspace_bytes:
        who = "on Hopper, cuBLAS" if hopper else "cuBLAS"
        each = f"{who} takes {size(memory.workspace_bytes // streams)} for each stream that it is used on"
        most = f"{size(memory.workspace_bytes)} at most{LESS_WORKSPACE if hopper else ''}"
        yield f"workspaces come on top, and no budget counts them: {each}, {most}"
        segments = " or ".join(map(size, _SEGMENTS))
        yield f"so does what nothing uses of a segment: for each stream, PyTorch takes {segments} at a time"


def _cost_of_budget(best: KeptOut) -> str:
    faster = f"{best.schedule} would take {us(best.predicted_us)}, the best within it {us(best.within_us)}"
    return f"costs {us(best.cost_us)}, as predicted: {faster}; it {line(best.why)}"


def _refusals(report: Report) -> Iterator[str]:
    """The first few of each kind: one reason often holds for hundreds of ops."""
    for choice, group in groupby(sorted(report.refusals, key=lambda r: r.choice), key=lambda r: r.choice):
        refusals = list(group)
        yield from (_refusal(report, refusal) for refusal in refusals[:_REFUSALS])
        if len(refusals) > _REFUSALS:
            yield line(f"{choice}: {len(refusals) - _REFUSALS} more")


def _refusal(report: Report, refusal: Decision) -> str:
    op = report.graph.ops.get(refusal.op) if report.graph else None
    at = f", {op.source}" if op and op.source and op.source not in refusal.reason else ""
    where = f" (op {refusal.op}{at})" if refusal.op else ""
    return line(f"{refusal.choice}: {refusal.reason}{where}")


def _candidates(report: Report) -> str:
    if not report.candidates:
        return ""
    rows = [_candidate(candidate, report) for candidate in report.candidates]
    head = ("", "policy", "streams", "captured", "waits", "MB", "predicted µs", "measured µs", "remark")
    return table("Candidates", head, rows, right="streams waits MB predicted measured")


def _candidate(candidate: Candidate, report: Report) -> tuple[str, ...]:
    schedule = candidate.schedule
    return (
        "*" if candidate == report.chosen else "",
        schedule.policy,
        str(schedule.streams),
        "CUDA graph" if candidate.captured else "no",
        str(schedule.wait_count),
        f"{candidate.memory_bytes / 1e6:,.1f}",
        f"{candidate.predicted_us:,.1f}",
        "" if candidate.measured_us is None else f"{candidate.measured_us:,.1f}",
        "chosen" if candidate == report.chosen else line(candidate.refusal),
    )


def _placements(report: Report, explanation: Explanation, shown: frozenset[str]) -> Iterator[str]:
    """Reasons for streams: of the whole schedule first, then of the ops shown, in launch order."""
    if not explanation.placements:
        return  # there is one stream
    assert report.chosen is not None
    schedule = report.chosen.schedule
    rows = [("", line(d.choice), line(d.reason)) for d in schedule.decisions if not d.op]
    rows += [
        (line(op), f"stream {schedule.stream_of[op]}", line(why))
        for op, why in explanation.placements.items()
        if op in shown
    ]
    if rows:
        yield table("Why on which stream", ("op", "stream", "because"), rows)
