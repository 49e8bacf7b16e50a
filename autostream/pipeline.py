"""The stages of the pipeline in order; read this first.

    trace ─▶ analyze ─▶ price ─▶ assign ─▶ synchronize ─▶ simulate ─▶ release ─▶ verify
                                                         then, in select.py: lower ─▶ capture ─▶ measure

Nothing here runs on a device, except to measure costs.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from autostream.costs.device import profile_of
from autostream.costs.interconnects import Interconnect
from autostream.errors import FusionError, OptionError, TargetError, TraceError
from autostream.frontend.inputs import described
from autostream.frontend.modules import name_of
from autostream.frontend.trace import trace
from autostream.frontend.tree import flatten
from autostream.fusion.cache import fused_here
from autostream.fusion.inductor import obstacle
from autostream.ir import Candidate, Decision, DeviceProfile, Program
from autostream.options import Options
from autostream.reporting.report import Report
from autostream.runtime.lower import lower
from autostream.scheduling.cut import cut
from autostream.scheduling.simulate import simulate
from autostream.tuning.budget import budget_of
from autostream.tuning.candidates import best_of, candidates_for
from autostream.tuning.pricing import Priced, price_program
from autostream.utils.stopwatch import Stopwatch
from autostream.version import VERSION


def plan(
    model: nn.Module,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    options: Options,
    profile: DeviceProfile | None = None,
) -> Report:
    """A dry run: plan schedules for this model without running it.

    Args:
        model: the module.
        args: positional example inputs.
        kwargs: keyword example inputs.
        options: as for :func:`autostream.optimize`; costs are estimated unless ``costs="measured"``.
        profile: a device to plan for, which need not be available; the model is on the CPU then.

    Raises:
        OptionError: a profile is given, and costs are to be measured or kernels to be fused, which needs the device; or
            kernels cannot be fused here.
        TraceError: Dynamo cannot capture the model as one graph.
    """
    check_plannable(options, profile)
    device = None if profile is None else device_of(profile)
    stopwatch = Stopwatch()
    with stopwatch("trace"):
        traced = trace(model, args, kwargs, device=device)
        check_one_device(traced.program)
    arguments, label = traced.arguments(model, args, kwargs), _label(model, args, kwargs, device)
    return plan_program(traced.program, arguments, name_of(model), label, options, profile, stopwatch)


def plan_program(
    program: Program,
    arguments: Sequence[Tensor],
    name: str,
    label: str,
    options: Options,
    profile: DeviceProfile | None,
    stopwatch: Stopwatch,
    link: Interconnect | None = None,
) -> Report:
    """A dry run of a traced program, as :func:`plan`.

    Args:
        program: the program, of the profile's device if there is one.
        arguments: its arguments.
        name: of the model or the step.
        label: describes the calls.
        options: as for :func:`plan`.
        profile: as for :func:`plan`.
        stopwatch: has the time of the trace.
        link: what processes communicate over; by default, what the device has.
    """
    program, unfused = _fused(program, options, arguments, stopwatch)
    measured_with = arguments if options.costs == "measured" else None
    priced = price_program(program, options, stopwatch, profile, measured_with, link=link)
    capture = options.cuda_graph is not False and priced.graph.device != "cpu" and not priced.refusals
    candidates = candidates_for(priced, options, capture, stopwatch)
    exempted = budget_of(priced.graph, priced.profile, candidates[0], options.memory_budget).exemption
    best = best_of(candidates)
    refusals = (*unfused, *priced.refusals, *_in_sections(priced, options))
    return replace(
        planned(name, label, "dry run", program.level, priced, candidates, best),
        refusals=(*refusals, *priced.notes, *exempted),
        seconds=dict(stopwatch.seconds),
    )


def planned(
    model: str,
    signature: str,
    mode: str,
    level: str,
    priced: Priced,
    candidates: Sequence[Candidate],
    chosen: Candidate,
) -> Report:
    """The report of a planned program, without refusals and times of stages.

    Args:
        model: its name.
        signature: describes the calls.
        mode: what a call runs.
        level: of the program's kernels.
        priced: the ops with their costs.
        candidates: all schedules that were considered.
        chosen: one of them.
    """
    return Report(
        model=model,
        signature=signature,
        mode=mode,
        level=level,
        profile=priced.profile,
        graph=priced.graph,
        costs=priced.costs,
        chosen=chosen,
        timeline=simulate(chosen.schedule, priced.costs, priced.profile, captured=chosen.captured),
        candidates=tuple(candidates),
        versions=versions(),
    )


def _in_sections(priced: Priced, options: Options) -> tuple[Decision, ...]:
    """A note that a call would be captured in sections, while the plan is for the whole program without a capture."""
    captured = [part for part in cut(priced.graph) if part.captured] if priced.refusals else []
    if options.cuda_graph is False or not captured:
        return ()
    ops, graphs = sum(len(part.ops) for part in captured), len(captured)
    share = f"{ops} of {len(priced.graph.ops)} ops, in {graphs} CUDA graph{'s' * (graphs > 1)}"
    reason = f"a call captures {share}, and runs the others as they are; what is planned here is the whole, uncaptured"
    return (Decision("", "in sections", reason),)


def _fused(
    program: Program, options: Options, arguments: Sequence[Tensor], stopwatch: Stopwatch
) -> tuple[Program, tuple[Decision, ...]]:
    """The program with fused kernels, if asked for, without running them; and the reasons why not."""
    if options.kernels == "eager" or (options.kernels == "auto" and program.device == "cpu"):
        return program, ()
    if options.kernels == "auto":
        reason = 'a dry run plans ATen ops; where the GPU is, kernels="inductor" plans fused ones'
        return program, (Decision("", "not fused", reason),)
    if reason := obstacle(program.device):
        raise OptionError(f'kernels="inductor" is not to be had: {reason}')
    try:
        return fused_here(program, options.inductor_options, arguments, stopwatch)
    except FusionError as error:
        return program, (Decision("", "not fused", str(error)),)


def check_plannable(options: Options, profile: DeviceProfile | None) -> None:
    """Check that options ask for nothing of a device that need not be here.

    Raises:
        OptionError: a profile is given, and costs are to be measured or kernels to be fused.
    """
    if options.costs == "measured" and profile is not None:
        raise OptionError('costs="measured" needs the device itself: leave out the profile, or use costs="roofline"')
    if options.kernels == "inductor" and profile is not None:
        raise OptionError('kernels="inductor" needs the device itself: leave out the profile, or use kernels="eager"')


def device_of(profile: DeviceProfile) -> str:
    """The name of the device that a profile describes."""
    return "cpu" if profile == profile_of("cpu") else "cuda:0"


def _label(model: nn.Module, args: Sequence[object], kwargs: Mapping[str, object], device: str | None) -> str:
    """Describes the calls, e.g. ``1x3x224x224:float16 on cuda:0, eval, no gradients``."""
    mode = "train" if model.training else "eval"
    try:
        tensors, _ = flatten((tuple(args), dict(kwargs)))
    except TraceError:  # Dynamo may know how to flatten them
        return f"some arguments, {mode}, no gradients"
    return f"{described(tensors, device)}, {mode}, no gradients"


def check_one_device(program: Program) -> None:
    """Check that a program that cannot be cut runs on one device.

    Raises:
        TraceError: it runs on several.
    """
    if program.peers:
        raise TraceError(f"the model uses several devices ({', '.join(program.devices)}); one is scheduled at a time")


def program_of(model: nn.Module, args: Sequence[object], kwargs: Mapping[str, object], report: Report) -> Program:
    """The program that a dry run planned, for reading.

    Args:
        model: the module.
        args: positional example inputs.
        kwargs: keyword example inputs.
        report: of :func:`plan` with these arguments.

    Raises:
        TargetError: the report has no schedule of ATen ops.
    """
    if report.graph is None or report.chosen is None or report.level != "aten":
        raise TargetError(f'{report.model} has no schedule of ATen\'s ops to show: plan it with kernels="eager"')
    return trace(model, args, kwargs, device=report.graph.device).program


def lowered(program: Program, report: Report) -> GraphModule:
    """The graph that a dry run's schedule is lowered to: its ``code`` has the ops, streams and waits.

    Args:
        program: that was planned.
        report: of :func:`plan`.
    """
    assert report.graph is not None
    assert report.chosen is not None
    return lower(program, report.graph, report.chosen.schedule)


def versions() -> dict[str, str]:
    """The versions that a result depends on."""
    return {
        "autostream": VERSION,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda or "none",
    }
