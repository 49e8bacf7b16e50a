"""Commands that show the plan of one model: ``schedule``, ``inspect``, ``explain``, ``trace`` and ``report``."""

from __future__ import annotations

import argparse
import io
import logging
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from autostream import pipeline
from autostream.cli import pipelines, zoo
from autostream.cli.arguments import how_many, names, whole
from autostream.cli.command import Argument, Command, argument
from autostream.cli.pipelines import PIPELINE, WORLD
from autostream.cli.shared import DISABLED, JSON, PLANNING, TARGET
from autostream.cli.targets import Step, parse_device, parse_input, prepare
from autostream.cli.terminal import message, progress, require_writable, show
from autostream.costs.cache import read
from autostream.costs.device import known_names, profile_named
from autostream.costs.measured import METHOD
from autostream.costs.records import check_context
from autostream.dispatch.dispatcher import Dispatcher
from autostream.errors import TargetError, TraceError
from autostream.frontend.fake_processes import fake_processes
from autostream.frontend.trial import check_call
from autostream.ir import DeviceProfile, Program
from autostream.options import Options
from autostream.pipeline import lowered, program_of
from autostream.reporting import dot, scaling, stages, text, timeline
from autostream.reporting import pipelines as pipeline_text
from autostream.reporting.ops import COLUMNS, USUAL, Selection
from autostream.reporting.page import assemble
from autostream.reporting.page import pipelines as pipeline_page
from autostream.reporting.report import Report
from autostream.scaling import scaled
from autostream.scheduling.microbatches import Comparison

_OPTIONS = ("policy", "streams", "costs", "kernels", "tuning_seconds", "memory_budget", "seed")
"""The options of :func:`autostream.optimize` that these commands take."""


class Plan(NamedTuple):
    """The report of a model or a step, and what makes its program."""

    report: Report
    program: Callable[[], Program]


Format = Callable[[Plan, Selection], str]
"""An output format of a plan and the ops to show."""


def _run(arguments: argparse.Namespace, formats: dict[str, Format], *, runs: bool = False) -> int:
    require_writable(arguments.out)
    selection = _selection(arguments)
    plan = _planned(arguments, runs)
    with progress(f"drawing {arguments.target}"), _quiet_torch():
        shown = formats[arguments.form](plan, selection)
    show(shown, arguments.out, report=arguments.form == "text")
    return 0


def _run_schedule(arguments: argparse.Namespace) -> int:
    pipelines.check(arguments)
    if arguments.stages is not None:
        return _run_pipeline(arguments, {"text": pipeline_text.render, "json": pipeline_text.to_json}[arguments.form])
    if arguments.world is not None:
        return _run_processes(arguments)
    return _run(arguments, _ANSWERS)


def _run_report(arguments: argparse.Namespace) -> int:
    pipelines.check(arguments)
    if arguments.stages is not None:
        return _run_pipeline(arguments, pipeline_page.render)
    return _run_watched(arguments, assemble.render)


def _run_pipeline(arguments: argparse.Namespace, render: Callable[[Comparison], str]) -> int:
    require_writable(arguments.out)
    with _planning(arguments) as (model, args, profile):
        if not isinstance(model, nn.Module):
            raise TargetError(f"{arguments.target} is a training step: a pipeline is planned of its model")
        shown = render(pipelines.compared(arguments, model, args, profile))
    show(shown, arguments.out, report=render is pipeline_text.render)
    return 0


def _run_processes(arguments: argparse.Namespace) -> int:
    require_writable(arguments.out)
    options = _options(arguments)
    with fake_processes(arguments.world) as group, _planning(arguments) as (step, batch, profile):
        if isinstance(step, nn.Module):
            raise TargetError(f"{arguments.target} is a model: --world plans a training step, (step, batch)")
        links = None if arguments.interconnect is None else (arguments.interconnect,)
        found = scaled(step, batch, options, profile, group, links)
        shown = scaling.to_json(found) if arguments.form == "json" else scaling.render(found)
    show(shown, arguments.out, report=arguments.form == "text")
    return 0


@contextmanager
def _planning(
    arguments: argparse.Namespace,
) -> Iterator[tuple[nn.Module | Step, tuple[Any, ...], DeviceProfile | None]]:
    """The target with its arguments, and the device to plan for if it is not here; quiet inside."""
    device, profile = _planned_for(arguments.device)
    inputs = [parse_input(text) for text in arguments.input]
    with progress(f"planning {arguments.target}"), redirect_stdout(sys.stderr), _quiet_torch():
        model, args = prepare(arguments.target, inputs, device, zoo_model=zoo.uncalibrated)
        yield model, args, profile


def _run_watched(arguments: argparse.Namespace, render: Callable[[Report], str]) -> int:
    require_writable(arguments.out)
    report = _planned(arguments, runs=True).report
    show(render(report), arguments.out)
    if report.measured is None:
        refusals = (refusal.reason for refusal in report.refusals if refusal.choice == "not watched")
        reason = next(refusals, "the device is not a GPU that is here")
        message(f"all times are predicted, for no run was watched: {reason}")
    return 0


def _options(arguments: argparse.Namespace) -> Options:
    return Options.parse({name: getattr(arguments, name) for name in _OPTIONS})


def _selection(arguments: argparse.Namespace) -> Selection:
    """The selection of ops from the arguments that the command has."""
    chosen = {name: value for name, value in vars(arguments).items() if name in Selection.__dataclass_fields__}
    return Selection(**chosen)


def _planned(arguments: argparse.Namespace, runs: bool) -> Plan:
    """The model and its plan; with ``runs``, on a GPU of this machine, it is optimized and measured."""
    options = _options(arguments)
    device, profile = _planned_for(arguments.device)
    inputs = [parse_input(text) for text in arguments.input]
    here = runs and device.type == "cuda"
    zoo_model = zoo.build if here else zoo.uncalibrated  # calibration takes a run
    with progress(f"planning {arguments.target}"), redirect_stdout(sys.stderr):  # the user's code may print as well
        model, args = prepare(arguments.target, inputs, device, zoo_model=zoo_model)
        with torch.no_grad(), _quiet_torch():
            if not isinstance(model, nn.Module):
                return _of_step(model, args, options, profile, runs=here)
            report = _optimized(model, args, options) if here else _dry(model, args, options, profile)
    return Plan(report, partial(program_of, model, args, {}, report))


def _of_step(step: Step, args: tuple[Any, ...], options: Options, profile: DeviceProfile | None, *, runs: bool) -> Plan:
    """The plan of a training step; with ``runs``, of its third call: the first one makes the state of optimizers."""
    program, report = step.traced(args, options, profile).plan(options, profile)
    if runs:
        for _ in range(3):
            step(*args)
        report = step.reports[0]
    return Plan(report, lambda: program)


def _planned_for(text: str | None) -> tuple[torch.device, DeviceProfile | None]:
    """The device of the model, and the profile to plan for if it is another device's.

    Raises:
        CostError: the file of measurements cannot be used.
        TargetError: there is no such device, here or among the known profiles.
    """
    if text is None or re.fullmatch(r"cpu|cuda(:\d+)?", text, re.ASCII):
        return parse_device(text), None
    if not text.endswith(".json"):
        return torch.device("cpu"), profile_named(text)
    measurements = read(Path(text))
    # Versions may differ from those where it was measured, except that of the method.
    context = measurements.context
    check_context(context, replace(context, versions={**context.versions, "method": str(METHOD)}), text)
    if measurements.profile is None:
        raise TargetError(f"--device {text}: no device was measured in it: use one of {', '.join(known_names())}")
    return torch.device("cpu"), measurements.profile


def _dry(model: nn.Module, args: tuple[Any, ...], options: Options, profile: DeviceProfile | None) -> Report:
    try:
        return pipeline.plan(model, args, {}, options, profile)
    except TraceError as error:
        check_call(model, args, {})  # raises the model's own error for inputs that it does not take
        raise TraceError(
            f"{error}; autostream.optimize splits such a model at graph breaks, or runs it as it is, and "
            "autostream.explain and Report.to_html() show its graphs after a call"
        ) from error


def _optimized(model: nn.Module, args: tuple[Any, ...], options: Options) -> Report:
    report = Dispatcher(model, replace(options, strict=True)).watched(*args)
    if report is None:
        raise TargetError(DISABLED)
    return report


@contextmanager
def _quiet_torch() -> Iterator[None]:
    """Silence the logs that torch writes where it cannot trace a model; the exception says the same."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)


def _json(plan: Plan, selection: Selection) -> str:
    return plan.report.to_json()


def _answers(plan: Plan, selection: Selection) -> str:
    return text.answers(plan.report, selection)


def _tables(plan: Plan, selection: Selection) -> str:
    return text.render(plan.report, selection)


def _code(plan: Plan, selection: Selection) -> str:
    return lowered(plan.program(), plan.report).code


def _stages(plan: Plan, selection: Selection) -> str:
    program = plan.program()
    return stages.render(plan.report, traced=program.module.code, lowered=lowered(program, plan.report).code)


def _dot(plan: Plan, selection: Selection) -> str:
    report = plan.report
    if report.graph is None or report.chosen is None or report.profile is None:
        raise _nothing("graph to draw", report)
    return dot.render(report.graph, report.chosen.schedule, report.costs, report.profile)


def _svg(plan: Plan, selection: Selection) -> str:
    return dot.svg(_dot(plan, selection))


def _trace(report: Report) -> str:
    if report.timeline is None:
        raise _nothing("timeline to show", report)
    return timeline.render(report)


def _nothing(what: str, report: Report) -> TargetError:
    reasons = "; ".join(refusal.reason for refusal in report.refusals)
    return TargetError(f"{report.model} has no {what}: {reasons}")


def _form(name: str, does: str) -> Argument:
    return argument(f"--{name}", dest="form", action="store_const", const=name, default="text", help=does)


def _choosing(ops: int | None, default: str) -> tuple[Argument, ...]:
    """Arguments that select ops."""
    return (
        argument(
            "--ops", type=how_many, default=ops, metavar="N", help=f"only the N costliest, or all (default: {default})"
        ),
        argument("--stream", type=whole, metavar="N", help="only ops on stream N"),
        argument("--critical", action="store_true", help="only ops on the critical path"),
    )


_ANSWERS: dict[str, Format] = {"text": _answers, "json": _json}
_TABLES: dict[str, Format] = {
    "text": _tables,
    "json": _json,
    "dot": _dot,
    "svg": _svg,
    "code": _code,
    "before-after": _stages,
}

SCHEDULE = Command(
    "schedule",
    "predict what scheduling would gain, on a GPU that need not be here, and why not more",
    f"""Predict what scheduling would gain, on this device or another, without running the model:
how much faster, how sure that is, at most how much, why not more, what would run beside what, and what to try.
With --stages, the model is cut into stages of a pipeline over so many devices: when each of them would run by
each of PyTorch's schedules, how long they would wait, what they would hold, and which is best.

{TARGET}""",
    "schedule googlenet --input 1x3x224x224:float16 --device h100",
    [*PLANNING, *PIPELINE, WORLD, *_choosing(10, "10"), JSON],
    _run_schedule,
)

INSPECT = Command(
    "inspect",
    "show a model's plan op by op, as tables, JSON or a drawing",
    f"""Show a model's plan op by op, without running the model: all that schedule says, all candidates,
and for each op its cost, stream, waits, slack and source line. Of many ops, those that are alike share a row.

{TARGET}""",
    "inspect googlenet --input 1x3x224x224:float16 --device h200 --ops 20",
    [
        *PLANNING,
        *_choosing(None, "all, of many alike ones in one row"),
        argument(
            "--sort",
            default="launch",
            metavar="COLUMN",
            help="sort by it; costs and shares fall, names and times rise (default: launch)",
        ),
        argument("--columns", type=names, default=USUAL, metavar="A,B", help=f"of {', '.join(COLUMNS)}"),
        (
            _form("json", "everything, as JSON"),
            _form("dot", "the scheduled graph, for Graphviz"),
            _form("svg", "the same, drawn by Graphviz, which must be installed"),
            _form("code", "the graph that runs, as Python: its streams, records and waits"),
            _form("before-after", "the graph before and after each stage, from the traced one to the one that runs"),
        ),
    ],
    partial(_run, formats=_TABLES),
)

EXPLAIN = Command(
    "explain",
    "say what scheduling gains, on a GPU that is here as measured, and why not more",
    f"""Say what schedule says, and on a GPU that is here from times that were measured: the model is optimized and run.

{TARGET}""",
    "explain googlenet --input 1x3x224x224:float16",
    [*PLANNING, *_choosing(10, "10"), JSON],
    partial(_run, formats=_ANSWERS, runs=True),
)

TRACE = Command(
    "trace",
    "write when each op runs, on a GPU that need not be here, for Perfetto or chrome://tracing",
    f"""Write when each op runs as a trace file, for ui.perfetto.dev or chrome://tracing: a lane for each
stream, arrows for waits, the critical path, and counters for the memory in use and what is asked of the device.
On a GPU that is here, the model is optimized, and a run that a profiler watched stands beside the predicted one.

{TARGET}""",
    "trace googlenet --input 1x3x224x224:float16 --device h200 --out trace.json",
    PLANNING,
    partial(_run_watched, render=_trace),
)

REPORT = Command(
    "report",
    "write a page about a model's plan, to be opened in a browser",
    f"""Write all that is known of a model's plan as one HTML page, which needs no network: summary, timeline,
memory over time, graph, ops, candidates and environment, to be looked through with mouse, keys or fingers.
With --stages, the page is about a pipeline: its stages, and the timeline of all devices by each schedule.

{TARGET}""",
    "report googlenet --input 1x3x224x224:float16 --device h200 --out report.html",
    [*PLANNING, *PIPELINE],
    _run_report,
)
