"""A program scheduled for one signature: runs all stages of the pipeline, then the calls.

program ──▶ tune ──▶ memory pool ──▶ graphs by address ──▶ ScheduledProgram: flat tensors in, flat tensors out
   └── some ops do not fit into a CUDA graph: cut into sections ──▶ …
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
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
from autostream.runtime.cuda_graph import CapturedGraph, GraphPools, release_unused_memory
from autostream.runtime.graphs_by_address import BoundGraph, GraphsByAddress
from autostream.runtime.input_buffers import BufferTable
from autostream.runtime.lower import lower
from autostream.runtime.measured_timeline import Unmatched, measure_timeline
from autostream.runtime.restore import Restore, undone
from autostream.runtime.runs import without_autocast
from autostream.runtime.static_inputs import Output
from autostream.runtime.writes import Frozen, Writes
from autostream.store import Notes
from autostream.tuning.budget import budget_of
from autostream.tuning.recapture import CopyNote, by_address, captured_into_pool
from autostream.tuning.select import Execution, detached, may_fail, repeatable, written
from autostream.tuning.tune import Tuned, tune
from autostream.utils.locks import preparing
from autostream.utils.logs import Log, Warned
from autostream.utils.stopwatch import Stopwatch
from autostream.utils.storages import storage_of

log = Log(__name__)


class NoSchedule(Exception):  # noqa: N818 - a notice between modules, not an error
    """These tensors cannot be run with a schedule now; the message says why. There were no side effects."""


@dataclass(frozen=True, slots=True)
class Label:
    """Names a schedule in reports and messages.

    Attributes:
        model: the model's name.
        signature: describes the calls.
    """

    model: str
    signature: str


@dataclass(frozen=True, slots=True)
class ModelContext:
    """What the schedules of one model share.

    Attributes:
        options: how to schedule.
        pools: memory pools that the CUDA graphs of all signatures share.
        input_buffers: buffers that are used in turn, each of which is worth a captured graph of its own.
        make_section: compiles a section of a program that does not fit into one CUDA graph; without it, nothing of such
            a program is captured.
        warn: logs what is wrong with them, each once.
    """

    options: Options
    pools: GraphPools
    input_buffers: BufferTable
    make_section: MakeSection | None = None
    warn: Warned = field(default_factory=partial(Warned, log))


class ScheduledProgram:
    """A program scheduled for one signature.

    Args:
        program: of ATen ops.
        arguments: tensors of that signature. Trial runs leave them and the random number generators as they were.
        stays: which arguments keep their addresses from call to call, as weights do.
        label: for reports.
        context: of the model.
        stopwatch: has the time that tracing took.
        notes: what was decided before, for reports.

    Attributes:
        program: with the kernels that run.
        repeatable: whether a superfluous run has no side effects that the user could see.
        harmless: whether that holds even if it reads weights that the model has replaced.
        writes: whether it writes any of its arguments.

    Raises:
        TraceError: it runs on several devices, or depends on values of tensors, and may not be cut.
    """

    def __init__(
        self,
        program: Program,
        arguments: Sequence[Tensor],
        stays: Sequence[bool],
        label: Label,
        context: ModelContext,
        stopwatch: Stopwatch,
        notes: Notes = (),
    ) -> None:
        self._notes = notes
        options, make_section = context.options, context.make_section
        with preparing:
            self._bound = _bound_arguments(program, arguments, stays)
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
                    tuned = captured_into_pool(tuned, arguments, context.pools)
                made = _as_one(tuned, _report(label, tuned, options, stopwatch))
            self.program, self._graph = made.program, made.graph
            self._lowered, self._report = made.lowered, made.report
            self._copies = CopyNote(label.model)
            self._execution = by_address(made.execution, arguments, self._bound, context.input_buffers, self._copies)
            self.frozen = Frozen(self.program.frozen, arguments, writes)
            self.detached = detached(program)
            self.writes = any(written(self.program, self._graph))
            self.repeatable = repeatable(self.program, self._graph)
            self.harmless = self.repeatable and not may_fail(program)
            release_unused_memory(self.program.device)

    def __call__(self, arguments: Sequence[Tensor]) -> Sequence[Output]:
        """Run with these tensors, in the order of the program's placeholders.

        Raises:
            NoSchedule: no CUDA graph reads tensors at these addresses, and none can be captured.
        """
        execution = self._execution
        if not isinstance(execution, GraphsByAddress):
            with without_autocast("inductor"):  # casts are ops of the program
                return execution(*arguments)
        graph = execution.find(arguments) or self._capture_again(execution, arguments)
        return graph.launch(arguments)

    @property
    def is_lost(self) -> bool:
        """Whether all its CUDA graphs read weights that were freed, and none can be captured for the present ones."""
        return isinstance(self._execution, GraphsByAddress) and self._execution.unusable

    @property
    def captured(self) -> CapturedGraph | None:
        """The CUDA graph of the latest call; ``None`` if ops are launched one by one."""
        return self._execution.graph if isinstance(self._execution, GraphsByAddress) else None

    @property
    def latest(self) -> BoundGraph | None:
        """The CUDA graph of the latest call, with its variants for input buffers."""
        return self._execution.current if isinstance(self._execution, GraphsByAddress) else None

    def reading(self, arguments: Sequence[Tensor]) -> BoundGraph | None:
        """The CUDA graph of the latest call, if it reads tensors at these addresses."""
        return self._execution.latest(arguments) if isinstance(self._execution, GraphsByAddress) else None

    def share_outputs(self, indices: frozenset[int], *, aliased: bool = False) -> frozenset[int]:
        """Return the outputs with these indices without a copy from now on, if a CUDA graph computes them.

        The next replay overwrites them. No other graphs may be in its memory pool.

        Args:
            indices: of outputs.
            aliased: whether several of them may share memory.

        Returns:
            The indices of the outputs that are shared.
        """
        graph = self.captured
        if graph is None:
            return frozenset()
        graph.share_outputs(indices, aliased=aliased)
        return graph.shared

    @property
    def report(self) -> Report:
        """The schedule that was chosen, and why."""
        report = self._report()
        refusals = dict.fromkeys((*self._notes, *report.refusals, *self._copies.refusals))
        return replace(report, refusals=tuple(refusals))

    def undone(self, arguments: Sequence[Tensor]) -> AbstractContextManager[Restore]:
        """Restore what runs inside write of these arguments, and the random generators (:func:`undone`)."""
        return undone(arguments, written(self.program, self._graph), self.program.devices)

    def lowered(self) -> GraphModule:
        """The graph that runs, or that was captured."""
        return self._lowered()

    def watched(self, arguments: Sequence[Tensor]) -> Report:
        """The report with the timeline of a profiled run, or with the reason why there is none."""
        report, execution = self.report, self._execution
        try:
            if not isinstance(execution, GraphsByAddress):
                raise Unmatched("only replays of a CUDA graph are watched, and nothing is captured")
            if not self.repeatable:
                raise Unmatched("it writes its inputs or its state, or draws random numbers: a run more would be seen")
            assert report.chosen is not None, "what is captured was chosen"
            captured = execution.find(arguments)
            if captured is None:
                raise Unmatched("its weights lie elsewhere by now, and no graph of them is captured: call it first")
            schedule, level = report.chosen.schedule, self.program.level
            measured = measure_timeline(self.lowered(), self._graph, schedule, captured.graph, arguments, level)
        except Unmatched as reason:
            refusal = Decision("", "not watched", str(reason))
            return replace(report, refusals=(*report.refusals, refusal))
        return replace(report, measured=measured)

    def static_inputs(self, arguments: Sequence[Tensor]) -> list[Tensor]:
        """The arguments, with the static inputs of the captured graph in place of those that it copies."""
        graph = self.captured
        return [graph.static.get(at, argument) if graph else argument for at, argument in enumerate(arguments)]

    def count_replays(self, calls: int) -> None:
        """Count calls on the fast path, with tensors at the addresses that :meth:`reading` found."""
        if isinstance(self._execution, GraphsByAddress):
            self._execution.served(calls)

    def _capture_again(self, graphs: GraphsByAddress, arguments: Sequence[Tensor]) -> BoundGraph:
        """Capture the schedule again with the present addresses of the weights.

        Raises:
            NoSchedule: the capture failed, or there were too many.
        """
        if reason := graphs.refused(arguments):  # before waiting for another thread's capture
            raise NoSchedule(reason)
        with preparing, torch.inference_mode(False), torch.no_grad():
            if graph := graphs.find(arguments):  # another thread has captured it meanwhile
                return graph
            if graphs.over:
                raise NoSchedule(graphs.over)
            try:
                return graphs.add(arguments)
            except (CaptureError, torch.OutOfMemoryError) as error:
                raise NoSchedule(graphs.over or str(error)) from None


@dataclass(frozen=True)
class _Made:
    """A program that was scheduled, whole or in sections.

    Attributes:
        program: with the kernels that run.
        graph: its ops.
        execution: runs it.
        lowered: makes the graph that runs, for reading.
        report: makes the report.
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


def _bound_arguments(program: Program, arguments: Sequence[Tensor], stays: Sequence[bool]) -> tuple[bool, ...]:
    """Which arguments a CUDA graph reads at their own addresses, without a copy.

    An input that aliases one of the model's tensors is not copied. One that aliases a copied input is copied with it.
    """
    of_model = [p.role is not Role.INPUT for p in program.placeholders]
    held = {storage_of(argument) for argument, is_model in zip(arguments, of_model, strict=True) if is_model}
    stays = [stay or storage_of(argument) in held for stay, argument in zip(stays, arguments, strict=True)]
    copied = {storage_of(argument) for argument, stay in zip(arguments, stays, strict=True) if not stay}
    return tuple(
        stay and (is_model or storage_of(argument) not in copied)
        for stay, is_model, argument in zip(stays, of_model, arguments, strict=True)
    )


def _report(label: Label, tuned: Tuned, options: Options, stopwatch: Stopwatch) -> Report:
    priced, selection = tuned.priced, tuned.selection
    chosen, candidates = selection.chosen, selection.candidates
    exempted = budget_of(priced.graph, priced.profile, candidates[0], options.memory_budget).exemption
    mode = _mode(chosen, priced.graph.device)
    return replace(
        planned(label.model, label.signature, mode, tuned.program.level, priced, candidates, chosen),
        chosen_on=tuned.chosen_on,
        refusals=(*tuned.refusals, *priced.notes, *exempted),
        seconds=dict(stopwatch.seconds),
    )


def _mode(chosen: Candidate, device: str) -> str:
    if chosen.captured:
        return "cuda graph"
    if chosen.schedule.streams == 1:
        return "one stream"
    return "threads" if device == "cpu" else "streams"
