"""Splits a model into stages of a pipeline by the cost model, for ``torch.distributed.pipelining`` to run.

    model ──trace──▶ Program ──analyze──▶ OpGraph ──price──▶ segments between cut points ──partition──▶ Split

Nothing runs, and no GPU and no process group is needed.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import inf
from operator import sub
from typing import Any

from torch import Tensor, nn

from autostream.analysis.dependencies import analyze
from autostream.analysis.segments import Crossing, crossings, cut_points, ops_of, resized, segments_of, trained_bytes
from autostream.costs.device import profile_named
from autostream.costs.interconnects import Interconnect, interconnect_of
from autostream.costs.roofline import price
from autostream.costs.this_device import costs_here, profile_here
from autostream.costs.training_time import training_us
from autostream.errors import AutostreamError, OptionError, TargetError, TraceError, a_type, first_line
from autostream.frontend.modules import name_of
from autostream.frontend.pipelining import one_stage, orders, split_spec
from autostream.frontend.submodules import calls_of, saved_for_backward, trained_of
from autostream.frontend.trace import trace
from autostream.frontend.trial import check_call
from autostream.ir import Costs, DeviceProfile, OpGraph
from autostream.options import Options
from autostream.pipeline import check_one_device, device_of
from autostream.reporting.pipelines import split_table
from autostream.reporting.tables import size
from autostream.scheduling.microbatches import (
    Comparison,
    Orders,
    Pipeline,
    Run,
    bubble_share,
    gpipe,
    memory_bytes,
    one_forward_one_backward,
    simulated,
)
from autostream.scheduling.partition import BACKWARD, Segment, Stage, partition, stages_from
from autostream.utils.logs import Log

log = Log(__name__)

_HALVED = ("InterleavedZeroBubble", "ZBVZeroBubble")
"""Schedules of PyTorch's that cut backwards in halves."""

_TWO_EACH = ("Interleaved1F1B", *_HALVED)
"""Those in which each device has two stages."""

MICROBATCHES = 4
"""A step has so many microbatches for each stage if nothing else is said: the bubble is negligible from there on (Huang
et al. 2019, GPipe)."""


@dataclass(frozen=True)
class Split(Pipeline):
    """A model cut into stages of a pipeline; ``print`` shows it as a table."""

    @property
    def split_spec(self) -> dict[str, Any]:
        """What ``torch.distributed.pipelining.pipeline`` takes: each stage but the first begins with a submodule."""
        return split_spec([stage.begins for stage in self.stages[1:]])

    def __str__(self) -> str:
        return split_table(self)


def split(
    model: nn.Module,
    example_args: Sequence[object],
    stages: int,
    *,
    device: str | DeviceProfile | None = None,
    interconnect: str = "nvlink",
    microbatches: int | None = None,
    costs: str = "roofline",
) -> Split:
    """Cut a model into balanced stages for ``torch.distributed.pipelining``. No GPU is needed.

    The slowest part of the pipeline becomes as fast as can be: forward and backward of a stage, or a transfer between
    two. Of cuts that take at most 3 % more, those whose stages take within 10 % of each other come first, then those
    with the fewest bytes across. A backward counts as two forwards.

    Args:
        model: any module that is one graph; it does not change.
        example_args: arguments of one microbatch, as ``pipeline()`` takes them.
        stages: how many.
        device: of each stage: ``"h200"`` or another GPU that need not be here, ``"cpu"``, or a measured profile; by
            default, that of the model.
        interconnect: ``"nvlink"`` for devices of one machine (PCIe, where they have no NVLink), or ``"infiniband"``.
        microbatches: of a step; by default four for each stage. With fewer than stages, times are those of GPipe.
        costs: ``"roofline"`` estimates the time of each op from its size and runs nothing; ``"measured"`` times each
            on the model's device, then forward and backward of the model as one stage, to which they are scaled.

    Raises:
        OptionError: an option has a value that is not allowed, such as more stages than there are cut points.
        TargetError: the stages do not fit into the devices' memory, or cannot be balanced; the model is no module, or
            fails at these arguments.
        TraceError: the model is no one graph.

    Example:
        >>> import torch
        >>> model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
        >>> found = split(model, [torch.ones(64, 256)], 2, device="h200")
        >>> found.split_spec
        {'2': <SplitPoint.BEGINNING: 1>}
    """
    chain = chain_of(model, example_args, device, costs)
    link = interconnect_of(chain.profile, interconnect)
    return split_chain(chain, stages, MICROBATCHES * stages if microbatches is None else microbatches, link)


@dataclass(frozen=True)
class Chain:
    """A model as segments between its cut points.

    Attributes:
        model: its name.
        profile: the device of each stage.
        graph: its ops.
        costs: of each.
        cuts: the submodules whose calls may begin a stage, by the number of their first op.
        calls: the numbers of the first op of each submodule's call, and of the first behind it.
        saved: for each segment, the bytes of each activation that it keeps.
        trained: the bytes that training holds for each weight and buffer, by storage.
        names: of the weights that are trained, by storage.
        rows: of the example.
    """

    model: str
    profile: DeviceProfile
    graph: OpGraph
    costs: Costs
    cuts: Mapping[int, str]
    calls: Mapping[str, tuple[int, int]]
    saved: Sequence[Mapping[str, int]]
    trained: Mapping[str, int]
    names: Mapping[str, str]
    rows: int

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments, for a microbatch like the example."""
        return segments_of(self.graph, self.costs, self.profile, self.cuts, self.saved, self.trained)

    def resized(self, factor: float) -> Chain:
        """The same for microbatches of another size; costs are estimated."""
        graph = resized(self.graph, factor)
        saved = [{name: round(size * factor) for name, size in kept.items()} for kept in self.saved]
        return replace(self, graph=graph, costs=price(graph, self.profile), saved=saved)

    def submodules(self, stage: Stage) -> tuple[str, ...]:
        """The submodules all of whose ops lie in a stage, without those inside of another."""
        bounds = [0, *self.cuts, len(self.graph.ops)]
        begin, end = bounds[stage.segments[0]], bounds[stage.segments[1]]
        inside = [name for name, (first, last) in self.calls.items() if begin <= first < last <= end]
        return tuple(name for name in inside if not any(name.startswith(f"{outer}.") for outer in inside))

    def crossings(self, stages: Sequence[Stage]) -> list[Crossing]:
        """The values that cross from one of these stages to a later one."""
        bounds = [0, *self.cuts]
        return crossings(self.graph, [bounds[stage.segments[0]] for stage in stages[1:]], self.names.keys())

    def refusal(self, schedule: str, stages: Sequence[Stage]) -> str:
        """Why PyTorch trains no pipeline of these stages by a schedule, or ``""``; seen in 2.13."""
        if schedule == "ZBVZeroBubble" and self.graph.device == "cpu":
            return "it fails over gloo"
        found = self.crossings(stages)
        for each in sorted((each for each in found if each.read > each.made + 1), key=lambda each: not each.trained):
            skips = f"stage {each.read} reads what stage {each.made} computes ({self._place(each.op)})"
            if each.trained:
                return f"{skips}, and there is no backward over stages between"
            if schedule in _TWO_EACH:
                return f"{skips}, and only neighbours communicate"
        kept = [each for each in found if each.kept] if schedule in _HALVED else []
        if kept:
            place, first = self._place(kept[0].op), kept[0].made
            return f"stage {first} gives away what it keeps for gradients of its weights ({place}): cut elsewhere"
        return ""

    def _place(self, name: str) -> str:
        op = self.graph.ops[name]
        return op.source or op.target

    def shared(self, stages: Sequence[Stage]) -> tuple[str, ...]:
        """The trained weights that several stages read."""
        segments = self.segments
        read = [{name for each in segments[slice(*stage.segments)] for name in each.weights} for stage in stages]
        return tuple(self.names[name] for name in self.names if sum(name in names for names in read) > 1)


def chain_of(
    model: nn.Module, args: Sequence[object], device: str | DeviceProfile | None = None, costs: str = "roofline"
) -> Chain:
    """Trace, analyze and price a model, and find its cut points; the arguments are those of :func:`split`."""
    if costs not in ("roofline", "measured"):
        raise OptionError(f'costs={costs!r} is not allowed: use "roofline" or "measured"')
    if not isinstance(model, nn.Module):
        raise TargetError(f"split takes a torch.nn.Module, not {model!r}")
    if not isinstance(args, list | tuple):
        raise TargetError(f"split takes a list of example arguments, not {a_type(args)}: split(model, [x], 2)")
    if device is not None and not isinstance(device, str | DeviceProfile):
        raise OptionError(f'device={device!r} is not allowed: use a name such as "h200", or a measured profile')
    profile = profile_named(device) if isinstance(device, str) else device
    if costs == "measured" and profile is not None:
        raise OptionError('costs="measured" needs the device itself: leave out device, or use costs="roofline"')
    try:
        traced = trace(model, args, device=None if profile is None else device_of(profile))
    except TraceError:
        check_call(model, args, {})
        raise
    program = traced.program
    check_one_device(program)
    graph = analyze(program)
    if profile is None:
        profile, _ = profile_here(program.device)
    if costs == "measured":
        tensors = traced.arguments(model, args)
        priced, _ = costs_here(program, graph, profile, tensors, Options().tuning_seconds)
        priced = _as_trained(priced, profile, model, args)
    else:
        priced = price(graph, profile)
    calls = ops_of(program, graph, calls_of(program.module.graph, model))
    cuts = cut_points(graph, calls)
    captured, trained = traced.captured, trained_of(model)
    places = calls_of(captured.module.graph, model)
    begins = [places[name][0] for name in cuts.values()]
    saved: list[dict[str, int]] = [{} for _ in range(len(cuts) + 1)]
    for each in saved_for_backward(captured):
        saved[bisect(begins, each.node)][each.storage] = each.bytes
    return Chain(
        model=name_of(model),
        profile=profile,
        graph=graph,
        costs=priced,
        cuts=cuts,
        calls=calls,
        saved=saved,
        trained=trained_bytes(program, graph, trained),
        names={each.storage: each.target for each in program.placeholders if each.target in trained},
        rows=next((len(each) for each in args if isinstance(each, Tensor) and each.dim()), 1),
    )


def _as_trained(costs: Costs, profile: DeviceProfile, model: nn.Module, args: Sequence[object]) -> Costs:
    """The costs of ops, scaled so that forward and backward of the model take as long as they do in a stage.

    An op that is timed alone, again and again, has its data in the cache, and nothing of autograd around it.
    """
    alone_us, edges_us = sum(cost.duration_us for cost in costs.values()), len(costs) * profile.same_stream_edge_us
    try:
        factor = max(0.0, training_us(_stage_of(model, args), args) / (1 + BACKWARD) - edges_us) / alone_us
    except Exception as error:
        log.warning("times of a pipeline are those of ops alone: the model cannot be timed (%s)", first_line(error))
        return costs
    return {name: replace(cost, duration_us=factor * cost.duration_us) for name, cost in costs.items()}


def _stage_of(model: nn.Module, args: Sequence[object]) -> nn.Module:
    """The model as one stage; the model itself where PyTorch cannot make one."""
    try:
        return one_stage(model, args)
    except Exception as error:
        log.warning("times of a pipeline are those of the model: PyTorch makes no stage of it (%s)", first_line(error))
        return model


def split_chain(chain: Chain, stages: int, microbatches: int, link: Interconnect) -> Split:
    """Cut a chain; the arguments are those of :func:`split`."""
    for name, value, least in (("stages", stages, 2), ("microbatches", microbatches, 1)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise OptionError(f"{name}={value!r} is not allowed: use a whole number from {least}")
    limit_bytes = chain.profile.memory_bytes or inf
    cut = partition(chain.segments, stages, microbatches, link.transfer_us, limit_bytes)
    schedule = "1F1B" if stages <= microbatches else "GPipe"
    run = _run(schedule, _orders(schedule, stages, microbatches), cut, link)
    return Split(
        model=chain.model,
        device=chain.profile.name,
        microbatches=microbatches,
        stages=cut,
        submodules=tuple(map(chain.submodules, cut)),
        shared=chain.shared(cut),
        step_us=run.step_us,
        memory_bytes=run.memory_bytes,
        outputs_bytes=run.outputs_bytes,
        schedule=schedule,
    )


def compare(chain: Chain, devices: int, microbatches: int, link: Interconnect) -> Comparison:
    """Compare the schedules of ``torch.distributed.pipelining``, and numbers of microbatches of the same rows.

    More microbatches are smaller: the pipeline fills faster, and kernels use less of a device.

    Args:
        chain: the model; its example is one of these microbatches.
        devices: how many.
        microbatches: of a step.
        link: what joins the devices.

    Raises:
        OptionError: an option has a value that is not allowed.
        TargetError: the model cannot be cut into a stage for each device.
    """
    pipeline = split_chain(chain, devices, microbatches, link)
    rows = microbatches * chain.rows
    counts = sorted({microbatches, *(n for n in (devices << k for k in range(6)) if n <= rows and rows % n == 0)})
    cuts: dict[str, Sequence[Stage]] = dict.fromkeys(("GPipe", "1F1B"), pipeline.stages)
    refusals: dict[str, str] = {}
    try:
        cuts |= dict.fromkeys(_TWO_EACH, split_chain(chain, 2 * devices, microbatches, link).stages)
    except AutostreamError as error:
        refusals = dict.fromkeys(_TWO_EACH, str(error))
    refusals = {name: chain.refusal(name, cut) for name, cut in cuts.items()} | refusals
    runs = []
    for number in counts:
        segments = (chain if number == microbatches else chain.resized(microbatches / number)).segments
        for name, refusal in refusals.items():
            if refusal:
                runs.append(Run(name, number, refusal=refusal))
                continue
            stages = [_stage(segments, stage.segments) for stage in cuts[name]]
            try:
                run = _run(name, _orders(name, devices, number), stages, link)
            except AutostreamError as error:
                run = Run(name, number, refusal=str(error))
            runs.append(_fitting(run, chain.profile.memory_bytes))
    if all(run.refusal for run in runs):
        raise TargetError(f"no schedule of PyTorch's trains {chain.model} over {devices} devices: {runs[0].refusal}")
    return Comparison(pipeline, link.name, chain.rows, tuple(runs))


def _orders(schedule: str, devices: int, microbatches: int) -> Orders:
    known = {"GPipe": gpipe, "1F1B": one_forward_one_backward}
    return known[schedule](devices, microbatches) if schedule in known else orders(schedule, devices, microbatches)


def _stage(segments: Sequence[Segment], bounds: tuple[int, int]) -> Stage:
    first, end = bounds
    return next(islice(stages_from(segments, first), end - first - 1, None))


def _run(schedule: str, actions: Orders, stages: Sequence[Stage], link: Interconnect) -> Run:
    timeline = simulated(actions, stages, [link.transfer_us(stage.crossing_bytes) for stage in stages])
    microbatches = 1 + max(action.microbatch for action in actions[0])
    memory = [memory_bytes(order, stages) for order in actions]
    least = [memory_bytes(order, stages, outputs=False) for order in actions]
    return Run(
        schedule,
        microbatches,
        timeline,
        timeline.makespan_us,
        bubble_share(timeline),
        memory_bytes=tuple(memory),
        outputs_bytes=tuple(map(sub, memory, least)),
    )


def _fitting(run: Run, limit_bytes: int) -> Run:
    """The run, refused if a device has not the memory, even if no outputs are returned; with 0, that is not known."""
    needed = max(map(sub, run.memory_bytes, run.outputs_bytes), default=0)
    if not 0 < limit_bytes < needed:
        return run
    return replace(run, refusal=f"a device would hold {size(needed)}, and has {size(limit_bytes)}")
