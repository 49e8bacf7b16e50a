"""Compiled training steps: a cache of scheduled graphs, looked up by key and guards.

    batch, optimizer ──▶ key ──▶ an entry whose guards hold ──▶ ScheduledProgram ──▶ result, gradients
                                   │ none
                                   └─▶ capture the loss ──▶ trace the step ──▶ ScheduledProgram

Where capturing or tracing fails, there is a ``Refusal`` instead, and the caller falls back.
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
from autostream.frontend.eager_only import anomaly_detection, has_torchscript, unusual_call, unusual_tensor
from autostream.frontend.inputs import aliases_of, described
from autostream.frontend.modules import name_of
from autostream.frontend.optimizers import Hyperparameters, obstacle
from autostream.frontend.parameters import State, have_hooks, parameters_of, state_of
from autostream.frontend.saved_tensors import hooks_are_set
from autostream.frontend.settings import numerics
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


class Key(NamedTuple):
    """The signature of a step. Guards are checked only for entries with the same key."""

    structure: Structure
    kinds: Hashable
    aliases: Hashable
    numerics: Hashable
    training: bool
    parameters: Hashable
    trained: bytes
    groups: Structure | None
    state: Hashable

    def difference(self, other: Key) -> str:
        """The difference from another key, in words; ``""`` if there is none."""
        words = [what for name, what in _WORDS.items() if getattr(self, name) != getattr(other, name)]
        if self.groups and other.groups:
            pairs = zip(self.groups.children or (), other.groups.children or (), strict=False)
            words += dict.fromkeys(name for group, other_group in pairs for name in _changed(group, other_group))
        return ", ".join(words)


_WORDS = {
    "structure": "the batch's containers or numbers",
    "kinds": "shapes, strides, dtypes or devices",
    "aliases": "which tensors share memory",
    "numerics": "autocast, precisions or other numerics",
    "training": "the training mode",
    "parameters": "the optimizer's parameters",
    "trained": "what requires gradients",
    "state": "the optimizer's state",
}


def _changed(group: Structure, other: Structure) -> Iterator[str]:
    """The names of hyperparameters that differ in two groups."""
    other_values = dict(zip(cast(Batch, other.context), other.children or (), strict=True))
    values = zip(cast(Batch, group.context), group.children or (), strict=True)
    return (name for name, value in values if other_values.get(name) != value)


@dataclass(frozen=True)
class Call:
    """A call of a training step.

    Attributes:
        batch: its arguments.
        tensors: of the batch.
        parameters: of the optimizer.
        state: of the optimizer, if the update is part of the graph.
        averages: the average's tensors and the model's, alternating, if they are part of the graph.
        key: its signature.
        label: the signature in words, for reports.
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
    """A step that a graph has run.

    Attributes:
        result: what ``loss_fn`` returned, detached.
        gradients: of the optimizer's parameters; ``None`` if the graph has updated them.
        entry: the compiled step.
        call: the call.
        tensors: the tensors of the call.
    """

    result: Any
    gradients: list[Tensor | None] | None
    entry: Entry
    call: Call
    tensors: Tensors


@dataclass(frozen=True)
class Refusal:
    """Why a step is in no graph. The step has not been run.

    Attributes:
        reason: for reports.
        full: whether there are too many graphs, so that none of a part of the step may be captured either.
    """

    reason: str
    full: bool = False

    def matches(self, call: Call) -> bool:
        """True: capturing a step with the same key would fail again."""
        return True

    def failed(self, batch: Batch) -> str:
        """``""``: it has no guards."""
        return ""


class Graphs:
    """The compiled graphs of a training step.

    Args:
        step: the eager step.
        input_buffers: buffers that captured graphs may read in place.
        whole: whether clipping, the optimizer's update and the average are part of the graphs.

    Attributes:
        name: in reports.
        hyperparameters: of the optimizer.
        replayed: the key of the steps that the fast path has run since the last call, and their number.
    """

    def __init__(self, step: Step, input_buffers: BufferTable, *, whole: bool) -> None:
        self.step, self.whole = step, whole
        self.name = f"{name_of(step.model)}, {'TrainingStep' if whole else 'Backward'}"
        self.hyperparameters = Hyperparameters(step.optimizer)
        context = ModelContext(step.options, GraphPools(), input_buffers)
        self._context = replace(context, make_section=partial(section, context, self.name))
        self._admission = Admission[list["Entry | Refusal"]](step.options.max_signatures)
        self._lock, self.paranoid = threading.RLock(), paranoid()
        self.replayed: tuple[Key, int] | None = None

    def __call__(self, batch: Batch) -> Done | Refusal:
        """Run the step, or its forward and backward.

        Returns:
            The step, or why no graph computes it.

        Raises:
            TargetError: the batch cannot be divided into equal parts, or the average or the optimizer belongs to
                another model.
            TraceError: no graph computes it, and ``strict=True``.
        """
        call = self.call(batch)
        if isinstance(call, Refusal):
            return call
        if self.replayed is not None:
            self._admission.hit(*self.replayed)
            self.replayed = None
        entry = self._entry(call) or self._new_entry(call)
        if isinstance(entry, Refusal):
            return self._refusal(entry.reason, full=entry.full)
        tensors = self.tensors(call, entry.loss.held_now(batch))
        try:
            if self.paranoid:
                result, gradients = self._compared(entry, call, tensors)
            else:
                result, gradients = entry.run(tensors, batch)
        except NoSchedule as reason:
            return self._refusal(str(reason))
        return Done(result, gradients, entry, call, tensors)

    def forget_refusals(self) -> None:
        """Capture refused steps again when they come again: they may have failed because of an error of the caller."""
        for key, entries in [*self._admission.entries.items()]:
            compiled: list[Entry | Refusal] = [entry for entry in entries if isinstance(entry, Entry)]
            if compiled:
                self._admission.entries[key] = compiled
            else:
                del self._admission.entries[key]

    @property
    def reports(self) -> tuple[Report, ...]:
        """The reports of all entries, the most recently used first."""
        entries = chain.from_iterable(map(reversed, reversed(self._admission.entries.values())))
        return tuple(entry.scheduled.report for entry in entries if isinstance(entry, Entry))

    def tensors(self, call: Call, held: Sequence[Tensor]) -> Tensors:
        """All inputs of a step.

        Args:
            call: the step.
            held: the tensors that the captured loss reads besides the batch.
        """
        numbers = self.numbers(call.parameters)
        return Tensors(held, call.parameters, call.state.tensors, call.averages, call.tensors, numbers)

    def numbers(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """The numbers that may change in each step, such as learning rates, in one tensor."""
        if not self.whole:
            return self.step.numbers()
        return [self.hyperparameters.numbers(parameters[0].device)]

    def _refusal(self, reason: str, *, full: bool = False) -> Refusal:
        if self.step.options.strict:
            raise TraceError(reason)
        return Refusal(reason, full)

    def call(self, batch: Batch) -> Call | Refusal:
        """The call of a step with this batch, or why no graph would compute it.

        Raises:
            TargetError: as calling raises it.
            TraceError: no graph would compute it, and ``strict=True``.
        """
        step, parameters = self.step, parameters_of(self.step.optimizer)
        step.check_average()
        step.loss.check(len(batch))
        try:
            tensors, structure = flatten(batch)
        except TraceError as error:
            return self._refusal(str(error))
        reason = unusual_call() or unusual_tensor(tensors) or circumstances() or self._obstacle(parameters, tensors)
        if reason:
            return self._refusal(reason)
        groups: Structure | None = None
        state, averages = State((), []), list[Tensor]()
        if self.whole:
            groups, reason = self.hyperparameters.refresh()
            state_or_reason = state_of(step.optimizer, parameters)
            if reason or isinstance(state_or_reason, str):
                return self._refusal(reason or str(state_or_reason))
            state = state_or_reason
            if step.average is not None:
                if names := differing_buffers(step.average, step.model):
                    reason = f"the average has no buffer {names[0]} as the model has it, and a graph makes none"
                    return self._refusal(reason)
                averages = [*chain.from_iterable(chain(*pairs_of(step.average, step.model)))]
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

    def _obstacle(self, parameters: Sequence[Tensor], tensors: Sequence[Tensor]) -> str:
        if any(map(_REQUIRES_GRADIENTS, tensors)):
            return "a tensor of the batch requires gradients, and a graph would compute none"
        if have_hooks(parameters):
            return "a parameter has hooks on its gradient, which a graph would not call"
        if not any(map(_REQUIRES_GRADIENTS, parameters)):
            return "the optimizer has no parameters that require gradients"
        return obstacle(self.step.optimizer) if self.whole else ""

    def _entry(self, call: Call) -> Entry | Refusal | None:
        """The entry or the refusal with this key whose guards hold."""
        for entry in self._admission.entries.get(call.key, ()):
            if entry.matches(call):
                self._admission.hit(call.key)
                return entry
        return None

    def _new_entry(self, call: Call) -> Entry | Refusal:
        with self._lock, preparing:
            if entry := self._entry(call):  # another thread has compiled it
                return entry
            if reason := self._full(call):
                self._admission.miss(call.key)
                return Refusal(reason, full=True)
            try:
                new: Entry | Refusal = Entry(self, call, self._context)
            except (OptionError, TargetError):
                raise
            except Exception as error:
                if self.step.options.strict:
                    raise
                expected = isinstance(error, AutostreamError)
                new = Refusal(str(error) if expected else f"it cannot be scheduled: {first_line(error)}")
            self._admission.add(call.key, [*self._admission.entries.get(call.key, []), new])
            return new

    def _full(self, call: Call) -> str:
        """Why no graph may be captured now, and how the step differs from earlier ones; ``""`` if one may be."""
        count = sum(map(len, self._admission.entries.values()))
        reason, most = self._admission.refusal(call.key), self.step.options.max_signatures
        evicts = not reason and len(self._admission.entries) >= most
        if count >= most and not evicts:
            reason = "it has as many schedules as max_signatures allows"
        if not reason:
            return ""
        if not count:
            return reason
        latest = next(reversed(self._admission.entries))
        entries = self._admission.entries.get(call.key)
        if entries is None:
            return f"{reason}, and meets another: {call.key.difference(cast(Key, latest))} changed"
        return f"{reason}, and meets another, since {entries[-1].failed(call.batch)}"

    def _compared(self, entry: Entry, call: Call, tensors: Tensors) -> Any:
        """The result and gradients of a run that was compared with the eager step."""
        eager = _EagerStep(self, call)
        batch = call.batch
        if self.whole:
            return compared(eager, lambda: entry.run(tensors, batch)[0], call.tensors, batch, {}), None
        return compared(eager, lambda: entry.run(tensors, batch), call.tensors, batch, {})


def circumstances() -> str:
    """The global hook or mode that a graph of a backward would ignore, in words, or ``""``."""
    if hooks_are_set():
        return "hooks of saved tensors are set, and a graph saves none"
    if nn_module._global_backward_hooks or nn_module._global_backward_pre_hooks:
        return "a submodule has backward hooks, which a graph would not call"
    if nn_module._global_forward_hooks or nn_module._global_forward_pre_hooks:
        return "hooks of all modules are registered, which a graph would not call"
    return anomaly_detection()


def _kind(tensor: Tensor) -> Hashable:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


_REQUIRES_GRADIENTS = attrgetter("requires_grad")


class _EagerStep(nn.Module):
    """The eager step as a module whose parameters and buffers are all tensors that it may write."""

    def __init__(self, graphs: Graphs, call: Call) -> None:
        super().__init__()
        self.step_modules, self._graphs = graphs.step.modules, graphs
        for (at, name), value in zip(call.state.names, call.state.tensors, strict=True):
            self.register_buffer(f"{name}_{at}", value)

    def _get_name(self) -> str:
        return self._graphs.name

    def forward(self, *batch: Any) -> Any:
        step = self._graphs.step
        result, gradients = step.differentiate(batch)
        return step.complete(result, gradients) if self._graphs.whole else (result, gradients)


def trace(graphs: Graphs, call: Call) -> tuple[CapturedLoss, Traced, Tensors]:
    """Capture the loss of a step, and trace the step.

    Returns:
        The captured loss, the traced step, and its inputs.

    Raises:
        TargetError: the optimizer has parameters of neither the model nor the loss.
        TraceError: no graph computes the step.
    """
    step = graphs.step
    if reason := _uncapturable(step.modules):
        raise TraceError(reason)
    loss = CapturedLoss(step.loss, call.batch, step.options.microbatches)
    if graphs.whole and step.average is not None and loss.captured.effects:
        raise TraceError("loss_fn changes Python objects, which the average may have to follow")
    held, trained = loss.held, set(map(id, call.parameters))
    if have_hooks([tensor for tensor in held if id(tensor) not in trained and tensor.requires_grad]):
        raise TraceError(
            "a parameter that is not the optimizer's has hooks on its gradient, which a graph would not call"
        )
    tensors = graphs.tensors(call, held)
    traceable = Traceable(
        loss.captured,
        loss.takes,
        divided(call.tensors),
        step.options.microbatches,
        [*map(bool, call.key.trained)],
        step.scaler is not None,
        _update_of(step, call) if graphs.whole else None,
    )
    traced = trace_step(traceable, tensors, step.modules)
    if not all(traced.reached):
        step.check_parameters()
    return loss, traced, tensors


def _uncapturable(modules: nn.Module) -> str:
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
    assert call.key.groups, "whole steps have groups"
    averaged = len([*step.average.parameters()]) if step.average is not None else 0
    sizes = [len(group["params"]) for group in step.optimizer.param_groups]
    groups, options = unflatten(call.key.groups, ()), step.options
    return Update(step.optimizer, groups, sizes, call.state.names, options.max_norm, averaged, options.decay)


class Entry:
    """A compiled step.

    Args:
        graphs: the cache that it belongs to.
        call: the call to compile it for.
        context: of the graphs.

    Attributes:
        loss: the captured loss, with its guards.
        traced: the traced step.
        scheduled: runs the step's program.

    Raises:
        TargetError: the optimizer has parameters of neither the model nor the loss.
        TraceError: no graph computes the step.
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

    def matches(self, call: Call) -> bool:
        """Whether the guards of the loss hold, and its tensors have the same layouts."""
        batch = call.batch
        return self.loss.stands_for(batch) and self._kinds == list(map(_kind, self.loss.held_now(batch)))

    def failed(self, batch: Batch) -> str:
        """The guard that fails for a batch, in words."""
        return self.loss.failed(batch)

    def run(self, tensors: Tensors, batch: Batch) -> tuple[Any, list[Tensor | None] | None]:
        """The result, and the gradients of all of the optimizer's parameters unless the graph updates them.

        Raises:
            NoSchedule: no CUDA graph reads tensors at these addresses, and none can be captured.
        """
        return self.unpack(self.scheduled(self.traced.arguments(tensors)), batch)

    def unpack(self, outputs: Sequence[Tensor | None], batch: Batch) -> tuple[Any, list[Tensor | None] | None]:
        """The result and the gradients among the outputs of the program."""
        count = self.traced.returned
        result = self.loss.result(outputs[:count], batch)
        if self._whole:
            return result, None
        gradients, reached = iter(outputs[count:]), iter(self.traced.reached)
        return result, [next(gradients) if trained and next(reached) else None for trained in self._trained]
