"""A report as text for a terminal. A time that no clock has shown is called predicted."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from tabulate import tabulate

from autostream.ir import Candidate, Costs, Decision, OpGraph, Timeline
from autostream.reporting.report import Report
from autostream.reporting.summary import Summary, baselines, gain, limits, summary_of

_MODES = {
    "plain": "the plain model",
    "one stream": "one op after another, uncaptured,",
    "graph breaks": "pieces between graph breaks",
    "not run yet": "nothing yet: the first call makes the pieces, or raises the model's own error",
    "streams": "ops on CUDA streams, uncaptured,",
    "threads": "CPU threads,",
    "cuda graph": "CUDA graph",
}

_SOURCE_WIDTH = 60
_REFUSALS = 3


def render(report: Report, *, ops: int | None = None) -> str:
    """Say all that is known: the summary, the candidates, the ops in launch order and the decisions.

    Args:
        report: of one signature of one model.
        ops: show only this many ops, those of longest duration; ``None`` shows all.

    Example:
        >>> from autostream.ir import Decision
        >>> from autostream.reporting.report import Report
        >>> refusal = Decision("", "not traced", "forward branches on the value of a tensor")
        >>> print(render(Report("Net", "1x8:float32 on cpu, eval, no gradients", "plain", refusals=(refusal,))))
        model      Net
        signature  1x8:float32 on cpu, eval, no gradients
        runs as    the plain model
        refused    not traced: forward branches on the value of a tensor
    """
    numbers, shown = summary_of(report), _shown(report, ops)
    parts = (
        _summary(report, numbers),
        _candidates(report),
        _ops(report, numbers, shown),
        _decisions(report, shown),
        *(f"Piece {number}\n{render(part, ops=ops)}" for number, part in enumerate(report.parts)),
    )
    return "\n\n".join(part for part in parts if part)


def summary(report: Report) -> str:
    """Say the main things in a few lines: what runs, how fast, and why not faster."""
    return _summary(report, summary_of(report))


def _summary(report: Report, numbers: Summary | None) -> str:
    return tabulate(_repeat_no_keys(_lines(report, numbers)), tablefmt="plain", disable_numparse=True)


def _lines(report: Report, numbers: Summary | None) -> Iterator[tuple[str, str]]:
    """The lines of the summary as (key, value); a key may come several times."""
    yield "model", _line(report.model)
    yield "signature", _line(report.signature)
    if report.profile:
        yield "device", _device(report)
    yield "runs as", _runs_as(report)
    if report.chosen:
        yield from _times(report, report.chosen)
    if report.graph and numbers:
        yield "graph", _graph(report.graph, report.chosen, numbers)
        yield "work", _work(report.costs, numbers)
        yield from (("bound", limit) for limit in limits(numbers)[:1])
        yield from (("why not more", reason) for reason in _why_not_more(report, numbers))
    yield from (("refused", refusal) for refusal in _refusals(report))
    if report.seconds:
        yield "prepared in", ", ".join(f"{stage} {took:.2f} s" for stage, took in report.seconds.items())
    if report.versions:
        yield "with", ", ".join(f"{package} {version}" for package, version in report.versions.items())


def _repeat_no_keys(lines: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    last = ""
    for key, value in lines:
        yield ("" if key == last else key), value
        last = key


def _device(report: Report) -> str:
    assert report.profile is not None
    profile = report.profile
    units = "cores" if report.graph and report.graph.device == "cpu" else "SMs"
    bandwidth = f"{profile.bandwidth / 1e3:,.0f} GB/s"
    return f"{_line(profile.name)}: {profile.multiprocessors} {units}, {bandwidth} (profile: {profile.source})"


def _runs_as(report: Report) -> str:
    if report.mode == "plain" or report.chosen is None:
        return _MODES.get(report.mode, report.mode)
    schedule = report.chosen.schedule
    how = f"{_on_streams(schedule.streams)} ({schedule.policy})"
    if report.mode != "dry run":
        return f"{_MODES.get(report.mode, report.mode)} {how}"
    on_cpu = report.graph is not None and report.graph.device == "cpu"
    mode = "cuda graph" if report.chosen.captured else "threads" if on_cpu else "streams"
    return f"nothing, this is a dry run; the best by prediction: {_MODES[mode]} {how}"


def _on_streams(streams: int) -> str:
    return "on 1 stream" if streams == 1 else f"over {streams} streams"


def _times(report: Report, chosen: Candidate) -> Iterator[tuple[str, str]]:
    others = baselines(report)
    if chosen.measured_us is not None:
        yield "measured", _compared(chosen.measured_us, [(other, other.measured_us) for other in others])
    else:
        yield "measured", "nothing: the times below are predicted"
    yield "predicted", _compared(chosen.predicted_us, [(other, other.predicted_us) for other in others])
    if chosen.schedule.streams == 1:
        yield "gain", _no_gain(report, chosen)


def _compared(own_us: float, others: Sequence[tuple[Candidate, float | None]]) -> str:
    ratios = [
        f"{other_us / own_us:.2f}× the speed of {_baseline(other)} ({_us(other_us)})"
        for other, other_us in others
        if other_us is not None and own_us > 0
    ]
    return ", ".join([_us(own_us), *ratios])


def _baseline(candidate: Candidate) -> str:
    return "sequential in a CUDA graph" if candidate.captured else "sequential"


def _no_gain(report: Report, chosen: Candidate) -> str:
    """One stream was kept: the number that the best of several streams came to."""
    rivals = [c for c in report.candidates if c.schedule.streams > 1 and c.captured == chosen.captured]
    if not rivals:
        return "none from streams: no schedule over several streams was a candidate"
    best = max(rivals, key=lambda candidate: gain(candidate, chosen))
    measured = best.measured_us is not None and chosen.measured_us is not None
    how = "measured" if measured else "predicted"
    schedule = f"{best.schedule.policy} {_on_streams(best.schedule.streams)}"
    refused = f" and was refused: {_line(best.refusal)}" if best.refusal else ""
    return f"none from streams: the best, {schedule}, is {how} at {gain(best, chosen):.2f}× the speed of one{refused}"


def _graph(graph: OpGraph, chosen: Candidate | None, numbers: Summary) -> str:
    facts = [_count(len(graph.ops), "op"), f"width {numbers.width}"]
    if numbers.regions:
        branches = max(len(region.branches) for region in numbers.regions)
        facts.append(f"{_count(len(numbers.regions), 'region')} of up to {branches} independent branches")
    if chosen:
        schedule = chosen.schedule
        facts += [_count(schedule.streams, "stream"), _count(schedule.wait_count, "wait")]
    return ", ".join(facts)


def _work(costs: Costs, numbers: Summary) -> str:
    sources = "/".join(sorted({cost.source for cost in costs.values()}))
    return f"{_us(numbers.work_us)} ({sources} costs), {_us(numbers.critical_path_us)} of it on the critical path"


def _why_not_more(report: Report, numbers: Summary) -> Iterator[str]:
    floor = max(numbers.critical_path_us, numbers.sm_us, numbers.bandwidth_us)
    chosen = report.chosen
    if chosen and chosen.schedule.streams > 1 and floor > 0 and chosen.predicted_us > 1.05 * floor:
        waits = _count(chosen.schedule.wait_count, "wait")
        yield (
            f"predicted {_us(chosen.predicted_us - floor)} above that floor of {_us(floor)}: edges between ops, "
            f"{waits} among them, and ops that slow each other down"
        )


def _refusals(report: Report) -> Iterator[str]:
    """Each kind by its first few: what hinders one op often hinders hundreds."""
    for choice, group in groupby(sorted(report.refusals, key=lambda r: r.choice), key=lambda r: r.choice):
        refusals = list(group)
        yield from (_refusal(report, refusal) for refusal in refusals[:_REFUSALS])
        if len(refusals) > _REFUSALS:
            yield _line(f"{choice}: {len(refusals) - _REFUSALS} more")


def _refusal(report: Report, refusal: Decision) -> str:
    op = report.graph.ops.get(refusal.op) if report.graph else None
    source = f", {op.source}" if op and op.source and op.source not in refusal.reason else ""
    where = f" (op {refusal.op}{source})" if refusal.op else ""
    return _line(f"{refusal.choice}: {refusal.reason}{where}")


def _candidates(report: Report) -> str:
    if not report.candidates:
        return ""
    rows = [_candidate(candidate, report) for candidate in report.candidates]
    head = ("", "policy", "streams", "captured", "waits", "predicted µs", "measured µs", "remark")
    return _table("Candidates", head, rows, right="streams waits predicted measured")


def _candidate(candidate: Candidate, report: Report) -> tuple[str, ...]:
    schedule = candidate.schedule
    return (
        "*" if candidate == report.chosen else "",
        schedule.policy,
        str(schedule.streams),
        "CUDA graph" if candidate.captured else "no",
        str(schedule.wait_count),
        f"{candidate.predicted_us:,.1f}",
        "" if candidate.measured_us is None else f"{candidate.measured_us:,.1f}",
        "chosen" if candidate == report.chosen else _line(candidate.refusal),
    )


def _shown(report: Report, ops: int | None) -> frozenset[str]:
    """The ops of longest duration; of equal ones, the first in program order."""
    names = list(report.graph.ops) if report.graph and report.chosen else []
    if ops is not None and report.costs:
        names = sorted(names, key=lambda name: -report.costs[name].duration_us)[: max(ops, 0)]
    return frozenset(names)


def _ops(report: Report, numbers: Summary | None, shown: frozenset[str]) -> str:
    if not (shown and report.graph and report.chosen and numbers):
        return ""
    start = _starts(report.timeline)
    rows = []
    for at, launch in enumerate(report.chosen.schedule.launches):
        if launch.op not in shown:
            continue
        op, cost = report.graph.ops[launch.op], report.costs[launch.op]
        rows.append(
            (
                str(at),
                _line(op.name),
                _line(op.target),
                str(launch.stream),
                start.get(op.name, ""),
                f"{cost.duration_us:,.1f}",
                f"{cost.sm_share:.0%}",
                _few(launch.waits),
                f"{numbers.slack_us[op.name]:,.1f}",
                _source(op.source),
            )
        )
    count = len(report.graph.ops)
    title = f"Ops in launch order{'' if len(rows) == count else f', the {len(rows)} costliest of {count}'}"
    head = ("#", "op", "target", "stream", "start µs", "cost µs", "SMs", "waits", "slack µs", "source")
    return _table(f"{title}; starts are predicted", head, rows, right="# stream start cost SMs slack")


def _starts(timeline: Timeline | None) -> dict[str, str]:
    return {s.op: f"{s.start_us:,.1f}" for s in timeline.slices} if timeline else {}


def _decisions(report: Report, shown: frozenset[str]) -> str:
    """Those about the whole first, then those about the ops shown."""
    if report.chosen is None:
        return ""
    made = [d for d in report.chosen.schedule.decisions if not d.op or d.op in shown]
    rows = [(_line(d.op), _line(d.choice), _line(d.reason)) for d in sorted(made, key=lambda d: bool(d.op))]
    return _table("Decisions", ("op", "choice", "because"), rows, right="") if rows else ""


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], right: str) -> str:
    """A table under its title; columns whose first word is among ``right`` are aligned to the right."""
    sides = ["right" if name.split(" ")[0] in right.split() else "left" for name in head]
    # Names such as "1e5" must stay what they are.
    return f"{title}\n" + tabulate(rows, head, tablefmt="simple", disable_numparse=True, colalign=sides)


def _us(us: float) -> str:
    return f"{us:,.1f} µs"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _few(names: Sequence[str], most: int = 3) -> str:
    more = f" +{len(names) - most}" if len(names) > most else ""
    return _line(", ".join(names[:most]) + more)


def _line(text: str) -> str:
    """On one line, without characters that would move the cursor: names and source lines are the model's to choose."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def _source(text: str) -> str:
    """A source line without the directories of its file, cut to fit into a table."""
    line = _line(text)
    if place := re.match(r"(.*?)(:\d+: .*)", line):
        line = re.split(r"[/\\]", place[1])[-1] + place[2]
    return line if len(line) <= _SOURCE_WIDTH else line[: _SOURCE_WIDTH - 1] + "…"
