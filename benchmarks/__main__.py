"""The benchmarks' command line: ``python -m benchmarks run | merge | table | compare | plot``.

Exit codes: 0 success, 1 a comparison found a slowdown, 2 the command line cannot be used, 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from tqdm import tqdm

from autostream.cli.arguments import names, positive, share
from autostream.cli.changes import Change
from benchmarks import result
from benchmarks.compare import changes
from benchmarks.harness import table
from benchmarks.harness.comparison import Comparison
from benchmarks.harness.isolation import compare_isolated, with_caches
from benchmarks.plot import plots
from benchmarks.result import Result, ResultError
from benchmarks.stamp import stamp
from benchmarks.suites import SUITES, Row, Suite, comparison_of


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    try:
        arguments = _parser().parse_args(argv)
        code: int = arguments.command(arguments)
    except ResultError as error:
        print(f"benchmarks: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return code


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are exceptions."""

    def error(self, message: str) -> NoReturn:
        raise ResultError(f"{message} ({self.prog} --help says more)")


def _parser() -> _Parser:
    parser = _Parser(prog="python -m benchmarks", description="Measure, merge, show and compare.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_run(commands)
    merge = commands.add_parser("merge", help="put the rows of several result files into one")
    merge.add_argument("results", nargs="+", type=Path, metavar="FILE")
    merge.add_argument("--out", type=Path, required=True, metavar="FILE")
    merge.set_defaults(command=_merge)
    _add_table(commands)
    _add_compare(commands)
    plot = commands.add_parser("plot", help="draw a result as SVG")
    plot.add_argument("result", type=Path, metavar="FILE")
    plot.add_argument("--out", type=Path, default=Path(), metavar="FOLDER", help="default: here")
    _add_ratio_options(plot)
    plot.set_defaults(command=_plot)
    return parser


def _add_run(commands: Any) -> None:
    run = commands.add_parser(
        "run",
        help="measure a suite, or go on with it",
        description="Measure the rows of a suite that the result file does not have, and add them to it one by one; "
        "then try again those in which a mode failed, crashed or took too long.",
        epilog="example: python -m benchmarks run inference --minutes 8 --out inference.json",
    )
    run.add_argument("suite", choices=SUITES)
    run.add_argument("--out", type=Path, required=True, metavar="FILE", help="the result file, new or begun")
    run.add_argument("--workloads", type=names, metavar="A,B", help="only these")
    run.add_argument("--modes", type=names, metavar="A,B", help="instead of the suite's; rows keep those they have")
    run.add_argument("--piece", type=_piece, default=(1, 1), metavar="I/N", help="every N-th row, from the I-th")
    run.add_argument("--minutes", type=positive, default=float("inf"), help="begin no row after this")
    run.add_argument(
        "--timeout", type=positive, default=900.0, metavar="SECONDS", help="for one mode of a row (default: 900)"
    )
    run.add_argument(
        "--caches",
        type=Path,
        metavar="FOLDER",
        help="keep the compilers' caches there, for long compilations; first calls are faster then, as the file says",
    )
    run.add_argument(
        "--again",
        action="store_true",
        help="measure also what the file has of another commit, or if it has none of one, all",
    )
    run.set_defaults(command=_run)


def _add_table(commands: Any) -> None:
    show = commands.add_parser("table", help="show a result")
    show.add_argument("result", type=Path, metavar="FILE")
    show.add_argument("--cells", action="store_true", help="a line for each mode, with all its numbers")
    show.add_argument("--format", choices=table.FORMATS, default="terminal")
    _add_ratio_options(show)
    show.set_defaults(command=_table)


def _add_compare(commands: Any) -> None:
    compare = commands.add_parser(
        "compare",
        help="say what a second result changed, with 1 if something is worse",
        description="Compare each cell's speed, against the baseline of its own run. Worse is what lost more than the "
        "limit and what medians differ by chance, or than five times the limit; and what A has and B has not.",
    )
    compare.add_argument("before", type=Path, metavar="A")
    compare.add_argument("after", type=Path, metavar="B")
    compare.add_argument("--fail-over", type=share, default=0.03, metavar="3%", help="the most to lose (default: 3%%)")
    compare.add_argument("--modes", default="autostream", metavar="PREFIX", help="default: autostream; all: ''")
    _add_ratio_options(compare)
    compare.set_defaults(command=_compare)


def _add_ratio_options(parser: _Parser) -> None:
    parser.add_argument("--baseline", metavar="MODE", help="what ratios are to (default: the suite's)")
    parser.add_argument("--measure", choices=("call", "device"), default="call", help="what ratios are of")


def _piece(text: str) -> tuple[int, int]:
    first, _, count = text.partition("/")
    if not (first.isdecimal() and count.isdecimal() and 1 <= int(first) <= int(count)):
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed: write I/N, such as 2/4")
    return int(first), int(count)


def _run(arguments: argparse.Namespace) -> int:
    suite = SUITES[arguments.suite]
    modes = arguments.modes or suite.modes
    found = _begun(arguments)
    end = time.monotonic() + 60 * arguments.minutes
    here = {**stamp(), "timeout_s": arguments.timeout, "modes": list(modes)}
    if arguments.caches:
        here["caches"] = "kept"
    tasks, remaining = _tasks(arguments, suite, modes, found, here["commit"]), 0
    result.check_kind(found, here)
    result.save(found, arguments.out)  # before the first row, check that it can be written
    try:
        for done, (task, bar) in enumerate(_progress(tasks)):
            if time.monotonic() > end:
                remaining = sum(not task.retry for task in tasks[done:])
                break
            make = comparison_of(task.row, suite.device)
            make = partial(with_caches, arguments.caches, make) if arguments.caches else make
            measured = _measured(task, make, arguments.timeout, bar)
            found = _added(arguments, task, measured, here)
            if bar.disable:
                print(_finished(measured), file=sys.stderr)
    except KeyboardInterrupt:
        print(f"interrupted; {arguments.out} has what was done, and the same command goes on", file=sys.stderr)
        return 130
    if remaining:
        print(
            f"{remaining} row{'s remain' if remaining > 1 else ' remains'}; the same command goes on", file=sys.stderr
        )
    _show(table.ratios_table(found["rows"], suite.baseline, "call"))
    return 0


def _begun(arguments: argparse.Namespace) -> Result:
    return result.load(arguments.out) if arguments.out.exists() else result.empty(arguments.suite)


def _added(arguments: argparse.Namespace, task: _Task, measured: dict[str, Any], here: dict[str, Any]) -> Result:
    """Add a row to the file, which another command may have changed in the meantime."""
    found = _begun(arguments)
    had = _by_key(found).get(result.key(measured))
    if task.retry and had and not result.timed(had) <= result.timed(measured):
        return found  # a retry must not lose times
    found = result.ordered(result.with_row(found, measured, here), SUITES[found["suite"]].rows)
    result.save(found, arguments.out)
    return found


def _by_key(found: Result) -> dict[tuple[Any, ...], dict[str, Any]]:
    return {result.key(row): row for row in found["rows"]}


class _Task(NamedTuple):
    """A row to measure, and how.

    Attributes:
        row: the workload.
        modes: its modes.
        since: date of the earlier measurement in the file, or ``""``.
        retry: whether it was measured, but some modes failed.
    """

    row: Row
    modes: tuple[str, ...]
    since: str
    retry: bool


def _tasks(
    arguments: argparse.Namespace, suite: Suite, modes: Sequence[str], found: Result, commit: str | None
) -> list[_Task]:
    """The rows to measure. A row that lacks a mode is measured in all its modes, since they share rounds.

    The oldest rows come first, so that a command continues where the last one ran out of time, and retries come last.

    Raises:
        ResultError: there is no such workload, mode or device, or the file is of another suite.
    """
    if found["suite"] != arguments.suite:
        raise ResultError(f"{arguments.out} is a result of {found['suite']}: write to another file")
    if suite.device == "cuda" and not torch.cuda.is_available():
        raise ResultError(f"the suite {arguments.suite} needs a CUDA device; the suite cpu does not")
    every = suite.known
    _check_names("modes", modes, every)
    workloads = arguments.workloads or [row.workload for row in suite.rows]
    _check_names("workloads", workloads, [row.workload for row in suite.rows])
    first, count = arguments.piece
    piece = [row for row in suite.rows if row.workload in workloads][first - 1 :: count]
    if not piece:
        print(f"--piece {first}/{count} is empty: there are fewer rows than pieces", file=sys.stderr)
    tasks = _due(piece, modes, found, arguments.again, commit)
    for mode in (mode for task in tasks for mode in task.modes):
        if mode not in every:
            raise ResultError(f"{arguments.out} has the mode {mode}, which there is no more: write to another file")
    return tasks


def _due(piece: Sequence[Row], modes: Sequence[str], found: Result, again: bool, commit: str | None) -> list[_Task]:
    """The rows of a piece to measure, in order; ``again`` is ``--again``."""
    rows = _by_key(found)
    had = {row: old for row in piece if (old := rows.get(result.key(row)))}
    stamps = {row: found["stamps"][old["stamp"]] for row, old in had.items()}
    others = {row for row, stamp in stamps.items() if stamp["commit"] != commit}
    renewed = (others or {*had}) if again else set()
    tasks = []
    for row in piece:
        old = had.get(row)
        cells = tuple(old["cells"]) if old else ()
        wanted = tuple(dict.fromkeys((*cells, *modes)))
        lacking = old is None or row in renewed or (wanted != cells and not old["failure"])
        if lacking or _failed(old):
            tasks.append(_Task(row, wanted, stamps[row]["date"] if old else "", not lacking))
    return sorted(tasks, key=lambda task: (task.retry, task.since))


def _failed(row: dict[str, Any] | None) -> bool:
    """Whether a retry may help; it does not for a mode that is wrong."""
    return row is not None and (
        bool(row["failure"]) or any(cell["status"] not in ("ok", "wrong") for cell in row["cells"].values())
    )


def _check_names(what: str, names: Sequence[str], known: Any) -> None:
    for name in names:
        if name not in known:
            raise ResultError(f"--{what} {name}: use {', '.join(dict.fromkeys(known))}")


def _progress(tasks: Sequence[_Task]) -> Iterator[tuple[_Task, Any]]:
    # Drawn for terminals only, and by the clock, since a row shows its modes before it is done.
    with tqdm(tasks, unit="row", disable=None, miniters=0) as bar:
        for task in bar:
            bar.set_description(task.row.workload)
            yield task, bar


def _measured(task: _Task, make: Callable[[], Comparison], timeout_s: float, bar: Any) -> dict[str, Any]:
    def note(mode: str) -> None:
        bar.set_postfix_str(mode, refresh=False)
        bar.update(0)  # redraws, at a limited rate

    start = time.monotonic()
    outcome = compare_isolated(make, task.modes, timeout_s, note)
    return {
        **{name: getattr(task.row, name) for name in task.row.__slots__},
        "seconds": round(time.monotonic() - start, 1),
        "failure": outcome.failure,
        "cells": {mode: cell.dump() for mode, cell in outcome.cells.items()},
    }


def _finished(row: dict[str, Any]) -> str:
    """A row's status in one line."""
    bad = [f"{mode} {cell['status']}" for mode, cell in row["cells"].items() if cell["status"] != "ok"]
    return ", ".join(filter(None, (f"{table.title(row)}: {row['seconds']} s", row["failure"], *bad)))


def _merge(arguments: argparse.Namespace) -> int:
    found = result.merged([result.load(path) for path in arguments.results])
    result.save(result.ordered(found, SUITES[found["suite"]].rows), arguments.out)
    return 0


def _table(arguments: argparse.Namespace) -> int:
    found = result.load(arguments.result)
    baseline = _baseline(arguments, found)
    if arguments.cells:
        _show(table.cells_table(found["rows"], baseline, arguments.format, arguments.measure))
    else:
        _show(table.ratios_table(found["rows"], baseline, arguments.measure, arguments.format))
    return 0


def _compare(arguments: argparse.Namespace) -> int:
    before, after = result.load(arguments.before), result.load(arguments.after)
    baseline = _baseline(arguments, before, after)
    found = list(changes(before, after, arguments.modes, baseline, arguments.measure))
    if not any(change.before for change in found):
        raise ResultError(f"{arguments.before} and {arguments.after} have no cell in common that could be compared")
    worse = [change for change in found if change.worse(arguments.fail_over)]
    for name, path, side in (("A", arguments.before, before), ("B", arguments.after, after)):
        _show(f"{name} {path}: {_origin(side)}")
    for change in found:
        _show(_line(change, change in worse))
    _show(
        f"{len(worse)} of {len(found)} cells lost more than {arguments.fail_over:.1%}, chance aside, against {baseline}"
    )
    return int(bool(worse))


def _origin(found: Result) -> str:
    """Machine, torch and commits of a result."""
    first, commits = found["stamps"][0], dict.fromkeys(stamp["commit"] or "unknown" for stamp in found["stamps"])
    return f"{first['gpu'] or 'cpu'}, torch {first['torch']}, commit {' and '.join(commits)}"


def _line(change: Change, worse: bool) -> str:
    before, after = (f"{found.median:.3f}×" if found else "-" for found in (change.before, change.after))
    share = f" {change.share:+.1%}" if change.share is not None else f" {change.status}"
    return (
        f"{change.row}, {change.mode}: {before} to {after}{share}"
        f"{', noisy' if change.noisy else ''}{', WORSE' if worse else ''}"
    )


def _plot(arguments: argparse.Namespace) -> int:
    found = result.load(arguments.result)
    baseline = _baseline(arguments, found)
    try:
        paths = plots(found, baseline, arguments.measure, arguments.out)
    except OSError as error:
        raise ResultError(f"--out {arguments.out}: {error.strerror}: name a folder that can be written") from error
    if not paths:
        raise ResultError(f"{arguments.result} has nothing to plot: no mode and {baseline} were timed in the same row")
    for path in paths:
        _show(str(path))
    return 0


def _baseline(arguments: argparse.Namespace, *results: Result) -> str:
    """The mode of ``--baseline``, or that of the first result's suite.

    Raises:
        ResultError: a result does not have it.
    """
    baseline: str = arguments.baseline or SUITES[results[0]["suite"]].baseline
    for found in results:
        modes = dict.fromkeys(mode for row in found["rows"] for mode in row["cells"])
        if baseline not in modes and (modes or not found["rows"]):  # failed rows have no modes
            raise ResultError(f"no row has the baseline {baseline}: there is {', '.join(modes) or 'none yet'}")
    return baseline


def _show(text: str) -> None:
    """Print; the reader, such as ``head``, may close the pipe."""
    with suppress(BrokenPipeError):
        print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
