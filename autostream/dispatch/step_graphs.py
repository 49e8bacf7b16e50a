"""Compiled training steps: a cache of scheduled graphs, looked up by key and guards.

    call, optimizers ──▶ like a recent call? ──▶ StepReplay (fast path)
                          │ no
                          └─▶ key ──▶ an entry whose guards hold ──▶ ScheduledProgram ──▶ Dynamo's bytecode: result
                                        │ none
                                        └─▶ capture ──▶ trace ──▶ ScheduledProgram

Where capturing or tracing fails, there is a ``Refusal`` instead, and the caller falls back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from itertools import chain, count
from operator import attrgetter
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdRef

from autostream.dispatch.admission import Admission
from autostream.dispatch.compiled_graph import section
from autostream.dispatch.paranoid import compared
from autostream.dispatch.scheduled_program import Label, ModelContext, NoSchedule, ScheduledProgram
from autostream.dispatch.step_replay import StepReplay, circumstances
from autostream.errors import (
    AutostreamError,
    FastPathError,
    GroupError,
    OptionError,
    TargetError,
    TraceError,
    first_line,
)
from autostream.frontend.batches import detached
from autostream.frontend.capture import Capture
from autostream.frontend.data_parallel import DataParallel
from autostream.frontend.eager_only import unusual_call, unusual_model, unusual_tensor
from autostream.frontend.inputs import aliases_of, described
from autostream.frontend.optimizers import FirstUpdateError, Hyperparameters, groups_of, obstacle
from autostream.frontend.parameters import have_hooks, have_no_gradients, parameters_of, state_of
from autostream.frontend.reasons import failed_guard
from autostream.frontend.settings import numerics
from autostream.frontend.step_capture import Body, capture_step
from autostream.frontend.steps import HOOKED, Traced, Update, trace_step
from autostream.frontend.tree import Structure, flatten
from autostream.ir import DeviceProfile, Program, Role
from autostream.options import Options, paranoid
from autostream.pipeline import check_one_device, check_plannable, device_of, plan_program
from autostream.reporting.report import Report
from autostream.runtime.cuda_graph import GraphPools
from autostream.runtime.input_buffers import BufferTable
from autostream.tuning.agreement import agree
from autostream.utils.locks import preparing
from autostream.utils.stopwatch import Stopwatch

_MOST_REPLAYS = 4
"""How many kinds of calls have a fast path."""


class Key(NamedTuple):
    """The signature of a step. Guards are checked only for entries with the same key."""

    structure: Structure
    kinds: Hashable
    aliases: Hashable
    numerics: Hashable
    parameters: Hashable
    trained: bytes
    groups: tuple[Structure, ...]
    state: Hashable

    def difference(self, other: Key) -> str:
        """The difference from another key, in words; ``""`` if there is none."""
        words = [what for name, what in _WORDS.items() if getattr(self, name) != getattr(other, name)]
        groups, others = (chain.from_iterable(each.children or () for each in key.groups) for key in (self, other))
        words += dict.fromkeys(
            name for group, later in zip(groups, others, strict=False) for name in _changed(group, later)
        )
        return ", ".join(words)


_WORDS = {
    "structure": "the batch's containers or numbers",
    "kinds": "shapes, strides, dtypes or devices",
    "aliases": "which tensors share memory",
    "numerics": "autocast, precisions or other numerics",
    "parameters": "the optimizer's parameters",
    "trained": "what requires gradients",
    "state": "the optimizer's state",
}


def _changed(group: Structure, other: Structure) -> Iterator[str]:
    """The names of hyperparameters that differ in two groups."""
    other_values = dict(zip(cast(tuple[Any, ...], other.context), other.children or (), strict=True))
    values = zip(cast(tuple[Any, ...], group.context), group.children or (), strict=True)
    return (name for name, value in values if other_values.get(name) != value)


def _changed_number(function: Callable[..., Any], call: Structure, other: Structure) -> str:
    """The first argument that is or holds another number in another call of a function; ``""`` if none does."""
    given, others = _arguments(function, call), _arguments(function, other)
    return next((name for name, each in given.items() if name in others and _differs(each, others[name])), "")


def _arguments(function: Callable[..., Any], call: Structure) -> dict[str, Structure]:
    """The structures of arguments, by the names of the function's parameters, or by their places."""
    args, kwargs = cast(tuple[Structure, Structure], call.children)
    try:
        parameters = [*signature(function).parameters.values()]
    except (TypeError, ValueError):  # it is none of Python's
        parameters = []
    names = [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    places = (f"argument {at}" for at in count(len(names) + 1))
    return {
        **dict(zip(chain(names, places), args.children or (), strict=False)),
        **dict(zip(kwargs.context, kwargs.children or (), strict=True)),
    }


def _differs(one: Structure, other: Structure) -> bool:
    """Whether there is another number in one structure than in the other."""
    if one.kind is not other.kind or one.children is None or other.children is None:
        return one.kind in (int, float) and other.kind in (int, float) and one != other
    return any(map(_differs, one.children, other.children))


@dataclass(frozen=True)
class Call:
    """A call of a training step.

    Attributes:
        args: its positional arguments.
        kwargs: its keyword arguments.
        tensors: in these.
        parameters: of each optimizer.
        updates: of each optimizer that the step updates.
        key: its signature.
        begins_without: whether the parameters have no gradients that the step could read.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: list[Tensor]
    parameters: list[list[Tensor]]
    updates: list[Update]
    key: Key
    begins_without: bool

    @property
    def every(self) -> list[Tensor]:
        """The parameters of all optimizers."""
        return [*chain.from_iterable(self.parameters)]


@dataclass(frozen=True)
class Done:
    """A step that a graph has run.

    Attributes:
        result: what it returned.
    """

    result: Any


@dataclass(frozen=True)
class Refusal:
    """Why a step is in no graph. The step has not been run.

    Attributes:
        reason: for reports.
        full: whether there are too many graphs, so that none of a part of the step may be captured either.
        first: whether an optimizer makes its state in this call, as it does in an eager first step. The next may be
            captured, so this is nothing to report.
        begins_without: of the refused call.
    """

    reason: str
    full: bool = False
    first: bool = False
    begins_without: bool = True

    def inputs(self, call: Call) -> Sequence[Tensor] | None:
        """``()`` if capturing the call would fail again, ``None`` if it may not."""
        return () if call.begins_without == self.begins_without else None

    def failed(self, call: Call) -> str:
        """``""``: it has no guards."""
        return ""


class StepGraphs:
    """The compiled graphs of a training step.

    Args:
        body: the step.
        optimizers: whose parameters the step differentiates.
        options: how to schedule it.
        name: in reports.
        modules: makes one module with all modules of the step, for the names of tensors in reports.
        eager: runs the step eagerly.
        input_buffers: buffers that captured graphs may read in place.
        data_parallel: the group over which the step's gradients are averaged, if there is one.
        averages: whether its graph has to average them, which the body does not do.
        updates: whether the step calls the optimizers' ``step``.
    """

    def __init__(
        self,
        body: Body,
        optimizers: Sequence[Optimizer],
        options: Options,
        name: str,
        modules: Callable[[], nn.Module],
        eager: Callable[..., Any],
        input_buffers: BufferTable,
        data_parallel: DataParallel | None = None,
        *,
        averages: bool = False,
        updates: bool = True,
    ) -> None:
        self._data_parallel, self.averaging = data_parallel, data_parallel if averages else None
        self.body, self.optimizers, self.options, self.name = body, optimizers, options, name
        self.modules, self.eager = modules, eager
        self.updated = optimizers if updates else ()
        self.hyperparameters = [Hyperparameters(optimizer) for optimizer in self.updated]
        context = ModelContext(options, GraphPools(), input_buffers)
        self.context = replace(context, make_section=partial(section, context, name))
        self._admission = Admission[list["Entry | Refusal"]](options.max_signatures)
        self._lock, self._paranoid = threading.RLock(), paranoid()
        self._replays: list[StepReplay] = []
        self._first: Key | None = None
        """Of the latest call in which an optimizer makes its state, which is part of the key."""

    def replayed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Done | None:
        """The step, if it is like a recent one, by its fast path."""
        for replay in self._replays:
            if (tensors := replay.fits(args, kwargs)) is not None:
                return Done(replay(tensors, args, kwargs))
        return None

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Done | Refusal:
        """Run the step, or say why no graph computes it.

        Raises:
            TraceError: no graph computes it, and ``strict=True``.
        """
        if (done := self.replayed(args, kwargs)) is not None:
            return done
        for replay in self._replays:
            self._admission.hit(replay.key, replay.count())
        self._replays = [replay for replay in self._replays if replay.is_current()]  # others hold memory for nothing
        with preparing:  # while another step is captured, gradients and methods of its optimizers are not their own
            call = self.call(args, kwargs)
        if isinstance(call, Refusal):
            self._replays = []  # what they compare hyperparameters with may have been read anew
            return self.refused(call)
        self._replays = [replay for replay in self._replays if replay.key.groups == call.key.groups]
        self.body.parameters = call.parameters
        entry, inputs = self._entry(call) or self._new_entry(call)
        if isinstance(entry, Refusal):
            return self.refused(entry)
        if have_hooks([tensor for tensor in inputs if tensor.requires_grad]):
            return self.refused(Refusal(HOOKED))
        try:
            if self._paranoid:
                return Done(self._compared(entry, call, inputs))
            result = entry.run(call, inputs)
        except NoSchedule as reason:
            return self.refused(Refusal(str(reason)))
        self._add_replay(entry, call, inputs)
        return Done(result)

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

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | Refusal:
        """The call of a step with these arguments, or why no graph would compute it."""
        try:
            tensors, structure = flatten((args, kwargs))
        except TraceError as error:
            return Refusal(str(error))
        parameters = [parameters_of(optimizer) for optimizer in self.optimizers]
        every = [*chain.from_iterable(parameters)]
        if reason := self._obstacle(every, tensors):
            return Refusal(reason)
        updates, groups = [], []
        for optimizer, known in zip(self.updated, self.hyperparameters, strict=True):
            own = parameters_of(optimizer)
            group, reason = known.refresh()
            state = state_of(optimizer, own)
            if group is None or isinstance(state, str):
                return Refusal(reason or str(state))
            device = own[0].device if own else torch.device("cpu")
            groups.append(group)
            updates.append(Update(optimizer, groups_of(optimizer, known.inputs), state, known.numbers(device)))
        states = [*chain.from_iterable(each.state.tensors for each in updates)]
        sizes = tuple(len(group["params"]) for optimizer in self.optimizers for group in optimizer.param_groups)
        key = Key(
            structure,
            tuple(map(kind_of, tensors)),
            aliases_of([*every, *states, *tensors]),
            numerics(),
            (sizes, *map(WeakIdRef, every)),
            bytes(map(_REQUIRES_GRADIENTS, every)),
            tuple(groups),
            (*(each.state.names for each in updates), *map(kind_of, states)),
        )
        begins_without = not self.body.takes_gradients or have_no_gradients(every)
        return Call(args, kwargs, tensors, parameters, updates, key, begins_without)

    def _obstacle(self, parameters: Sequence[Tensor], tensors: Sequence[Tensor]) -> str:
        if reason := unusual_call() or unusual_tensor(tensors) or circumstances():
            return reason
        if any(map(_REQUIRES_GRADIENTS, tensors)):
            return "a tensor of the batch requires gradients, and a graph would compute none"
        if have_hooks(parameters):
            return HOOKED
        if not any(map(_REQUIRES_GRADIENTS, parameters)):
            return "the optimizer has no parameters that require gradients"
        if len(set(map(id, parameters))) < sum(len(set(map(id, parameters_of(each)))) for each in self.optimizers):
            return "a parameter belongs to two optimizers"
        return next(filter(None, map(obstacle, self.updated)), "")

    def refused(self, refusal: Refusal) -> Refusal:
        """The refusal.

        Raises:
            TraceError: ``strict=True``.
        """
        if self.options.strict and not refusal.first:
            raise TraceError(refusal.reason)
        return refusal

    def _entry(self, call: Call) -> tuple[Entry | Refusal, Sequence[Tensor]] | None:
        """The entry or the refusal with this key whose guards hold, and the inputs of its graph."""
        for entry in self._admission.entries.get(call.key, ()):
            if (inputs := entry.inputs(call)) is not None:
                self._admission.hit(call.key)
                return entry, inputs
        return None

    def _new_entry(self, call: Call) -> tuple[Entry | Refusal, Sequence[Tensor]]:
        with self._lock, preparing:
            if known := self._entry(call):  # another thread has compiled it
                return known
            if call.key == self._first:  # the state is still to be made: a scaler may skip updates
                return Refusal("an optimizer makes its state", first=True), ()
            if reason := self._full(call):
                self._admission.miss(call.key)
                return Refusal(reason, full=True), ()
            try:
                new: Entry | Refusal = Entry(self, call)
                inputs = new.inputs(call)
                assert inputs is not None, "the guards hold for the call that was captured"
            except (OptionError, TargetError, GroupError):
                raise
            except FirstUpdateError as error:
                self._first = call.key
                return Refusal(str(error), first=True), ()
            except Exception as error:
                if self.options.strict:
                    raise
                expected = isinstance(error, AutostreamError | FastPathError)
                reason = str(error) if expected else f"it cannot be scheduled: {first_line(error)}"
                if self._data_parallel is not None:  # the others may not wait for a graph of this process
                    agree(self._data_parallel.group, ["the step as it is written"])
                new, inputs = Refusal(reason, begins_without=call.begins_without), ()
            self._admission.add(call.key, [*self._admission.entries.get(call.key, []), new])
            return new, inputs

    def _full(self, call: Call) -> str:
        """Why no graph may be captured now, and how the step differs from earlier ones; ``""`` if one may be."""
        count = sum(map(len, self._admission.entries.values()))
        reason, most = self._admission.refusal(call.key), self.options.max_signatures
        evicts = not reason and len(self._admission.entries) >= most
        if count >= most and not evicts:
            reason = "it has as many schedules as max_signatures allows"
        if not reason:
            return ""
        if not count:
            return reason
        entries = self._admission.entries.get(call.key)
        if entries is None:
            latest = cast(Key, next(reversed(self._admission.entries)))
            if name := _changed_number(self.body.function, call.key.structure, latest.structure):
                return (
                    f"{reason}, and meets another, since a number in {name} changes: pass it as a tensor, or as a "
                    "flag what Python decides by it"
                )
            return f"{reason}, and meets another: {call.key.difference(latest)} changed"
        failed = failed_guard(entries[-1].failed(call))
        return f"{reason}, and meets another{failed and ', since '}{failed}"

    def _compared(self, entry: Entry, call: Call, inputs: Sequence[Tensor]) -> Any:
        """The result of a run that was compared with the eager step."""
        eager = _EagerStep(self, call, inputs)
        return compared(eager, lambda: entry.run(call, inputs), call.tensors, call.args, call.kwargs)

    def _add_replay(self, entry: Entry, call: Call, inputs: Sequence[Tensor]) -> None:
        try:
            replay = StepReplay(self, entry, call, inputs)
        except NoSchedule:
            return
        self._replays = [replay, *(each for each in self._replays if each.entry is not entry)][:_MOST_REPLAYS]


def kind_of(tensor: Tensor) -> Hashable:
    """What a graph is compiled for."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


_REQUIRES_GRADIENTS = attrgetter("requires_grad")


class _EagerStep(nn.Module):
    """The eager step as a module whose parameters and buffers are all tensors that it may write."""

    def __init__(self, graphs: StepGraphs, call: Call, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.step_modules, self._graphs = graphs.modules(), graphs
        known = set(map(id, chain(self.parameters(), self.buffers(), call.tensors)))
        states = chain.from_iterable(each.state.tensors for each in call.updates)
        for at, tensor in enumerate(chain(states, inputs)):
            if id(tensor) not in known:
                self.register_buffer(f"tensor_{at}", tensor)

    def _get_name(self) -> str:
        return self._graphs.name

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._graphs.eager(*args, **kwargs)


def trace(graphs: StepGraphs, call: Call, device: str | None = None) -> tuple[Capture, Traced]:
    """Capture and trace a step, for the device of its tensors by default.

    Raises:
        TraceError: no graph computes it.
    """
    modules = graphs.modules()
    if reason := _uncapturable(modules):
        raise TraceError(reason)
    graphs.body.parameters, graphs.body.owner = call.parameters, modules
    captured = capture_step(graphs.body, graphs.updated, call.args, call.kwargs)
    return captured, trace_step(captured, call.updates, modules, call.every, graphs.averaging, device=device)


def plan_step(
    graphs: StepGraphs, args: tuple[Any, ...], options: Options, profile: DeviceProfile | None
) -> tuple[Program, Report]:
    """A dry run of a step whose optimizers have made their state; nothing is computed.

    Args:
        graphs: of the step.
        args: its arguments.
        options: how to schedule it.
        profile: a device to plan for, which need not be available; the step is on the CPU then.

    Raises:
        OptionError: see :func:`autostream.pipeline.plan`.
        TraceError: no graph computes the step.
    """
    check_plannable(options, profile)
    device = None if profile is None else device_of(profile)
    stopwatch = Stopwatch()
    with stopwatch("trace"):
        call = graphs.call(args, {})
        if isinstance(call, Refusal):
            raise TraceError(f"{graphs.name} is no one graph: {call.reason}")
        captured, traced = trace(graphs, call, device)
        check_one_device(traced.program)
    arguments, label = traced.arguments(captured.tensors, call.updates), described(call.tensors, device)
    return traced.program, plan_program(traced.program, arguments, graphs.name, label, options, profile, stopwatch)


def _uncapturable(modules: nn.Module) -> str:
    parts = list(modules.modules())
    if any(isinstance(part, nn.parallel.DistributedDataParallel) for part in parts):
        return (
            "DistributedDataParallel averages gradients by hooks, which a graph would not call: give the model itself, "
            "and data_parallel=process_group"
        )
    return unusual_model(modules)


class Entry:
    """A compiled step.

    Args:
        graphs: the cache that it belongs to.
        call: the call to compile it for.

    Attributes:
        captured: the captured step, without its tensors.
        traced: the traced step.
        scheduled: runs the step's program.

    Raises:
        TraceError: no graph computes the step.
    """

    def __init__(self, graphs: StepGraphs, call: Call) -> None:
        stopwatch = Stopwatch()
        with stopwatch("trace"):
            captured, self.traced = trace(graphs, call)
        inputs, self._body = captured.tensors, graphs.body
        stays = [placeholder.role is not Role.INPUT for placeholder in self.traced.program.placeholders]
        arguments, label = self.traced.arguments(inputs, call.updates), Label(graphs.name, described(call.tensors))
        self.scheduled = ScheduledProgram(self.traced.program, arguments, stays, label, graphs.context, stopwatch)
        self._alike = _layouts_of(inputs)
        self.captured = replace(captured, tensors=(), changed=())
        self._outputs: Sequence[Any] = ()
        self._restored = captured.restored(lambda *_: self._outputs)

    def inputs(self, call: Call) -> Sequence[Tensor] | None:
        """The inputs of the captured graph in a call, or ``None`` if the graph does not compute it."""
        args, kwargs = call.args, call.kwargs
        with torch.enable_grad():
            if not self.captured.guards(self._body, args, kwargs):
                return None
            inputs = self.captured.graph_inputs(self._body, args, kwargs)
        return inputs if _layouts_of(inputs) == self._alike else None

    def failed(self, call: Call) -> str:
        """The guard that fails for a call, as Dynamo writes it."""
        with torch.enable_grad():
            return self.captured.guards.failed(self._body, call.args, call.kwargs).strip()

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
        self._outputs = outputs
        try:
            with torch.enable_grad():
                return self._restored(self._body, args, kwargs)
        finally:
            self._outputs = ()


def _layouts_of(inputs: Sequence[Tensor]) -> Hashable:
    return [*map(kind_of, inputs)], aliases_of(inputs), [*map(_REQUIRES_GRADIENTS, inputs)]
