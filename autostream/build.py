"""From a model and one signature to something that runs, with a report: all stages, and the fall-backs between them.

trace ──▶ tune ──────────────────────▶ Scheduled
  │└─ a CUDA graph cannot hold some ops: cut ─┘
  └── refused: something else comes instead (``entries.py``)
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from autostream.budget import exemption
from autostream.errors import CaptureError
from autostream.execution.bound import Frozen, Writes, is_ordinary
from autostream.execution.cuda_graph import GraphPools, return_unused
from autostream.execution.lower import lower
from autostream.execution.places import Place, Places
from autostream.execution.slots import SlotTable
from autostream.execution.static import Output
from autostream.execution.watched import Unmatched, watch
from autostream.frontend.numerics import numerics
from autostream.frontend.signature import Signature
from autostream.frontend.tree import Structure, tensors_like, unflatten
from autostream.ir import Candidate, Decision, OpGraph, Placeholder, Program, Role
from autostream.optimized import MakeSection as MakePiece
from autostream.options import Options
from autostream.pipeline import planned
from autostream.preparing import preparing
from autostream.recapture import Copies, at_places, pooled
from autostream.reporting.report import Report
from autostream.scheduling.peak import given_bytes
from autostream.sections import Sections, sections_of
from autostream.select import Execution, detached, has_integers, repeatable, written
from autostream.shortcut import CapturedRun, Run, Shortcut, UncapturedRun
from autostream.stopwatch import Stopwatch
from autostream.storages import storage_of
from autostream.tracing.export import MODELS, Tracer, check_one_device, check_straight
from autostream.tracing.state import LiveState, ModelWatch, name_of
from autostream.tuning import Tuned, tune

RECORDS_GRADIENTS = "gradients are recorded: call it under torch.no_grad() or torch.inference_mode()"


class Stale(Exception):  # noqa: N818 - a notice between modules, not an error
    """The model's state is no longer what a schedule was made for: trace again."""


class Unsuitable(Exception):  # noqa: N818 - a notice between modules, not an error
    """These inputs must go to the plain model; the message says why."""


class Scheduled:
    """A model scheduled for one signature.

    Args:
        model: the live model.
        structure: of ``(args, kwargs)``.
        tensors: the flat example inputs.
        signature: what this is made for.
        bound_inputs: positions of inputs that stay where they are from call to call.
        options: how to schedule.
        pools: of the model's captured graphs: calls of one signature compute where those of the others do.
        tracer: makes programs of such models.
        slots: where inputs may come in turn, so that a graph that reads them there is worth it.
        make_section: makes what runs in the place of a part of the program that a CUDA graph can hold, where it cannot
            hold the whole; without it, nothing of such a program is captured.

    Attributes:
        repeatable: whether a call more than asked, or one that fails, changes nothing that anybody can see.

    Raises:
        TraceError: the model cannot be traced.
    """

    def __init__(
        self,
        model: nn.Module,
        structure: Structure,
        tensors: Sequence[Tensor],
        signature: Signature,
        bound_inputs: frozenset[int],
        options: Options,
        pools: GraphPools,
        tracer: Tracer = MODELS,
        slots: SlotTable | None = None,
        make_section: MakePiece | None = None,
    ) -> None:
        with preparing:
            stopwatch = Stopwatch()
            with stopwatch("trace"):
                traced = tracer.trace(model, tensors, structure)
            placeholders = traced.program.placeholders
            self._state = LiveState(model, placeholders, traced.constants)
            self._signature = signature
            self._shortcut: Shortcut | None = None
            self._noticed = False
            self._slots = slots if slots is not None and not signature.aliases else SlotTable()
            arguments = self._arguments(tensors)
            self._bound = _staying(placeholders, arguments, bound_inputs)
            writes = Writes(arguments if options.inductor_options.get("freezing") else ())
            sections = make_section and sections_of(traced.program, self._bound, options, make_section, stopwatch)
            if sections:
                with torch.set_grad_enabled(signature.grad_mode and not signature.gradients):
                    sections.prepare(arguments)
                made = _in_sections(sections, traced.program, name_of(model), signature, stopwatch)
            else:
                check_one_device(traced.program)
                check_straight(traced.program)
                tuned = tune(traced.program, arguments, self._bound, options, stopwatch)
                with stopwatch("select"):
                    tuned = pooled(tuned, arguments, pools)
                made = _as_one(tuned, _report(name_of(model), signature, tuned, options, stopwatch))
            self._program, self._graph = made.program, made.graph
            self._lowered, self._report = made.lowered, made.report
            self._copies = Copies(name_of(model))
            self._execution = at_places(made.execution, arguments, self._bound, self._slots, self._copies)
            self._frozen = Frozen(self._program.frozen, arguments, writes)
            self._structure = traced.structure
            self._columns = _COLUMNS if self._program.level == "aten" else (*_COLUMNS, _alignment)
            self._expected = self._metadata(arguments)
            self._detached = detached(traced.program)
            self._writes = any(written(self._program, self._graph))
            self._own = _Own(_first_places([p.storage for p in placeholders if p.role is not Role.INPUT]))
            self.repeatable = repeatable(self._program, self._graph)
            # Running with weights that are no longer the model's does no harm then. Where integers are computed with it
            # might: an index that is new may be beyond the end of what is old.
            self._harmless = self.repeatable and not has_integers(traced.program)
            return_unused(self._program.device)

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        """Run with these flat inputs and return what the model would.

        Raises:
            Stale: the model's state has another shape or kind now, or shares memory otherwise; nothing that can be seen
                has been changed.
            Unsuitable: an input lies in memory of the model's state, some of which the model writes; or it requires
                gradients, and an output is a detached view of it.
        """
        arguments = self._arguments(tensors)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in arguments):
            raise Unsuitable(RECORDS_GRADIENTS)
        # Autograd knows which views were detached; of tensors that are merely in the same memory, nobody does.
        if any(arguments[at].requires_grad for at in self._detached):
            raise Unsuitable("an output is a detached view of an input that requires gradients")
        if self._writes:
            own = self._own.storages(arguments[: len(arguments) - len(tensors)])
            if not own.isdisjoint(map(storage_of, tensors)):
                raise Unsuitable("an input shares memory with the model's own state, and the model writes")
        if not self._harmless and not self._as_traced(arguments):
            raise Stale
        outputs = self._run(arguments)
        # Where running once too often does no harm, the host looks while the device computes.
        if self._harmless and not self._as_traced(arguments):
            self._harmless = False  # if it is kept all the same, it is looked at before
            raise Stale
        return unflatten(self._structure, outputs)

    def shortcut(self, args: tuple[Any, ...], structure: Structure, watch: ModelWatch) -> Shortcut | None:
        """The short way for calls like one that has just been made, where there is one.

        Args:
            args: the positional arguments of that call, which had no others.
            structure: of these and the others.
            watch: on the model's modules, as they were before that call.
        """
        (call, _) = structure.children or ()
        tensors = tensors_like(call, args)
        # Calls with inputs that share memory, or without any, fit no shortcut.
        if torch.is_grad_enabled() or not tensors or self._signature.aliases or self._detached:
            return None
        known = self._shortcut
        if known is not None and not known.current():
            known, self._noticed = None, True
        if known is None or known.fits(args) is None:
            self._shortcut = self._new_shortcut(call, tensors, watch)
        return self._shortcut

    def _new_shortcut(self, call: Structure, tensors: Sequence[Tensor], watch: ModelWatch) -> Shortcut | None:
        try:
            arguments = self._arguments(tensors)
        except Stale:
            return None
        execution, held = self._execution, arguments[: len(arguments) - len(tensors)]
        if isinstance(execution, Places):
            run: Run = CapturedRun(execution, self._frozen, not self._harmless, self.repeatable)
        elif _alignment in self._columns or self._metadata(arguments) != self._expected:
            return None
        else:
            run = UncapturedRun(execution, self._frozen, held, self.repeatable)
        signature = self._signature
        known = signature.training, signature.read
        shortcut = Shortcut(run, self._structure, call, tensors, held, self._state, watch, *known)
        # Asked afterwards: whatever the settings were when the shortcut looked, it serves no others than these.
        return shortcut if numerics() == signature.numerics else None

    def noticed(self) -> bool:
        """Whether a call has found tensors of the model elsewhere than those before it, since this was last asked."""
        noticed = self._noticed or self._own.moved
        self._noticed = self._own.moved = False
        return noticed

    def let_go(self) -> None:
        """Let go of tensors that were the model's and no longer are: nobody may ever call with this signature again."""
        if self._shortcut is not None and not self._shortcut.current():
            self._shortcut = None
        ordinary = (tensor for tensor in self._state.tensors() if isinstance(tensor, Tensor) and is_ordinary(tensor))
        own = frozenset(map(storage_of, ordinary))
        self._own.let_go(own)
        if isinstance(self._execution, Places):
            self._execution.let_go(own)

    def lend(self, places: frozenset[int]) -> frozenset[int]:
        """Hand out outputs at these places where a captured graph computes them: they are the caller's for one call.

        Returns:
            Those for which that is done. Nobody else's graphs may be in its pool.
        """
        execution = self._execution
        if not isinstance(execution, Places):
            return frozenset()
        execution.graph.lend(places)
        return execution.graph.lent

    @property
    def report(self) -> Report:
        """What was done, and why."""
        report = self._report()
        return replace(report, refusals=(*report.refusals, *self._copies.refusals))

    @property
    def choices(self) -> tuple[str, ...]:
        """The user's lines where the program expects a value, in order."""
        return tuple(op.source for op in self._graph.ops.values() if op.chooses)

    def lowered(self) -> GraphModule:
        """The graph that runs, or that was captured."""
        return self._lowered()

    def watched(self, tensors: Sequence[Tensor]) -> Report:
        """The report with a run that a profiler watched, or with the reason why there is none.

        Args:
            tensors: flat inputs, some of which may stay where they are from call to call.
        """
        report, execution = self.report, self._execution
        try:
            if not isinstance(execution, Places):
                raise Unmatched("only replays of a CUDA graph are watched, and nothing is captured")
            if not self.repeatable:
                raise Unmatched("it writes its inputs or its state, or draws random numbers: a run more would be seen")
            assert report.chosen is not None, "what is captured was chosen"
            level = self._program.level
            arguments = self._arguments(tensors)
            place = execution.find(arguments)
            if place is None:
                raise Unmatched("its weights lie elsewhere by now, and no graph of them is captured: call it first")
            measured = watch(self.lowered(), self._graph, report.chosen.schedule, place.graph, arguments, level)
        except Unmatched as reason:
            refusal = Decision("", "not watched", str(reason))
            return replace(report, refusals=(*report.refusals, refusal))
        return replace(report, measured=measured)

    def static_inputs(self, tensors: Sequence[Tensor]) -> list[Tensor] | None:
        """The tensors that a captured graph reads its inputs from, or ``None`` where nothing is captured.

        Args:
            tensors: flat inputs; those that the graph reads where they are, are returned.
        """
        execution = self._execution
        if not isinstance(execution, Places):
            return None
        placeholders = self._program.placeholders
        inputs = [at for at, placeholder in enumerate(placeholders) if placeholder.role is Role.INPUT]
        return [execution.graph.static.get(at, given) for at, given in zip(inputs, tensors, strict=True)]

    def _run(self, arguments: list[Tensor]) -> Sequence[Output]:
        execution = self._execution
        if not isinstance(execution, Places):
            self._expect(arguments)
            return execution(*arguments)
        if self._harmless and (outputs := execution.guess(arguments)) is not None:
            return outputs
        place = execution.find(arguments) or self._new_place(execution, arguments)
        return place.launch(arguments)

    def _as_traced(self, arguments: Sequence[Tensor]) -> bool:
        """Whether what the program takes for granted is so: settings of modules, and weights that it holds on to."""
        return self._state.configured() and self._frozen(arguments)

    def _arguments(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        state = self._state.tensors()
        if not self._state.tied(state):
            raise Stale
        present = [tensor for tensor in state if tensor is not None]
        if len(present) < len(state):
            raise Stale
        return [*present, *tensors]

    def _expect(self, arguments: Sequence[Tensor]) -> None:
        try:
            expected = self._metadata(arguments) == self._expected
        except RuntimeError:  # sparse tensors have no strides
            expected = False
        if not expected:
            raise Stale

    def _metadata(self, tensors: Sequence[Tensor]) -> list[list[object]]:
        return [list(map(column, tensors)) for column in self._columns]

    def _new_place(self, places: Places, arguments: list[Tensor]) -> Place:
        """The same schedule, captured again where the weights lie now.

        Raises:
            Stale: it cannot be, and no other graph of it is of use.
            Unsuitable: it cannot be here, or has been too often.
        """
        if not self._frozen(arguments):
            raise Stale
        self._expect(arguments)
        if reason := places.refused(arguments):  # without waiting for what another thread prepares
            raise Unsuitable(reason)
        with preparing, torch.inference_mode(False), torch.no_grad():
            if found := places.find(arguments):  # another thread has been quicker
                return found
            if places.over:
                raise Unsuitable(places.over)
            self._shortcut, self._noticed = None, True  # it holds weights
            try:
                return places.add(arguments)
            except (CaptureError, torch.OutOfMemoryError):
                raise (Unsuitable(places.over) if places.are_used else Stale) from None


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


def _in_sections(sections: Sections, program: Program, model: str, signature: Signature, stopwatch: Stopwatch) -> _Made:
    report = partial(sections.report, model, str(signature), stopwatch)
    return _Made(program, sections.graph, sections, lambda: sections.module, report)


def _staying(
    placeholders: Sequence[Placeholder], arguments: Sequence[Tensor], bound_inputs: frozenset[int]
) -> tuple[bool, ...]:
    """Which arguments stay where they are: an input that shares memory with one that is copied is copied with it."""
    stays = [p.role is not Role.INPUT or int(p.target) in bound_inputs for p in placeholders]
    copied = {storage_of(argument) for argument, stay in zip(arguments, stays, strict=True) if not stay}
    return tuple(
        stay and not (p.role is Role.INPUT and storage_of(argument) in copied)
        for stay, p, argument in zip(stays, placeholders, arguments, strict=True)
    )


def _report(model: str, signature: Signature, tuned: Tuned, options: Options, stopwatch: Stopwatch) -> Report:
    priced, selection = tuned.priced, tuned.selection
    chosen, candidates = selection.chosen, selection.candidates
    exempted = exemption(candidates[0], options.memory_budget, given_bytes(priced.graph))
    mode = _mode(chosen, priced.graph.device)
    return replace(
        planned(model, str(signature), mode, tuned.program.level, priced, candidates, chosen),
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


def _alignment(tensor: Tensor) -> int:
    """Kernels of Inductor's load 16 bytes at a time where they were compiled for tensors that lie so."""
    return tensor.data_ptr() % 16


_COLUMNS: tuple[Callable[[Tensor], object], ...] = (
    Tensor.size, Tensor.stride, attrgetter("dtype"), attrgetter("device"), Tensor.is_conj, Tensor.is_neg,
)  # fmt: skip


class _Own:
    """The storages of the model's tensors: looked up anew where one of these lies elsewhere than at the last call.

    Args:
        shared: for each of them, the place of the first in the same storage when the model was traced.

    Attributes:
        moved: whether one has been found elsewhere than before.
    """

    def __init__(self, shared: list[int]) -> None:
        self._shared = shared
        self.moved = False
        # Tensors are held so that nothing else can come to lie there. One value, for other threads look meanwhile.
        self._known: tuple[list[int], list[Tensor], frozenset[int]] = ([], [], frozenset())

    def storages(self, own: Sequence[Tensor]) -> frozenset[int]:
        """All storages of these tensors, which are the model's.

        Raises:
            Stale: others share memory than when the model was traced, so its ops have other hazards; or one has no
                address.
        """
        try:
            addresses = list(map(Tensor.data_ptr, own))
        except RuntimeError:  # sparse tensors have none
            raise Stale from None
        known, _, storages = self._known
        if addresses != known:
            each = list(map(storage_of, own))
            if _first_places(each) != self._shared:
                raise Stale
            self.moved |= bool(known)
            storages = frozenset(each)
            self._known = addresses, [tensor.detach() for tensor in own], storages
        return storages

    def let_go(self, storages: frozenset[int]) -> None:
        """Hold no tensors but those in these storages, which are the model's now."""
        *_, known = self._known
        if not known <= storages:
            self._known = [], [], frozenset()


def _first_places(values: Sequence[Hashable]) -> list[int]:
    """For each value, the place of the first that equals it.

    Example:
        >>> _first_places("abac")
        [0, 1, 0, 3]
    """
    first: dict[Hashable, int] = {}
    return [first.setdefault(value, place) for place, value in enumerate(values)]
