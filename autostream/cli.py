"""The command line: ``autostream schedule``, ``inspect``, ``trace``, ``report``, ``profile``, ``bench`` and ``demo``.

Exit codes: 0 all is well, 1 a check failed, 2 the command line or the model that it names cannot be used, 130
interrupted.
"""

from __future__ import annotations

import argparse
import io
import json
import logging
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, NoReturn, get_args

import torch
from torch import nn

from autostream import __version__, pipeline
from autostream.api import optimize
from autostream.arguments import memory, names, positive
from autostream.bench.clock import clock_of, interleaved
from autostream.bench.inference import Inference, subject_of
from autostream.bench.isolation import hold_isolated
from autostream.bench.modes import AUTOSTREAM, SLOW, modes_of
from autostream.bench.table import cells_table
from autostream.build import lowered
from autostream.costs.cache import read
from autostream.costs.device import known_names, profile_named, profile_of
from autostream.costs.here import profile_anew
from autostream.costs.measured import METHOD
from autostream.costs.records import Measurements, check_context, context_of, to_json
from autostream.dispatch import Dispatcher
from autostream.errors import AutostreamError, OptionError, TargetError, TraceError, first_line
from autostream.ir import DeviceProfile
from autostream.options import CostSource, KernelLevel, Options, PolicyName
from autostream.pipeline import versions
from autostream.reporting import dot, text, timeline
from autostream.reporting.ops import Selection
from autostream.reporting.page import assemble
from autostream.reporting.report import Report
from autostream.targets import DTYPES, InputSpec, parse_device, parse_input, prepare

_SCHEDULE = """Predict what scheduling would gain, on this device or another, without running the model:
how much faster, how sure that is, at most how much, why not more, what would run beside what, and what to try.
"""

_INSPECT = """Show a model's plan op by op, without running the model: all that schedule says, all candidates,
and for each op its cost, stream, waits, slack and source line.
"""

_TRACE = """Write when each op runs as a trace file, for ui.perfetto.dev or chrome://tracing: a lane for each
stream, arrows for waits, the critical path, and counters for the memory in use and what is asked of the device.
On a GPU that is here, the model is optimized, and a run that a profiler watched stands beside the predicted one.
"""

_REPORT = """Write all that is known of a model's plan as one HTML page, which needs no network: summary, timeline,
memory over time, graph, ops, candidates and environment, to be looked through with mouse, keys or fingers.
"""

_PROFILE = """Measure what the cost model knows of this machine's GPU: bandwidth, throughput, and what edges, forks and
launches cost. That takes seconds, and the GPU should have nothing else to do. With --out FILE.json, other machines can
plan for it: autostream schedule TARGET --device FILE.json
"""

_BENCH = """Time a model in every mode there is, side by side, in interleaved rounds, after checking what each computes.
Exits with 1 if autostream has no time: it failed, or its outputs are wrong.
"""

_TARGET = """TARGET is a torchvision or timm model's name (random weights, nothing is downloaded),
package.module:factory or file.py:factory. A factory is a function that takes no arguments and returns a
module, or (module, args).
The module is imported and the factory called: TARGET RUNS CODE, so name only what you trust.
"""

_INPUT = f"""one example input, random, such as 1x3x224x224:float16 or scalar; once for each input. Without DTYPE it is
that of the model; with a floating-point one the model is cast to it. DTYPE is one of {", ".join(DTYPES)}"""

_PLANNING = ("policy", "streams", "costs", "kernels", "tuning_seconds", "memory_budget", "seed")
"""The options of :func:`autostream.optimize` that a plan can be told."""

_HERE = "cpu, cuda or cuda:N (default: the GPU if there is one)"

_DEVICE = f"""plan for this: cpu, cuda, cuda:N, or a GPU that need not be here: {", ".join(known_names()[:-1])} or a
FILE.json in which it was measured (default: the GPU if there is one)"""

_BUDGET = """the most memory: a ratio to what one stream, weights and inputs take together, 1.1 or 2x, or bytes that
a schedule may allocate beside them, 64MiB (default: 1.1)"""

_TOLERANCE = {torch.float16: 1e-2, torch.float32: 1e-4}
"""Largest difference that is put down to kernels chosen differently, relative to the largest output."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; ``argv`` is without the program's name, by default that of the process.

    Returns:
        the exit code.
    """
    try:
        arguments = _parser().parse_args(argv)
        code: int = arguments.run(arguments)
        sys.stdout.flush()
    except AutostreamError as error:
        print(f"autostream: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("autostream: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader, such as head, has seen enough
        return 0
    return code


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are ours: one line."""

    def error(self, message: str) -> NoReturn:
        raise OptionError(f"{message} ({self.prog} --help says more)")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="autostream",
        description="Schedule the independent operations of a PyTorch model over CUDA streams.",
        epilog="example: autostream schedule googlenet --device h200",
    )
    parser.add_argument("--version", action="version", version=f"autostream {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_schedule(commands)
    _add_inspect(commands)
    _add_trace(commands)
    _add_report(commands)
    _add_profile(commands)
    _add_bench(commands)
    _add_demo(commands)
    return parser


def _add_schedule(commands: argparse._SubParsersAction[_Parser]) -> None:
    schedule = commands.add_parser(
        "schedule",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        help="predict what scheduling would gain, on a GPU that need not be here, and why not more",
        description=f"{_SCHEDULE}\n{_TARGET}",
        epilog="example: autostream schedule googlenet --input 1x3x224x224:float16 --device h100",
    )
    _add_planning(schedule)
    add = schedule.add_argument
    add(
        "--ops",
        type=_whole,
        default=10,
        metavar="N",
        help="say of the N costliest ops why they are where (default: 10)",
    )
    add("--json", action="store_true", help="everything, as JSON")
    schedule.set_defaults(run=_plan, face=_answers)


def _add_inspect(commands: argparse._SubParsersAction[_Parser]) -> None:
    inspect = commands.add_parser(
        "inspect",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        help="show a model's plan op by op, as tables, JSON or a drawing",
        description=f"{_INSPECT}\n{_TARGET}",
        epilog="example: autostream inspect googlenet --input 1x3x224x224:float16 --device h200 --ops 20",
    )
    _add_planning(inspect)
    inspect.add_argument("--ops", type=_whole, metavar="N", help="show only the N costliest ops (default: all)")
    form = inspect.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="everything, as JSON")
    form.add_argument("--dot", action="store_true", help="the scheduled graph, for Graphviz")
    form.add_argument(
        "--code", action="store_true", help="the graph that runs, as Python: its streams, records and waits"
    )
    inspect.set_defaults(run=_plan, face=_tables)


def _add_trace(commands: argparse._SubParsersAction[_Parser]) -> None:
    trace = commands.add_parser(
        "trace",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        help="write when each op runs, on a GPU that need not be here, for Perfetto or chrome://tracing",
        description=f"{_TRACE}\n{_TARGET}",
        epilog="example: autostream trace googlenet --input 1x3x224x224:float16 --device h200 --out trace.json",
    )
    _add_planning(trace)
    trace.set_defaults(run=_plan, face=_trace, runs=True)


def _add_report(commands: argparse._SubParsersAction[_Parser]) -> None:
    report = commands.add_parser(
        "report",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        help="write a page about a model's plan, to be opened in a browser",
        description=f"{_REPORT}\n{_TARGET}",
        epilog="example: autostream report googlenet --input 1x3x224x224:float16 --device h200 --out report.html",
    )
    _add_planning(report)
    report.set_defaults(run=_plan, face=_page, runs=True)


def _add_profile(commands: argparse._SubParsersAction[_Parser]) -> None:
    profile = commands.add_parser(
        "profile",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        help="measure this machine's GPU, so that others can plan for it",
        description=_PROFILE,
        epilog="example: autostream profile --out my-gpu.json",
    )
    profile.add_argument("--device", help=_HERE)
    profile.add_argument("--out", metavar="FILE.json", type=Path, help="write what --device FILE.json reads")
    profile.set_defaults(run=_profile)


def _add_planning(parser: argparse.ArgumentParser) -> None:
    """What commands take that plan a model without running it."""
    _add_model(parser, _DEVICE)
    add = parser.add_argument
    add("--policy", default="auto", help=f"{_either(PolicyName)} (default: auto)")
    add("--streams", type=_streams, default="auto", metavar="N", help="how many streams, or auto (default: auto)")
    add("--tuning-seconds", type=positive, default=10.0, metavar="SECONDS", help="to time ops and search (default: 10)")
    add("--memory-budget", type=memory, default=1.1, metavar="SIZE", help=_BUDGET)
    add("--seed", type=_whole, default=0, metavar="N", help="of the random choices of the search (default: 0)")
    add("--costs", default="auto", help=f"{_either(CostSource)} (default: auto)")
    add("--kernels", default="auto", help=f"{_either(KernelLevel)}, the last where the GPU is (default: auto)")
    add("--out", metavar="FILE", type=Path, help="write there instead of to the terminal")
    parser.set_defaults(runs=False)


def _add_model(parser: argparse.ArgumentParser, device: str = _HERE) -> None:
    parser.add_argument("target", metavar="TARGET", help="the model")
    parser.add_argument("--input", metavar="SHAPE[:DTYPE]", action="append", default=[], help=_INPUT)
    parser.add_argument("--device", help=device)


def _add_bench(commands: argparse._SubParsersAction[_Parser]) -> None:
    bench = commands.add_parser(
        "bench",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        help="time a model in every mode there is, side by side",
        description=f"{_BENCH}\n{_TARGET}",
        epilog="example: autostream bench googlenet --input 1x3x224x224:float16",
    )
    _add_model(bench)
    add = bench.add_argument
    add("--modes", type=names, metavar="A,B", help="only these (default: all but the slow ones)")
    add("--baseline", metavar="MODE", help="what the others are compared with (default: cuda_graph, on a CPU eager)")
    add("--timeout", type=positive, default=900.0, metavar="SECONDS", help="for one mode (default: 900)")
    add("--json", action="store_true", help="the same, as JSON")
    add("--out", metavar="FILE", type=Path, help="write there instead of to the terminal")
    bench.set_defaults(run=_bench)


def _add_demo(commands: argparse._SubParsersAction[_Parser]) -> None:
    demo = commands.add_parser(
        "demo",
        help="optimize GoogLeNet and compare it with itself",
        description="Optimize torchvision's GoogLeNet, check its outputs against the plain model and time both. "
        "Exits with 1 if they differ.",
        epilog="example: autostream demo --device cuda",
    )
    demo.add_argument("--device", help=_HERE)
    demo.set_defaults(run=_demo)


def _either(values: object) -> str:
    """The values of an option in words."""
    *others, last = get_args(values)
    return f"{', '.join(others)} or {last}"


def _streams(text: str) -> str | int:
    return int(text) if text.isdecimal() else text


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed: use a whole number")
    return int(text)


def _plan(arguments: argparse.Namespace) -> int:
    options = Options.parse({name: getattr(arguments, name) for name in _PLANNING})
    device, profile = _planned_for(arguments.device)
    inputs = [parse_input(text) for text in arguments.input]
    with redirect_stdout(sys.stderr):  # what the user's code prints is no part of the answer
        model, args = prepare(arguments.target, inputs, device)
        with torch.no_grad(), _quiet_torch():
            # On a GPU that is here, what was measured is to be seen too.
            runs = arguments.runs and device.type == "cuda"
            report = _run(model, args, options) if runs else _planned(model, args, options, profile)
            shown = arguments.face(_Plan(model, args, report), arguments)
    _write(shown, arguments.out)
    if arguments.runs and report.measured is None:
        refusals = (refusal.reason for refusal in report.refusals if refusal.choice == "not watched")
        reason = next(refusals, "the device is not a GPU that is here")
        print(f"autostream: all times are predicted, for no run was watched: {reason}", file=sys.stderr)
    return 0


class _Plan(NamedTuple):
    """What was planned, and its report."""

    model: nn.Module
    args: tuple[Any, ...]
    report: Report


def _planned_for(text: str | None) -> tuple[torch.device, DeviceProfile | None]:
    """Where to put the model, and the device to plan for if that is another one.

    Raises:
        CostError: the file of measurements cannot be used.
        TargetError: it names no device, or one that is not here and of which nothing is known.
    """
    if text is None or re.fullmatch(r"cpu|cuda(:\d+)?", text, re.ASCII):
        return parse_device(text), None
    if not text.endswith(".json"):
        return torch.device("cpu"), profile_named(text)
    found = read(Path(text))
    # Where it is planned, other versions may well be installed than where it was measured; its numbers mean the same.
    here = replace(found.context, versions={**found.context.versions, "method": str(METHOD)})
    check_context(found.context, here, text)
    if found.profile is None:
        raise TargetError(f"--device {text}: no device was measured in it: use one of {', '.join(known_names())}")
    return torch.device("cpu"), found.profile


def _planned(model: nn.Module, args: tuple[Any, ...], options: Options, profile: DeviceProfile | None) -> Report:
    try:
        return pipeline.plan(model, args, {}, options, profile)
    except TraceError as error:
        raise TraceError(
            f"{error}; autostream.optimize splits such a model at graph breaks or runs it as it is, and "
            "autostream.explain shows the pieces after a call"
        ) from error


def _run(model: nn.Module, args: tuple[Any, ...], options: Options) -> Report:
    report = Dispatcher(model, replace(options, strict=True)).watched(*args)
    if report is None:
        raise TargetError("nothing is scheduled while AUTOSTREAM_DISABLE is set: unset it")
    return report


@contextmanager
def _quiet_torch() -> Iterator[None]:
    """Where torch cannot trace a model, it logs and prints pages on top of the exception, which says the same."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)


def _answers(plan: _Plan, arguments: argparse.Namespace) -> str:
    return plan.report.to_json() if arguments.json else text.answers(plan.report, Selection(ops=arguments.ops))


def _tables(plan: _Plan, arguments: argparse.Namespace) -> str:
    model, args, report = plan
    if arguments.json:
        return report.to_json()
    if arguments.code:
        return lowered(model, args, {}, report).code
    if not arguments.dot:
        return text.render(report, Selection(ops=arguments.ops))
    if report.graph is None or report.chosen is None or report.profile is None:
        raise _nothing(arguments.target, "graph to draw", report)
    return dot.render(report.graph, report.chosen.schedule, report.costs, report.profile)


def _trace(plan: _Plan, arguments: argparse.Namespace) -> str:
    if plan.report.timeline is None:
        raise _nothing(arguments.target, "timeline to show", plan.report)
    return timeline.render(plan.report)


def _page(plan: _Plan, arguments: argparse.Namespace) -> str:
    return assemble.render(plan.report)


def _nothing(target: str, what: str, report: Report) -> TargetError:
    reasons = "; ".join(refusal.reason for refusal in report.refusals)
    return TargetError(f"{target} has no {what}: {reasons}")


def _profile(arguments: argparse.Namespace) -> int:
    device = parse_device(arguments.device)
    if device.type == "cpu":
        raise TargetError("--device cpu: a processor is not measured: run it where the GPU is")
    if arguments.out:
        if arguments.out.suffix != ".json":
            raise TargetError(f"--out {arguments.out}: name a file that ends in .json, as --device does")
        _require_writable(arguments.out)
    try:
        measured, remarks = profile_anew(str(device))
    except RuntimeError as error:
        raise TargetError(
            f"--device {device}: it could not be measured: {first_line(error)}; free it and try again"
        ) from error
    for remark in remarks:
        print(f"autostream: {remark.choice}: {remark.reason}", file=sys.stderr)
    if arguments.out:
        context = context_of(str(device), profile_of(str(device)), METHOD)
        _write(to_json(Measurements(context, measured)), arguments.out)
    else:
        _write(text.profile(measured))
    return 0


def _bench(arguments: argparse.Namespace) -> int:
    device = parse_device(arguments.device)
    known = modes_of(device)
    modes = arguments.modes or [mode for mode in known if mode not in SLOW]
    baseline = arguments.baseline or ("eager" if device.type == "cpu" else "cuda_graph")
    for mode in (*modes, baseline):
        if mode not in known:
            raise OptionError(f"there is no mode {mode!r} on this device: use {', '.join(known)}")
    modes = list(dict.fromkeys([baseline, *modes]))
    inputs = [parse_input(text) for text in arguments.input]
    if arguments.out:
        _require_writable(arguments.out)
    outcome = hold_isolated(partial(_contest, arguments.target, inputs, device), modes, arguments.timeout, _say)
    _say("")
    if outcome.failure:
        raise TargetError(outcome.failure)
    cells = {mode: cell.dump() for mode, cell in outcome.cells.items()}
    row: dict[str, Any] = {"workload": arguments.target, "cells": cells}
    if arguments.json:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        row = {"device": name, "baseline": baseline, "versions": versions()} | row
    shown = json.dumps(row, indent=1, allow_nan=False) if arguments.json else cells_table([row], baseline)
    _write(shown, arguments.out)
    return int(any(cell.status != "ok" for mode, cell in outcome.cells.items() if mode in AUTOSTREAM))


def _contest(target: str, inputs: list[InputSpec], device: torch.device) -> Inference:
    contest = Inference(subject_of(*prepare(target, inputs, device)))
    contest.require_checkable()
    return contest


def _say(mode: str) -> None:
    """What is under way, on a line that the next one replaces; for a terminal only."""
    if sys.stderr.isatty():
        print(f"\r\033[K{mode}", end="", file=sys.stderr, flush=True)


def _demo(arguments: argparse.Namespace) -> int:
    device = parse_device(arguments.device)
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    model, args = prepare("googlenet", [], device, dtype)
    with torch.no_grad():
        fast = optimize(model)
        expected, got = model(*args), fast(*args)
        calls = {"plain": partial(model, *args), "optimized": partial(fast, *args)}
        times = interleaved(calls, clock_of(device), lambda name: None)
    plain_us, fast_us = (median(times[name].call_us) for name in calls)
    error = ((got - expected).abs().max() / expected.abs().max()).item()
    _write(text.summary(fast.reports[0]))
    _write(f"\nlargest difference from the plain model: {error:.1e} of the largest output, {_TOLERANCE[dtype]} allowed")
    speed = f"{plain_us / fast_us:.2f}× the speed"
    _write(f"plain model {plain_us / 1e3:.3f} ms, optimized {fast_us / 1e3:.3f} ms, in turns: {speed}")
    if not error <= _TOLERANCE[dtype]:  # NaN is not within any tolerance either
        print("autostream: the outputs differ", file=sys.stderr)
        return 1
    return 0


def _write(text: str, out: Path | None = None) -> None:
    if out is None:
        # Source lines and names are the model's to choose; what the terminal cannot show must not end the command.
        encoding = sys.stdout.encoding or "utf-8"
        print(text.encode(encoding, "replace").decode(encoding))
        return
    try:
        out.write_text(f"{text}\n", encoding="utf-8")
    except OSError as error:
        raise _unwritable(out, error) from error


def _require_writable(out: Path) -> None:
    """Rather fail before hours of work than with the results in hand."""
    try:
        out.open("a").close()
    except OSError as error:
        raise _unwritable(out, error) from error


def _unwritable(out: Path, error: OSError) -> TargetError:
    return TargetError(f"--out {out}: {error.strerror}: name a file that can be written")
