"""Checks the conclusions of ``explain`` for six different models by measurements.

    python -m benchmarks.explain --out docs/explain.md               # all six
    python -m benchmarks.explain googlenet --out docs/explain.md     # one; the other sections stay

A conclusion is checked by runs that it is not derived from: the bound of the speedup by the best schedules over each
number of streams, idle capacity of the device by a larger batch, gaps between kernels by kernels of the other level.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from tabulate import tabulate

from autostream import Report, explain, optimize
from autostream.explaining import reports_of
from autostream.reporting.explanation import Explanation, explanation_of
from autostream.reporting.summary import Summary, summary_of
from benchmarks import zoo
from benchmarks.stamp import stamp

WORKLOADS = ("googlenet", "nasnetalarge", "resnet50", "mobilenet_v2", "bert_base", "towers8")
"""Branches, very many branches, a chain of large kernels, one of small kernels, full kernels, independent chains."""

BATCH = 8
TOLERANCE = 0.1
"""Relative tolerance of a prediction or a bound."""
OPS = 5

HEAD = """# What explain says of six models

Each section is what `autostream.explain` prints for a model at batch 1 (`python -m benchmarks.explain` makes it), and
beneath it what was measured to see whether its conclusions hold.
"""


def main(argv: list[str] | None = None) -> int:
    """Explain, measure, and write the sections."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.explain", description=__doc__.splitlines()[0])
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=f"default: {' '.join(WORKLOADS)}")
    parser.add_argument("--out", type=Path, required=True, help="the Markdown file; sections of other models stay")
    options = parser.parse_args(argv)
    unknown = set(options.workloads) - set(zoo.INFERENCE)
    if unknown:
        parser.error(f"{min(unknown)}: use {', '.join(zoo.INFERENCE)}")
    for name in options.workloads or WORKLOADS:
        before = options.out.read_text() if options.out.exists() else HEAD
        options.out.write_text(with_section(before, name, section(name)))
        print(f"{name} is in {options.out}", flush=True)
    return 0


def section(workload: str) -> str:
    """The section of one workload."""
    cuda = torch.cuda.is_available()
    device, dtype = (torch.device("cuda", 0), torch.float16) if cuda else (torch.device("cpu"), torch.float32)

    def reported(batch: int, policy: str = "auto", kernels: str = "auto") -> tuple[str, Report]:
        subject = zoo.prepare(zoo.INFERENCE[workload], batch, device, dtype)
        with torch.no_grad():
            fast = optimize(subject.model, subject.args, policy=policy, kernels=kernels)
        return explain(fast, ops=OPS), reports_of(fast)[0]

    text, report = reported(1)
    kernels = "inductor" if report.level == "inductor" else "eager"
    _, larger = reported(BATCH, policy="sequential", kernels=kernels)
    _, unfused = reported(1, policy="sequential", kernels="eager")
    rows = claims(report, larger, unfused)
    table = tabulate(rows, ("what it says", "what was measured", ""), tablefmt="github")
    made = stamp()
    where = f"On one {made['gpu'] or made['cpu']} with torch {made['torch']} ({made['date']}, commit {made['commit']})."
    return f"## {workload}\n\n```text\n{text}\n```\n\n{table}\n\n{where}"


def claims(report: Report, larger: Report, unfused: Report) -> list[tuple[str, str, str]]:
    """Rows of a conclusion, the measurement, and whether it holds.

    Args:
        report: of the workload.
        larger: at a batch of :data:`BATCH`, on one stream, with kernels of the same level.
        unfused: on one stream, with ATen kernels.
    """
    numbers = summary_of(report)
    explanation = explanation_of(report, numbers)
    if numbers is None or explanation is None:
        return []
    times = by_streams(report)
    return [
        *_of_time(report),
        *_of_streams(explanation, times),
        *_of_room(numbers, times, larger),
        *_of_kernels(report, times, unfused),
    ]


def by_streams(report: Report) -> Mapping[int, float]:
    """The best measured time over each number of streams, µs, of candidates captured as the chosen one is."""
    best: dict[int, float] = {}
    for candidate in report.candidates:
        alike = report.chosen is not None and candidate.captured == report.chosen.captured
        if alike and candidate.measured_us is not None:
            streams = candidate.schedule.streams
            best[streams] = min(best.get(streams, candidate.measured_us), candidate.measured_us)
    return dict(sorted(best.items()))


def with_section(text: str, name: str, body: str) -> str:
    """The text with this body in the section of that name, which is appended if there is none.

    Example:
        >>> print(with_section("head", "net", "new"))
        head
        <BLANKLINE>
        <!-- net:begin -->
        new
        <!-- net:end -->
        <BLANKLINE>
        >>> with_section(with_section("head", "net", "old"), "net", "new") == with_section("head", "net", "new")
        True
    """
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    marked = f"{begin}\n{body}\n{end}"
    if begin not in text:
        return f"{text.rstrip()}\n\n{marked}\n"
    head, _, rest = text.partition(begin)
    return f"{head}{marked}{rest.partition(end)[2]}"


def _of_time(report: Report) -> Iterator[tuple[str, str, str]]:
    chosen = report.chosen
    if chosen and chosen.measured_us:
        error = chosen.predicted_us / chosen.measured_us - 1
        measured = f"{chosen.measured_us:,.1f} µs: the prediction is {error:+.0%} off"
        yield f"it takes {chosen.predicted_us:,.1f} µs", measured, _verdict(abs(error) <= TOLERANCE)


def _of_streams(explanation: Explanation, times: Mapping[int, float]) -> Iterator[tuple[str, str, str]]:
    if not explanation.ceilings or len(times) < 2 or 1 not in times:
        return
    bound = explanation.ceilings[0]
    gains = {streams: times[1] / time_us for streams, time_us in times.items() if streams > 1}
    measured = ", ".join(f"{gain:.2f}× over {streams}" for streams, gain in gains.items())
    holds = max(gains.values()) <= bound.times * (1 + TOLERANCE)
    yield f"streams give at most {bound.times:.2f}×: {bound.why}", measured, _verdict(holds)


def _of_room(numbers: Summary, times: Mapping[int, float], larger: Report) -> Iterator[tuple[str, str, str]]:
    """Idle capacity bounds the time of a larger batch, which may take less, since larger kernels are more efficient."""
    many = by_streams(larger).get(1)
    if many is None or 1 not in times or numbers.work_us <= 0:
        return
    busy = max(numbers.sm_us, numbers.bandwidth_us) / numbers.work_us
    most, ratio = max(1.0, BATCH * busy), many / times[1]
    said = (
        f"one after the other, the ops keep {busy:.0%} of the device busy: {BATCH} times the work fits in {most:.1f}×"
    )
    yield said, f"batch {BATCH} takes {ratio:.1f}× the time of batch 1", _verdict(ratio <= most * (1 + TOLERANCE))


def _of_kernels(report: Report, times: Mapping[int, float], unfused: Report) -> Iterator[tuple[str, str, str]]:
    plain_us = by_streams(unfused).get(1)
    if (
        report.level != "inductor"
        or report.graph is None
        or unfused.graph is None
        or plain_us is None
        or 1 not in times
    ):
        return
    said = f"{len(report.graph.ops)} kernels, fused, instead of {len(unfused.graph.ops)}"
    faster = f"on one stream {times[1]:,.1f} µs instead of {plain_us:,.1f} µs"
    yield said, faster, _verdict(times[1] < plain_us)


def _verdict(holds: bool) -> str:
    return "holds" if holds else "**does not hold**"


if __name__ == "__main__":
    sys.exit(main())
