"""Accuracy of the cost model: simulated against measured time, with measured costs and with the roofline.

    python -m benchmarks.predictions --out benchmarks/results/latest                    the inference zoo
    python -m benchmarks.predictions googlenet:1 resnet50:32 --out …                    these alone

Workloads are optimized one after the other. All measured schedules count, not only the chosen one. Kernels can be
compiled beforehand by several processes.

Rows of the same commit and machine in the folder stay, so a long run can be split.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import nan
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from tabulate import tabulate

import autostream
from autostream.costs.roofline import price
from autostream.ir import Candidate
from autostream.reporting.report import Report
from autostream.scheduling.simulate import simulate
from benchmarks import zoo
from benchmarks.stamp import earlier_rows, save, saving_parser, stamp
from benchmarks.suites import SUITES

ROWS = tuple(f"{row.workload}:{row.batch}" for row in SUITES["inference"].rows)
"""``workload:batch`` of each row."""


def main(argv: list[str] | None = None) -> int:
    """Measure, save and print the results."""
    parser = saving_parser("predictions", __doc__)
    parser.add_argument("rows", nargs="*", metavar="WORKLOAD:BATCH", help="default: the inference suite")
    parser.add_argument("--processes", type=int, default=1, help="compile so many at a time beforehand (default: 1)")
    options = parser.parse_args(argv)
    unknown = set(options.rows) - set(ROWS)
    if unknown:
        parser.error(f"{min(unknown)}: use {', '.join(ROWS)}")
    wanted = options.rows or ROWS
    if options.processes > 1:
        with ThreadPoolExecutor(options.processes) as pool:
            list(pool.map(lambda row: list(_from_a_process("prepare", [row])), wanted))
    now = stamp()
    found = list(measured(wanted))
    earlier = earlier_rows("predictions", options.out, now)  # read late: another process may have written
    rows = list({row["row"]: row for row in (*earlier, *found)}.values())
    result: dict[str, Any] = {"schema": 1, "stamp": now, "summary": summary(rows), "rows": rows}
    save("predictions", result, table(result), options.out)
    plot(rows, options.out / "predictions.svg")
    return 0


def measured(rows: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Measure rows in another process; where a row crashes it, a new one continues with the next row."""
    left = list(rows)
    while left:
        for found in _from_a_process("measure", left):
            left = left[left.index(found["row"]) + 1 :]
            yield found
        left = left[1:]  # skips the one that crashed


def prepare(rows: Sequence[str]) -> None:
    """Compile the kernels of rows into the caches on disk."""
    for row in rows:
        _optimize(row, costs="roofline", policy="sequential")


def measure(rows: Sequence[str]) -> None:
    """Print rows as lines of JSON."""
    for row in rows:
        print(json.dumps(row_of(row, _optimize(row))), flush=True)
        torch._dynamo.reset()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _optimize(row: str, **options: Any) -> Report:
    name, _, batch = row.partition(":")
    cuda = torch.cuda.is_available()
    device, dtype = (torch.device("cuda", 0), torch.float16) if cuda else (torch.device("cpu"), torch.float32)
    subject = zoo.prepare(zoo.INFERENCE[name], int(batch), device, dtype)
    reports: tuple[Report, ...]
    with torch.no_grad():
        reports = autostream.optimize(subject.model, subject.args, **options).reports
    return reports[0]


def row_of(name: str, report: Report) -> dict[str, Any]:
    """Predicted and measured times of each measured schedule."""
    assert report.graph is not None
    profile = report.profile
    assert profile is not None
    roofline = price(report.graph, profile)

    def line(candidate: Candidate) -> dict[str, Any]:
        schedule, captured = candidate.schedule, candidate.captured
        timeline = simulate(schedule, roofline, profile, captured=captured)
        replay_us = profile.replay_us if captured else 0.0
        return {
            "policy": schedule.policy,
            "streams": schedule.streams,
            "captured": captured,
            "predicted_us": round(candidate.predicted_us, 2),
            "roofline_us": round(timeline.makespan_us + replay_us, 2),
            "measured_us": round(candidate.measured_us or 0.0, 2),
            "chosen": candidate == report.chosen,
        }

    return {
        "row": name,
        "level": report.level,
        "ops": len(report.graph.ops),
        "costs": sorted({cost.source for cost in report.costs.values()}),
        "seconds": {stage: round(took, 3) for stage, took in report.seconds.items()},
        "candidates": [line(candidate) for candidate in report.candidates if candidate.measured_us],
    }


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Errors of the chosen and of all schedules, rank correlations of gains, and the worst chosen one."""
    kept = [_chosen(row) for row in rows]
    every = [line for row in rows for line in row["candidates"]]
    gains = [[_alone(row)[key] / _chosen(row)[key] for row in rows] for key in ("measured_us", "predicted_us")]
    guesses = [_alone(row)["roofline_us"] / _chosen(row)["roofline_us"] for row in rows]
    return {
        "rows": len(rows),
        "error": round(_error(kept, "predicted_us"), 4),
        "error_of_all_schedules": round(_error(every, "predicted_us"), 4),
        "roofline_error": round(_error(kept, "roofline_us"), 4),
        "roofline_error_of_all_schedules": round(_error(every, "roofline_us"), 4),
        "gain_rank_correlation": round(rank_correlation(*gains), 4),
        "roofline_gain_rank_correlation": round(rank_correlation(gains[0], guesses), 4),
        "worst_against_one_stream": round(max(_chosen(r)["measured_us"] / _alone(r)["measured_us"] for r in rows), 4),
    }


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's rank correlation; NaN for fewer than two values.

    Example:
        >>> round(rank_correlation([1.0, 2.0, 3.0], [10.0, 30.0, 20.0]), 2)
        0.5
    """
    if len(first) < 2:
        return nan
    pairs = torch.tensor([_ranks(first), _ranks(second)], dtype=torch.float64)
    return torch.corrcoef(pairs)[0, 1].item()


def _ranks(values: Sequence[float]) -> list[float]:
    """Ranks from the smallest; equal values share theirs."""
    return [sum(other < value for other in values) + (values.count(value) - 1) / 2 for value in values]


def table(result: dict[str, Any]) -> str:
    """A line for each row, and the summary."""
    lines = []
    for row in result["rows"]:
        chosen, alone = _chosen(row), _alone(row)
        lines.append(
            [
                row["row"],
                row["ops"],
                f"{chosen['policy']} {chosen['streams']}",
                chosen["measured_us"],
                chosen["predicted_us"],
                f"{chosen['predicted_us'] / chosen['measured_us'] - 1:+.0%}",
                chosen["roofline_us"],
                f"{chosen['roofline_us'] / chosen['measured_us'] - 1:+.0%}",
                f"{alone['measured_us'] / chosen['measured_us']:.2f}×",
                f"{alone['predicted_us'] / chosen['predicted_us']:.2f}×",
            ]
        )
    headers = ["workload:batch", "ops", "schedule", "measured µs", "predicted µs", "", "roofline µs", "", "gain"]
    text = tabulate(lines, [*headers, "predicted gain"], tablefmt="github", floatfmt=".1f")
    s = result["summary"]
    return (
        f"{text}\n\n"
        f"Mean error of the schedules kept: {s['error']:.1%} with measured costs, {s['roofline_error']:.1%} with the "
        f"roofline; of all {sum(len(row['candidates']) for row in result['rows'])} schedules: "
        f"{s['error_of_all_schedules']:.1%} and {s['roofline_error_of_all_schedules']:.1%}. Rank correlation of "
        f"predicted and measured gains: {s['gain_rank_correlation']:.2f} and "
        f"{s['roofline_gain_rank_correlation']:.2f}. Slowest "
        f"schedule kept, against one stream: {s['worst_against_one_stream']:.3f} times its time."
    )


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Plot predicted against measured time of the chosen schedules, for both kinds of costs."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 5))
    axes = figure.add_subplot()
    kept = [_chosen(row) for row in rows]
    ends = [f(line["measured_us"] for line in kept) for f in (min, max)]
    axes.plot(ends, ends, color="black", linewidth=0.8)
    for key, label in (("predicted_us", "measured costs"), ("roofline_us", "roofline")):
        axes.scatter([line["measured_us"] for line in kept], [line[key] for line in kept], s=12, label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("measured µs")
    axes.set_ylabel("predicted µs")
    axes.legend(fontsize="small")
    with rc_context({"svg.hashsalt": "autostream"}):  # the same result gives the same file, ids included
        figure.savefig(path, bbox_inches="tight", metadata={"Date": None})


def _chosen(row: dict[str, Any]) -> dict[str, Any]:
    return next(line for line in row["candidates"] if line["chosen"])


def _alone(row: dict[str, Any]) -> dict[str, Any]:
    return next(line for line in row["candidates"] if line["policy"] == "sequential")


def _error(lines: Iterable[dict[str, Any]], key: str) -> float:
    return float(mean(abs(line[key] / line["measured_us"] - 1) for line in lines))


def _from_a_process(what: str, rows: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The JSON lines that a function of this file prints in a process of its own."""
    program = f"from benchmarks import predictions; predictions.{what}({list(rows)!r})"
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", program], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                print(line, end="", file=sys.stderr, flush=True)
                yield json.loads(line)
    if process.returncode:
        print(f"a process of {', '.join(rows)} ended with {process.returncode}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
