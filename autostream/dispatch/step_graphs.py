"""Training steps in graphs: what is made for each kind of step, and run by it.

batch, optimizer ──▶ key ──▶ an entry whose guards hold ──▶ ScheduledProgram ──▶ result, and gradients to go on with
│ none
└─▶ capture the loss ──▶ trace the step ──▶ ScheduledProgram
└── no graph does the same: Refused; the caller has another way
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple, cast

from torch import Tensor, nn
from torch.nn.modules import module as nn_module
from torch.utils.weak import WeakIdRef

from autostream.dispatch.admission import Admission
from autostream.dispatch.compiled_graph import section
from autostream.dispatch.optimized_callable import OptimizedCallable
from autostream.dispatch.paranoid import compared
from autostream.dispatch.scheduled_program import Label, ModelContext, NoSchedule, ScheduledProgram
from autostream.dispatch.steps import Step
from autostream.errors import AutostreamError, OptionError, TargetError, TraceError, first_line
from autostream.frontend.averages import differing_buffers, pairs_of
from autostream.frontend.batches import Batch, divided
from autostream.frontend.captured_loss import CapturedLoss
from autostream.frontend.eager_only import anomalies_sought, has_torchscript, unusual_call, unusual_tensor
from autostream.frontend.modules import name_of
from autostream.frontend.optimizers import Hyperparameters, obstacle
from autostream.frontend.parameters import State, have_hooks, parameters_of, state_of
from autostream.frontend.saved_tensors import hooks_are_set
from autostream.frontend.settings import numerics
from autostream.frontend.signature import aliases_of, described
from autostream.frontend.steps import Step as Traceable
from autostream.frontend.steps import Tensors, Traced, Update, trace_step
from autostream.frontend.tree import Structure, flatten, unflatten
from autostream.ir import Role
from autostream.options import paranoid
from autostream.reporting.report import Report
from autostream.runtime.cuda_graph import GraphPools
from autostream.runtime.input_buffers import BufferTable
from autostream.utils.locks import preparing
from autostream.utils.stopwatch import Stopwatch

log = logging.getLogger(__name__)


class Refused(Exception):  # noqa: N818 - a notice between modules, not an error
    """No graph does the same, and the caller has another way; the message says why. Nothing has been done."""


class Full(Refused):
    """There is to be no other graph, and no graph of less either."""


class Key(NamedTuple):
    """What tells most steps of different graphs apart before any guard is asked."""

    structure: Structure
    kinds: Hashable
    aliases: Hashable
    numerics: Hashable
    training: bool
    parameters: Hashable
    trained: bytes
    groups: Structure | None
    state: Hashable

    def unlike(self, other: Key) -> str:
        """What differs from another, readable; ``""`` where nothing does."""
        told = [what for name, what in _TOLD.items() if getattr(self, name) != getattr(other, name)]
        if self.groups and other.groups:
            pairs = zip(self.groups.children or (), other.groups.children or (), strict=False)
            told += dict.fromkeys(name for mine, its in pairs for name in _unlike(mine, its))
        return ", ".join(told)


_TOLD = {
    "structure": "the batch's containers or numbers",
    "kinds": "shapes, strides, dtypes or devices",
    "aliases": "which tensors share memory",
    "numerics": "autocast, precisions or other numerics",
    "training": "the training mode",
    "parameters": "the optimizer's parameters",
    "trained": "what requires gradients",
    "state": "the optimizer's state",
}


def _unlike(group: Structure, other: Structure) -> Iterator[str]:
    """The hyperparameters that differ in structures of two groups."""
    values = dict(zip(cast(Batch, other.context), other.children or (), strict=True))
    mine = zip(cast(Batch, group.context), group.children or (), strict=True)
    return (name for name, value in mine if values.get(name) != value)


@dataclass(frozen=True)
class Call:
    """A step that is to be done.

    Attributes:
        batch: what it was called with.
        tensors: of the batch.
        parameters: of the optimizer.
        state: of the optimizer, where it is part of a graph.
        averages: a moving average's tensors and the model's, in turn, where they are part of a graph.
        key: what it is like.
        label: the same, readable.
    """

    batch: Batch
    tensors: list[Tensor]
    parameters: list[Tensor]
    state: State
    averages: list[Tensor]
    key: Key
    label: str


@dataclass(frozen=True)
class Done:
    """A step that was run.

    Attributes:
        result: what the loss returned, detached.
        gradients: of the optimizer's parameters, where these are not updated yet.
        entry: what ran it; ``None`` where it was compared with the plain one.
        call: what was asked for.
        tensors: what the entry was given.
    """

    result: Any
    gradients: list[Tensor | None] | None
    entry: Entry
    call: Call
    tensors: Tensors


class Graphs:
    """The graphs of a training step.

    Args:
        step: the step.
        slots: where batches may come in turn.
        whole: whether clipping, the optimizer and the average are part of the graphs, beside forward and backward.

    Attributes:
        name: in reports.
        hyperparameters: the optimizer's.
        replayed: steps that the short way has done since the last one that it has not, and what they were like.
    """

    def __init__(self, step: Step, slots: BufferTable, *, whole: bool) -> None:
        self.step, self.whole = step, whole
        self.name = f"{name_of(step.model)}, {'TrainingStep' if whole else 'Backward'}"
        self.hyperparameters = Hyperparameters(step.optimizer)
        context = ModelContext(step.options, GraphPools(), slots)
        self._context = replace(context, make_section=partial(section, context, self.name))
        self._admission = Admission[list["Entry | _Refusal"]](step.options.max_signatures)
        self._lock, self.paranoid = threading.RLock(), paranoid()
        self.replayed: tuple[Key, int] | None = None

    def __call__(self, batch: Batch) -> Done:
        """Do the step, or its forward and backward.

        Raises:
            Refused: no graph does the same.
            Full: there is to be no other graph.
            TargetError: the batch has no equal parts, or the average or the optimizer is of another model.
            TraceError: no graph does the same, and ``strict=True``.
        """
        call = self.call(batch)
        if self.replayed is not None:
            self._admission.served(*self.replayed)
            self.replayed = None
        entry = self._entry(call) or self._new_entry(call)
        if isinstance(entry, _Refusal):
            raise self._refused(entry.reason, Full if entry.full else Refused)
        tensors = self.tensors(call, entry.loss.held_now(batch))
        try:
            if self.paranoid:
                result, gradients = self._compared(entry, call, tensors)
            else:
                result, gradients = entry.run(tensors, batch)
        except NoSchedule as reason:
            raise self._refused(str(reason)) from None
        return Done(result, gradients, entry, call, tensors)

    def forget_refusals(self) -> None:
        """Try again what was refused, when steps like it come: they may have failed for what the caller did."""
        for key, entries in [*self._admission.entries.items()]:
            left: list[Entry | _Refusal] = [entry for entry in entries if isinstance(entry, Entry)]
            if left:
                self._admission.entries[key] = left
            else:
                del self._admission.entries[key]

    @property
    def reports(self) -> tuple[Report, ...]:
        """What is known of each kind of step, the most recently used first."""
        made = chain.from_iterable(map(reversed, reversed(self._admission.entries.values())))
        return tuple(entry.scheduled.report for entry in made if isinstance(entry, Entry))

    def tensors(self, call: Call, held: Sequence[Tensor]) -> Tensors:
        """What a step takes, with what the loss holds."""
        numbers = self.numbers(call.parameters)
        return Tensors(held, call.parameters, call.state.tensors, call.averages, call.tensors, numbers)

    def numbers(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """The numbers that may be others in each step, in one tensor."""
        if not self.whole:
            return self.step.numbers()
        return [self.hyperparameters.numbers(parameters[0].device)]

    def _refused(self, reason: str, kind: type[Refused] = Refused) -> Exception:
        return TraceError(reason) if self.step.options.strict else kind(reason)

    def call(self, batch: Batch) -> Call:
        """What a step is like now.

        Raises:
            Refused: no graph would do the same.
        """
        step, parameters = self.step, parameters_of(self.step.optimizer)
        step.check_average()
        step.loss.check(len(batch))
        try:
            tensors, structure = flatten(batch)
        except TraceError as error:
            raise self._refused(str(error)) from None
        reason = unusual_call() or unusual_tensor(tensors) or circumstances() or self._own_obstacle(parameters, tensors)
        if reason:
            raise self._refused(reason)
        groups: Structure | None = None
        state, averages = State((), []), list[Tensor]()
        if self.whole:
            groups, reason = self.hyperparameters.look()
            found = state_of(step.optimizer, parameters)
            if reason or isinstance(found, str):
                raise self._refused(reason or str(found))
            state = found
            averages = self._averages()
        sizes = tuple(len(group["params"]) for group in step.optimizer.param_groups)
        key = Key(
            structure,
            tuple(map(_kind, tensors)),
            aliases_of([*parameters, *state.tensors, *averages, *tensors]),
            numerics(),
            step.model.training,
            (sizes, *map(WeakIdRef, parameters)),
            bytes(map(_REQUIRES_GRADIENTS, parameters)),
            groups,
            (state.names, *map(_kind, state.tensors), *map(_kind, averages)),
        )
        label = f"{described(tensors)}, {'train' if step.model.training else 'eval'}"
        return Call(batch, tensors, parameters, state, averages, key, label)

    def _own_obstacle(self, parameters: Sequence[Tensor], tensors: Sequence[Tensor]) -> str:
        if any(map(_REQUIRES_GRADIENTS, tensors)):
            return "a tensor of the batch requires gradients, and a graph would compute none"
        if have_hooks(parameters):
            return "a parameter has hooks on its gradient, which a graph would not call"
        if not any(map(_REQUIRES_GRADIENTS, parameters)):
            return "the optimizer has no parameters that require gradients"
        return obstacle(self.step.optimizer) if self.whole else ""

    def _averages(self) -> list[Tensor]:
        step = self.step
        if step.average is None:
            return []
        if names := differing_buffers(step.average, step.model):
            raise self._refused(f"the average has no buffer {names[0]} as the model has it, and a graph makes none")
        return [*chain.from_iterable(chain(*pairs_of(step.average, step.model)))]

    def _entry(self, call: Call) -> Entry | _Refusal | None:
        """What was made for such steps, if the guards hold."""
        for entry in self._admission.entries.get(call.key, ()):
            if entry.stands_for(call):
                self._admission.served(call.key)
                return entry
        return None

    def _new_entry(self, call: Call) -> Entry | _Refusal:
        with self._lock, preparing:
            if entry := self._entry(call):  # another thread has been quicker
                return entry
            if reason := self._full(call):
                self._admission.unserved(call.key)
                return _Refusal(reason, full=True)
            made: Entry | _Refusal
            try:
                made = Entry(self, call, self._context)
            except (OptionError, TargetError):
                raise
            except Exception as error:
                if self.step.options.strict:
                    raise
                why = isinstance(error, AutostreamError)
                made = _Refusal(str(error) if why else f"it cannot be scheduled: {first_line(error)}")
            self._admission.add(call.key, [*self._admission.entries.get(call.key, []), made])
            return made

    def _full(self, call: Call) -> str:
        """Why no graph is to be made now, with what makes the step another; ``""`` if one may be."""
        made = [*chain.from_iterable(self._admission.entries.values())]
        reason, most = self._admission.refusal(call.key), self.step.options.max_signatures
        replaces = not reason and len(self._admission.entries) >= most  # one that nobody uses
        if len(made) >= most and not replaces:
            reason = "it has as many schedules as max_signatures allows"
        if not reason:
            return ""
        if not made:
            return reason
        latest = next(reversed(self._admission.entries))
        known = self._admission.entries.get(call.key)
        if known is None:
            return f"{reason}, and meets another: {call.key.unlike(cast(Key, latest))} changed"
        return f"{reason}, and meets another, since {known[-1].failed(call.batch)}"

    def _compared(self, entry: Entry, call: Call, tensors: Tensors) -> Any:
        """What a run returns, after the plain step has done the same."""
        plain = _Plain(self, call)
        batch = call.batch
        if self.whole:
            return compared(plain, lambda: entry.run(tensors, batch)[0], call.tensors, batch, {}), None
        return compared(plain, lambda: entry.run(tensors, batch), call.tensors, batch, {})


def circumstances() -> str:
    """Why a graph of a backward would not do the same under the circumstances of this call, or ``""``."""
    if hooks_are_set():
        return "hooks of saved tensors are set, and a graph saves none"
    if nn_module._global_backward_hooks or nn_module._global_backward_pre_hooks:
        return "a submodule has backward hooks, which a graph would not call"
    if nn_module._global_forward_hooks or nn_module._global_forward_pre_hooks:
        return "hooks of all modules are registered, which a graph would not call"
    return anomalies_sought()


def _kind(tensor: Tensor) -> Hashable:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


_REQUIRES_GRADIENTS = attrgetter("requires_grad")


class _Plain(nn.Module):
    """The step as it is, with all that it may write."""

    def __init__(self, graphs: Graphs, call: Call) -> None:
        super().__init__()
        self.modules_of_it, self._graphs = graphs.step.modules, graphs
        for (at, name), value in zip(call.state.names, call.state.tensors, strict=True):
            self.register_buffer(f"{name}_{at}", value)

    def _get_name(self) -> str:
        return self._graphs.name

    def forward(self, *batch: Any) -> Any:
        step = self._graphs.step
        result, gradients = step.differentiate(batch)
        return step.complete(result, gradients) if self._graphs.whole else (result, gradients)


@dataclass(frozen=True)
class _Refusal:
    """Steps that are in no graph.

    Attributes:
        reason: why.
        full: whether that is that there are too many graphs.
    """

    reason: str
    full: bool = False

    def stands_for(self, call: Call) -> bool:
        """Nothing tells whether another trial would end otherwise."""
        return True

    def failed(self, batch: Batch) -> str:
        """Why it does not stand for a step."""
        return ""


def trace(graphs: Graphs, call: Call) -> tuple[CapturedLoss, Traced, Tensors]:
    """Capture the loss of a step, and trace the step; and what that takes.

    Raises:
        TargetError: the optimizer has parameters of neither the model nor the loss.
        TraceError: no graph does the same.
    """
    step = graphs.step
    if reason := _not_to_be_captured(step.modules):
        raise TraceError(reason)
    loss = CapturedLoss(step.loss, call.batch, step.options.microbatches)
    if graphs.whole and step.average is not None and loss.captured.effects:
        raise TraceError("loss_fn changes Python objects, which the average may have to follow")
    held, ours = loss.held, set(map(id, call.parameters))
    if have_hooks([own for own in held if id(own) not in ours and own.requires_grad]):
        raise TraceError(
            "a parameter that is not the optimizer's has hooks on its gradient, which a graph would not call"
        )
    tensors = graphs.tensors(call, held)
    what = Traceable(
        loss.captured,
        loss.takes,
        divided(call.tensors),
        step.options.microbatches,
        [*map(bool, call.key.trained)],
        step.scaler is not None,
        _update_of(step, call) if graphs.whole else None,
    )
    traced = trace_step(what, tensors, step.modules)
    if not all(traced.reached):
        step.check_parameters()
    return loss, traced, tensors


def _not_to_be_captured(modules: nn.Module) -> str:
    parts = list(modules.modules())
    if any(isinstance(part, nn.parallel.DistributedDataParallel) for part in parts):
        return "DistributedDataParallel averages gradients by hooks, which a graph would not call"
    if any(isinstance(value, OptimizedCallable) for part in parts for value in vars(part).values()):
        return "it, or a part of it, is optimized already: give the model itself, and optimize no part of it"
    if has_torchscript(modules):
        return "TorchScript cannot be captured: use the module that it was made from"
    return ""


def _update_of(step: Step, call: Call) -> Update:
    """What a whole step does with its gradients."""
    assert call.key.groups, "whole steps have them, or are refused"
    averaged = len([*step.average.parameters()]) if step.average is not None else 0
    sizes = [len(group["params"]) for group in step.optimizer.param_groups]
    groups, options = unflatten(call.key.groups, ()), step.options
    return Update(step.optimizer, groups, sizes, call.state.names, options.max_norm, averaged, options.decay)


class Entry:
    """The graph of one kind of steps.

    Args:
        graphs: whose it is.
        call: such a step.
        context: of the graphs.

    Attributes:
        loss: as it was captured.
        traced: the step.
        scheduled: runs it.

    Raises:
        TargetError: the optimizer has parameters of neither the model nor the loss.
        TraceError: no graph does the same.
    """

    def __init__(self, graphs: Graphs, call: Call, context: ModelContext) -> None:
        stopwatch = Stopwatch()
        with stopwatch("trace"):
            self.loss, self.traced, tensors = trace(graphs, call)
        self._trained, self._whole, self._kinds = call.key.trained, graphs.whole, list(map(_kind, tensors.held))
        stays = [p.role is not Role.INPUT for p in self.traced.program.placeholders]
        label, arguments = Label(graphs.name, call.label), self.traced.arguments(tensors)
        self.scheduled = ScheduledProgram(self.traced.program, arguments, stays, label, context, stopwatch)
        self.loss.let_go()

    def stands_for(self, call: Call) -> bool:
        """Whether the loss is as it was captured, of tensors that lie as they did."""
        batch = call.batch
        return self.loss.stands_for(batch) and self._kinds == list(map(_kind, self.loss.held_now(batch)))

    def failed(self, batch: Batch) -> str:
        """Why it is not."""
        return self.loss.failed(batch)

    def run(self, tensors: Tensors, batch: Batch) -> tuple[Any, list[Tensor | None] | None]:
        """The result, and the gradients of all of the optimizer's parameters, where these are not updated.

        Raises:
            NoSchedule: no graph reads the tensors where they lie, and none can be captured.
        """
        return self.put_together(self.scheduled(self.traced.arguments(tensors)), batch)

    def put_together(self, outputs: Sequence[Tensor | None], batch: Batch) -> tuple[Any, list[Tensor | None] | None]:
        """The same, of what the program has returned."""
        count = self.traced.returned
        result = self.loss.result(outputs[:count], batch)
        if self._whole:
            return result, None
        gradients, reached = iter(outputs[count:]), iter(self.traced.reached)
        return result, [next(gradients) if own and next(reached) else None for own in self._trained]
