"""A program made ready for one signature of its tensors: all stages, and what runs.

program ──▶ tune ──▶ pooled ──▶ at places ──▶ ScheduledProgram: flat tensors in, flat tensors out
   └── a CUDA graph cannot hold some ops: cut into sections ──▶ …
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.fx import GraphModule

from autostream.dispatch.optimized_callable import MakeSection
from autostream.dispatch.sections import Sections, sections_of
from autostream.errors import CaptureError, TraceError
from autostream.ir import Candidate, Decision, OpGraph, Program, Role
from autostream.options import Options
from autostream.pipeline import planned
from autostream.reporting.report import Report
from autostream.runtime.addresses import Frozen, Writes
from autostream.runtime.cuda_graph import CapturedGraph, GraphPools, release_unused_memory
from autostream.runtime.graphs_by_address import BoundGraph, GraphsByAddress
from autostream.runtime.input_buffers import BufferTable
from autostream.runtime.lower import lower
from autostream.runtime.measured_timeline import Unmatched, measure_timeline
from autostream.runtime.runs import without_autocast
from autostream.runtime.static_inputs import Output
from autostream.scheduling.peak import given_bytes
from autostream.tuning.budget import exemption
from autostream.tuning.recapture import Copies, at_places, pooled
from autostream.tuning.select import Execution, detached, has_integers, repeatable, written
from autostream.tuning.tune import Tuned, tune
from autostream.utils.locks import preparing
from autostream.utils.stopwatch import Stopwatch
from autostream.utils.storages import storage_of


class NoSchedule(Exception):  # noqa: N818 - a notice between modules, not an error
    """No schedule of these tensors can be had now; the message says why. Nothing that the caller can see changed."""


@dataclass(frozen=True, slots=True)
class Label:
    """What a schedule is of, for reports and messages.

    Attributes:
        model: the model's name.
        signature: of the calls, readable.
    """

    model: str
    signature: str


@dataclass(frozen=True, slots=True)
class ModelContext:
    """What the schedules of one model share.

    Attributes:
        options: how to schedule.
        pools: of captured graphs: calls of one signature compute where those of the others do.
        slots: where inputs may come in turn, so that a graph that reads them there is worth it.
        make_section: makes what runs a part of a program, where a CUDA graph cannot hold the whole; without it, nothing
            of such a program is captured.
    """

    options: Options
    pools: GraphPools
    slots: BufferTable
    make_section: MakeSection | None = None


class ScheduledProgram:
    """A program scheduled for tensors of these shapes.

    Args:
        program: of ATen ops.
        arguments: its tensors. They, and the generators of random numbers, are as before when this returns.
        stays: which of them stay where they are from call to call, as weights do.
        label: what it is of.
        context: of the model.
        stopwatch: knows how long tracing took.

    Attributes:
        program: in the kernels that run.
        harmless: whether a run more than asked, even with weights that are no longer the model's, changes nothing that
            anybody can see.
        repeatable: whether a run more than asked changes nothing that anybody can see.
        writes: whether it writes any of its arguments.

    Raises:
        TraceError: it runs on several devices, or expects values of tensors, and is not cut.
    """

    def __init__(
        self,
        program: Program,
        arguments: Sequence[Tensor],
        stays: Sequence[bool],
        label: Label,
        context: ModelContext,
        stopwatch: Stopwatch,
    ) -> None:
        options, make_section = context.options, context.make_section
        with preparing:
            self._bound = _staying(program, arguments, stays)
            writes = Writes(arguments if options.inductor_options.get("freezing") else ())
            sections = make_section and sections_of(program, self._bound, options, make_section, stopwatch)
            if sections:
                sections.prepare(arguments)
                made = _in_sections(sections, program, label, stopwatch)
            else:
                if program.peers:
                    raise TraceError(
                        f"the model uses several devices ({', '.join(program.devices)}); one is scheduled at a time"
                    )
                tuned = tune(program, arguments, self._bound, options, stopwatch)
                with stopwatch("select"):
                    tuned = pooled(tuned, arguments, context.pools)
                made = _as_one(tuned, _report(label, tuned, options, stopwatch))
            self.program, self._graph = made.program, made.graph
            self._lowered, self._report = made.lowered, made.report
            self._copies = Copies(label.model)
            self._execution = at_places(made.execution, arguments, self._bound, context.slots, self._copies)
            self.frozen = Frozen(self.program.frozen, arguments, writes)
            self.detached = detached(program)
            self.writes = any(written(self.program, self._graph))
            self.repeatable = repeatable(self.program, self._graph)
            # Running with weights that are no longer the model's does no harm then. Where integers are computed with it
            # might: an index that is new may be beyond the end of what is old.
            self.harmless = self.repeatable and not has_integers(program)
            release_unused_memory(self.program.device)

    def __call__(self, arguments: Sequence[Tensor]) -> Sequence[Output]:
        """Run with these tensors, in the order of the program's placeholders.

        Raises:
            NoSchedule: no graph reads them where they lie, and none can be captured.
        """
        execution = self._execution
        if not isinstance(execution, GraphsByAddress):
            with without_autocast("inductor"):  # casts are ops of the program
                return execution(*arguments)
        place = execution.find(arguments) or self._new_place(execution, arguments)
        return place.launch(arguments)

    @property
    def is_lost(self) -> bool:
        """Whether its graphs read only what nobody has any more, and none could be captured for what is there now."""
        return isinstance(self._execution, GraphsByAddress) and self._execution.unusable

    @property
    def captured(self) -> CapturedGraph | None:
        """The CUDA graph of the latest call; ``None`` where ops are launched one by one."""
        return self._execution.graph if isinstance(self._execution, GraphsByAddress) else None

    @property
    def latest(self) -> BoundGraph | None:
        """The captured graphs of the latest call, wherever they read."""
        return self._execution.current if isinstance(self._execution, GraphsByAddress) else None

    def reading(self, arguments: Sequence[Tensor]) -> BoundGraph | None:
        """The captured graphs of the latest call, if these tensors lie where they read them."""
        return self._execution.latest(arguments) if isinstance(self._execution, GraphsByAddress) else None

    def share_outputs(self, places: frozenset[int]) -> frozenset[int]:
        """Hand out outputs at these places where a captured graph computes them: they are the caller's for one call.

        Returns:
            Those for which that is done. Nobody else's graphs may be in its pool.
        """
        graph = self.captured
        if graph is None:
            return frozenset()
        graph.share_outputs(places)
        return graph.shared

    @property
    def report(self) -> Report:
        """What was done, and why."""
        report = self._report()
        return replace(report, refusals=(*report.refusals, *self._copies.refusals))

    def lowered(self) -> GraphModule:
        """The graph that runs, or that was captured."""
        return self._lowered()

    def watched(self, arguments: Sequence[Tensor]) -> Report:
        """The report with a run that a profiler watched, or with the reason why there is none."""
        report, execution = self.report, self._execution
        try:
            if not isinstance(execution, GraphsByAddress):
                raise Unmatched("only replays of a CUDA graph are watched, and nothing is captured")
            if not self.repeatable:
                raise Unmatched("it writes its inputs or its state, or draws random numbers: a run more would be seen")
            assert report.chosen is not None, "what is captured was chosen"
            place = execution.find(arguments)
            if place is None:
                raise Unmatched("its weights lie elsewhere by now, and no graph of them is captured: call it first")
            schedule, level = report.chosen.schedule, self.program.level
            measured = measure_timeline(self.lowered(), self._graph, schedule, place.graph, arguments, level)
        except Unmatched as reason:
            refusal = Decision("", "not watched", str(reason))
            return replace(report, refusals=(*report.refusals, refusal))
        return replace(report, measured=measured)

    def static_inputs(self, arguments: Sequence[Tensor]) -> list[Tensor]:
        """The arguments, with the tensors that a captured graph reads in the place of those that it copies."""
        graph = self.captured
        return [graph.static.get(at, given) if graph else given for at, given in enumerate(arguments)]

    def served(self, calls: int) -> None:
        """The short way has served so many calls, whose tensors lay where :meth:`reading` found them."""
        if isinstance(self._execution, GraphsByAddress):
            self._execution.served(calls)

    def _new_place(self, places: GraphsByAddress, arguments: Sequence[Tensor]) -> BoundGraph:
        """The same schedule, captured again where the weights lie now.

        Raises:
            NoSchedule: it cannot be, or has been too often.
        """
        if reason := places.refused(arguments):  # without waiting for what another thread prepares
            raise NoSchedule(reason)
        with preparing, torch.inference_mode(False), torch.no_grad():
            if found := places.find(arguments):  # another thread has been quicker
                return found
            if places.over:
                raise NoSchedule(places.over)
            try:
                return places.add(arguments)
            except (CaptureError, torch.OutOfMemoryError) as error:
                raise NoSchedule(places.over or str(error)) from None


@dataclass(frozen=True)
class _Made:
    """What runs a program, and what is known of it.

    Attributes:
        program: in the kernels that run.
        graph: its ops.
        execution: runs it.
        lowered: what runs, to be read.
        report: what is known now.
    """

    program: Program
    graph: OpGraph
    execution: Execution
    lowered: Callable[[], GraphModule]
    report: Callable[[], Report]


def _as_one(tuned: Tuned, report: Report) -> _Made:
    program, graph, selection = tuned.program, tuned.priced.graph, tuned.selection
    lowered = partial(lower, program, graph, selection.chosen.schedule)
    return _Made(program, graph, selection.execution, lowered, lambda: report)


def _in_sections(sections: Sections, program: Program, label: Label, stopwatch: Stopwatch) -> _Made:
    report = partial(sections.report, label.model, label.signature, stopwatch)
    return _Made(program, sections.graph, sections, lambda: sections.module, report)


def _staying(program: Program, arguments: Sequence[Tensor], stays: Sequence[bool]) -> tuple[bool, ...]:
    """Which arguments stay where they are.

    An input that shares memory with the model's own stays with that. One that shares memory with an input that is
    copied is copied with it.
    """
    own = [p.role is not Role.INPUT for p in program.placeholders]
    held = {storage_of(argument) for argument, is_own in zip(arguments, own, strict=True) if is_own}
    stays = [stay or storage_of(argument) in held for stay, argument in zip(stays, arguments, strict=True)]
    copied = {storage_of(argument) for argument, stay in zip(arguments, stays, strict=True) if not stay}
    return tuple(
        stay and (is_own or storage_of(argument) not in copied)
        for stay, is_own, argument in zip(stays, own, arguments, strict=True)
    )


def _report(label: Label, tuned: Tuned, options: Options, stopwatch: Stopwatch) -> Report:
    priced, selection = tuned.priced, tuned.selection
    chosen, candidates = selection.chosen, selection.candidates
    exempted = exemption(candidates[0], options.memory_budget, given_bytes(priced.graph))
    mode = _mode(chosen, priced.graph.device)
    return replace(
        planned(label.model, label.signature, mode, tuned.program.level, priced, candidates, chosen),
        chosen_on=tuned.chosen_on,
        refusals=(*tuned.refusals, *priced.remarks, *exempted),
        seconds=dict(stopwatch.seconds),
    )


def _mode(chosen: Candidate, device: str) -> str:
    if chosen.captured:
        return "cuda graph"
    if chosen.schedule.streams == 1:
        return "one stream"
    return "threads" if device == "cpu" else "streams"
