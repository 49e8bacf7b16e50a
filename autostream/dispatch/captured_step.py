"""A training step as one scheduled graph, and dry runs of it.

    call ──capture (Dynamo)──▶ graph + guards ──trace──▶ Program ──▶ ScheduledProgram ──▶ Dynamo's bytecode: result

A step that runs has the inputs of that graph, and returns what the bytecode makes of its outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from autostream.costs.interconnects import Interconnect
from autostream.dispatch.scheduled_program import Label, ModelContext, ScheduledProgram
from autostream.dispatch.step_calls import Call, Refusal, WrittenStep, call_of, kind_of
from autostream.errors import AutostreamError, TargetError, TraceError, first_line
from autostream.frontend.aten import drop_weak_references, mode_of
from autostream.frontend.batches import detached
from autostream.frontend.capture import Capture
from autostream.frontend.data_parallel import replicas
from autostream.frontend.eager_only import unusual_model
from autostream.frontend.guards import FailedGuard
from autostream.frontend.inputs import aliases_of, described
from autostream.frontend.optimizers import FirstUpdateError
from autostream.frontend.reduction_buckets import gathered, in_buckets
from autostream.frontend.step_capture import capture_step
from autostream.frontend.steps import Traced, trace_step
from autostream.frontend.tensor_parallel import groups_of, local_of
from autostream.ir import DeviceProfile, Program, Role
from autostream.options import Options
from autostream.pipeline import check_one_device, check_plannable, device_of, plan_program
from autostream.reporting.report import Report
from autostream.tuning.agreement import everywhere
from autostream.tuning.best_buckets import best_buckets, in_best_buckets
from autostream.utils.stopwatch import Stopwatch


class CapturedStep:
    """A training step as one scheduled graph.

    Args:
        step: as it is written.
        call: the call to compile it for.
        context: of the step.

    Attributes:
        captured: the captured step, without its tensors.
        traced: the traced step.
        scheduled: runs the step's program.

    Raises:
        FirstUpdateError: an optimizer makes its state in this call.
        GroupError: a process of a group of its DTensors has not come as far in time.
        TraceError: no graph computes the step.
    """

    def __init__(self, step: WrittenStep, call: Call, context: ModelContext) -> None:
        stopwatch = Stopwatch()
        with stopwatch("trace"):
            captured, self.traced = _traced_everywhere(step, call)
        inputs, self._body = captured.tensors, step.body
        program, notes = in_best_buckets(self.traced.program, context.options, stopwatch)
        stays = [placeholder.role is not Role.INPUT for placeholder in program.placeholders]
        arguments, label = self.traced.arguments(inputs, call.updates), Label(step.name, described(call.tensors))
        self.scheduled = ScheduledProgram(program, arguments, stays, label, context, stopwatch, notes)
        self._alike = _layouts_of(inputs)
        self.captured = replace(captured, tensors=(), changed=())
        self._outputs = outputs = list[Any]()
        self._restored = captured.restored(lambda *_: outputs)  # without a reference cycle, which would keep memory

    def inputs(self, call: Call) -> Sequence[Tensor] | None:
        """The inputs of the captured graph in a call, or ``None`` if the graph does not compute it."""
        args, kwargs = call.args, call.kwargs
        with torch.enable_grad():
            if not self.captured.guards(self._body, args, kwargs):
                return None
            inputs = self.captured.graph_inputs(self._body, args, kwargs)
        return inputs if _layouts_of(inputs) == self._alike else None

    def failed(self, call: Call) -> FailedGuard | None:
        """The guard that fails for a call, if one does."""
        with torch.enable_grad():
            return self.captured.guards.failed(self._body, call.args, call.kwargs)

    def run(self, call: Call, inputs: Sequence[Tensor]) -> Any:
        """Run a step with these inputs of the captured graph; returns its result.

        Raises:
            NoSchedule: no CUDA graph reads tensors at these addresses, and none can be captured.
        """
        outputs = self.scheduled(self.traced.arguments(inputs, call.updates))
        return detached(self.restored(outputs, call.args, call.kwargs))

    def restored(self, outputs: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the step returns, by Dynamo's bytecode, which also applies side effects on Python objects.

        It may have tensors that are no outputs of the graph, such as weights.
        """
        self._outputs[:] = outputs
        for at, whole in self.traced.wholes.items():
            self._outputs[at] = whole(outputs[at])
        try:
            with torch.enable_grad():
                return self._restored(self._body, args, kwargs)
        finally:
            self._outputs.clear()


def trace(step: WrittenStep, call: Call, device: str | None = None) -> tuple[Capture, Traced]:
    """Capture and trace a step, for the device of its tensors by default.

    Raises:
        TraceError: no graph computes it.
    """
    modules = step.modules()
    if reason := _uncapturable(modules):
        raise TraceError(reason)
    step.body.parameters, step.body.owner = call.parameters, modules
    captured = capture_step(step.body, step.updated, call.args, call.kwargs)
    try:
        return captured, trace_step(captured, call.updates, modules, call.every, step.averaging, device=device)
    finally:
        drop_weak_references(mode_of(captured.module))


def _traced_everywhere(step: WrittenStep, call: Call) -> tuple[Capture, Traced]:
    """The same in all processes that hold a part of a parameter: one that has no graph would communicate by itself."""

    def traced() -> tuple[Capture, Traced] | FirstUpdateError:
        try:
            return trace(step, call)
        except FirstUpdateError as error:  # it is no fault
            return error

    groups = groups_of(chain(step.modules().parameters(), call.every))
    found = everywhere(groups, "the capture of a step", traced, TraceError)
    if isinstance(found, FirstUpdateError):
        raise found
    return found


def _uncapturable(modules: nn.Module) -> str:
    if replicas(modules):
        return (
            "DistributedDataParallel averages gradients by hooks, which a graph would not call: give its .module, and "
            "data_parallel=process_group"
        )
    return unusual_model(modules)


def _layouts_of(inputs: Sequence[Tensor]) -> Hashable:
    return [*map(kind_of, inputs)], aliases_of([*map(local_of, inputs)]), [tensor.requires_grad for tensor in inputs]


@dataclass(frozen=True)
class TracedStep:
    """A traced training step, to plan.

    Attributes:
        program: of the step, whose all-reduces have no buckets yet.
        arguments: of the program.
        name: of the step, for reports.
        label: describes its calls.
        stopwatch: has the time of the trace.
    """

    program: Program
    arguments: Sequence[Tensor]
    name: str
    label: str
    stopwatch: Stopwatch

    def plan(
        self, options: Options, profile: DeviceProfile | None, link: Interconnect | None = None
    ) -> tuple[Program, Report]:
        """A dry run: the program, with all-reduces in buckets, and its schedules.

        Args:
            options: how to schedule it.
            profile: the device that the step was traced for.
            link: what processes communicate over; by default, what the device has.
        """
        usual = in_buckets(self.program)
        filled, notes = best_buckets(self.program, usual, options, profile, link)
        program = in_buckets(self.program, filled) if filled else usual
        report = plan_program(program, self.arguments, self.name, self.label, options, profile, self.stopwatch, link)
        return program, replace(report, refusals=(*notes, *report.refusals))


def traced_step(
    step: WrittenStep,
    eager: Callable[..., Any],
    args: tuple[Any, ...],
    options: Options,
    profile: DeviceProfile | None,
) -> TracedStep:
    """Trace a step to plan it, after one run of it.

    Args:
        step: as it is written.
        eager: runs it, which makes the state of its optimizers.
        args: its arguments.
        options: how to schedule it.
        profile: a device to plan for, which need not be available; the step is on the CPU then.

    Raises:
        OptionError: see :func:`autostream.pipeline.plan`.
        TargetError: the step itself fails.
        TraceError: no graph computes the step.
    """
    check_plannable(options, profile)
    try:
        eager(*args)
    except AutostreamError:
        raise
    except Exception as error:
        failed = f"{step.name} itself fails at this batch ({first_line(error)})"
        raise TargetError(f"{failed}: a plan takes one run, so give a step and a batch that run here") from error
    device = None if profile is None else device_of(profile)
    stopwatch = Stopwatch()
    with stopwatch("trace"):
        call = call_of(step, args, {})
        if isinstance(call, Refusal):
            raise TraceError(f"{step.name} is no one graph: {call.reason}")
        captured, traced = trace(step, call, device)
        check_one_device(traced.program)
    arguments, label = traced.arguments(captured.tensors, call.updates), described(call.tensors, device)
    return TracedStep(gathered(traced.program), arguments, step.name, label, stopwatch)
