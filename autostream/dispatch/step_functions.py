"""Step functions: a training step as its user writes it, compiled for each kind of call.

    call ──▶ do optimizers make state in it? ──yes──▶ eager
              │ no
              └─▶ key, a known one or new ──▶ an entry whose guards hold ──▶ Dynamo's bytecode around the program
                                                │ none
                                                └─▶ capture ──▶ trace ──▶ ScheduledProgram

Where a call cannot be captured or traced, it runs eagerly, and reports have the reason.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial, update_wrapper
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdRef

from autostream.dispatch.admission import Admission
from autostream.dispatch.compiled_graph import section
from autostream.dispatch.scheduled_program import Label, ModelContext, NoSchedule, ScheduledProgram
from autostream.dispatch.step_graphs import circumstances
from autostream.errors import AutostreamError, FastPathError, OptionError, TargetError, TraceError, first_line
from autostream.frontend.eager_only import unusual_call, unusual_tensor
from autostream.frontend.inputs import aliases_of, described
from autostream.frontend.losses import modules_in
from autostream.frontend.optimizers import Hyperparameters, groups_of, obstacle
from autostream.frontend.parameters import (
    have_hooks,
    have_no_gradients,
    parameters_of,
    state_of,
    stateless,
)
from autostream.frontend.settings import numerics
from autostream.frontend.step_functions import TracedFunction, Update, capture_step, trace_function
from autostream.frontend.tree import flatten, map_tensors, tensors_like
from autostream.ir import Decision, Role
from autostream.options import Options, disabled
from autostream.pipeline import versions
from autostream.reporting.report import Report
from autostream.runtime.cuda_graph import GraphPools
from autostream.runtime.input_buffers import BufferTable
from autostream.runtime.layouts import Layouts, metadata_check
from autostream.runtime.writes import SameEntries
from autostream.utils.locks import preparing
from autostream.utils.stopwatch import Stopwatch
from autostream.utils.storages import storage_of

log = logging.getLogger(__name__)

_MOST_REASONS = 100

_MOST_KNOWN = 4
"""How many signatures are known to the fast check."""


class StepFunction:
    """A step function that runs as one scheduled graph where it can, and as it is written elsewhere.

    Args:
        function: the step.
        optimizers: those whose ``step`` it calls.
        options: how to schedule it.

    Attributes:
        disabled: whether every step runs eagerly: ``AUTOSTREAM_DISABLE`` was set when this was made.
    """

    def __init__(self, function: Callable[..., Any], optimizers: Sequence[Optimizer], options: Options) -> None:
        self._function, self._optimizers, self._options = function, tuple(optimizers), options
        update_wrapper(self, function)
        self._name = getattr(function, "__qualname__", type(function).__name__)
        self._hyperparameters = [Hyperparameters(optimizer) for optimizer in optimizers]
        self._stateless: list[frozenset[int]] = [frozenset() for _ in optimizers]
        context = ModelContext(options, GraphPools(), BufferTable())
        self._context = replace(context, make_section=partial(section, context, self._name))
        self._admission = Admission[list["_Entry | _Refusal"]](options.max_signatures)
        self._lock, self.disabled = threading.RLock(), disabled()
        self._eager: dict[str, Decision] = {}
        self._known: list[_Known] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a step; returns what the function returns, detached."""
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return self(*args, **kwargs)
        result = self._run(args, kwargs)
        for optimizer in self._optimizers:
            optimizer._opt_called = True  # type: ignore[attr-defined]  # learning-rate schedulers would warn
        return result

    def __get__(self, instance: object, owner: type | None = None) -> StepFunction:
        """Itself, from a class.

        Raises:
            TargetError: it decorates a method, whose object a graph cannot take as an argument.
        """
        if instance is not None:
            name = self.__name__  # type: ignore[attr-defined]
            raise TargetError(
                f"step decorates functions and bound methods: write self.{name} = autostream.step(...)(self.{name})"
            )
        return self

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.disabled:
            return self._run_eagerly(args, kwargs)
        if not all(stateless(o) <= known for o, known in zip(self._optimizers, self._stateless, strict=True)):
            result = self._run_eagerly(args, kwargs)
            self._stateless = [stateless(optimizer) for optimizer in self._optimizers]
            return result
        call = self._like_known(args, kwargs) or self._call(args, kwargs)
        entry = call if isinstance(call, _Refusal) else self._entry(call) or self._new_entry(call)
        if isinstance(entry, _Refusal):
            return self._fall_back(entry.reason, args, kwargs)
        assert isinstance(call, _Call)
        try:
            result = entry.run(call)
        except NoSchedule as reason:
            return self._fall_back(str(reason), args, kwargs)
        if not any(known.call.key is call.key for known in self._known):
            self._known = [_Known(call, self._optimizers), *self._known[: _MOST_KNOWN - 1]]
        return result

    def _run_eagerly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with torch.enable_grad():
            return map_tensors(Tensor.detach, self._function(*args, **kwargs))

    def _fall_back(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._options.strict:
            raise TraceError(reason)
        if reason not in self._eager and len(self._eager) < _MOST_REASONS:
            log.warning("the step %s runs as it is written: %s", self._name, reason)
            self._eager[reason] = Decision("", "plain", reason)
        return self._run_eagerly(args, kwargs)

    def _like_known(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call | None:
        """The call, if it has the signature of a recent one, which takes a fraction of the time to see."""
        for known in self._known:
            if (tensors := known.tensors_of(args, kwargs)) is None:
                continue
            if not all(hyperparameters.same() for hyperparameters in self._hyperparameters):
                return None
            call, begins_without = known.call, have_no_gradients(known.every)
            updates = [
                replace(each, numbers=hyperparameters.numbers(each.numbers.device))
                for each, hyperparameters in zip(call.updates, self._hyperparameters, strict=True)
            ]
            return _Call(call.function, call.parameters, args, kwargs, tensors, updates, call.key, begins_without)
        return None

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call | _Refusal:
        """The call, or why no graph would compute it."""
        try:
            tensors, structure = flatten((args, kwargs))
        except TraceError as error:
            return _Refusal(str(error))
        parameters = [parameters_of(optimizer) for optimizer in self._optimizers]
        every = [*chain.from_iterable(parameters)]
        reason = unusual_call() or unusual_tensor(tensors) or circumstances()
        if any(tensor.requires_grad for tensor in tensors):
            reason = reason or "an argument requires gradients, and a graph would compute none"
        if have_hooks(every):
            reason = reason or "a parameter has hooks on its gradient, which a graph would not call"
        if len(set(map(id, every))) < len(every):
            reason = reason or "a parameter belongs to two optimizers"
        reason = reason or next(filter(None, map(obstacle, self._optimizers)), "")
        if reason:
            return _Refusal(reason)
        updates, groups = [], []
        for optimizer, hyperparameters, own in zip(self._optimizers, self._hyperparameters, parameters, strict=True):
            structure_or_none, reason = hyperparameters.refresh()
            state = state_of(optimizer, own)
            if reason or isinstance(state, str):
                return _Refusal(reason or str(state))
            groups.append(structure_or_none)
            device = own[0].device if own else torch.device("cpu")
            inputs = groups_of(optimizer, hyperparameters.inputs)
            updates.append(Update(optimizer, inputs, state, hyperparameters.numbers(device)))
        key = (
            structure,
            tuple(map(_kind, tensors)),
            aliases_of([*every, *chain.from_iterable(each.state.tensors for each in updates), *tensors]),
            numerics(),
            tuple(tuple(len(group["params"]) for group in optimizer.param_groups) for optimizer in self._optimizers),
            tuple(map(WeakIdRef, every)),
            bytes(tensor.requires_grad for tensor in every),
            tuple(groups),
            tuple((each.state.names, *map(_kind, each.state.tensors)) for each in updates),
        )
        return _Call(self._function, parameters, args, kwargs, tensors, updates, key, have_no_gradients(every))

    def _entry(self, call: _Call) -> _Entry | _Refusal | None:
        for entry in self._admission.entries.get(call.key, ()):
            if entry.matches(call):
                self._admission.hit(call.key)
                return entry
        return None

    def _new_entry(self, call: _Call) -> _Entry | _Refusal:
        with self._lock, preparing:
            if entry := self._entry(call):  # another thread has compiled it
                return entry
            earlier = self._admission.entries.get(call.key, [])
            reason = self._admission.refusal(call.key)
            if not reason and len(earlier) >= self._options.max_signatures:
                reason = "it has as many schedules as max_signatures allows"
            if reason:
                self._admission.miss(call.key)
                failed = next((entry.failed(call) for entry in reversed(earlier) if isinstance(entry, _Entry)), "")
                return _Refusal(f"{reason}, and meets another{failed and ', since '}{failed}")
            try:
                new: _Entry | _Refusal = _Entry(self._name, call, self._context)
            except (OptionError, TargetError):
                raise
            except Exception as error:
                if self._options.strict:
                    raise
                if isinstance(error, (AutostreamError, FastPathError)):
                    reason = str(error).partition("\n\nWhile")[0]
                else:
                    reason = f"it cannot be scheduled: {first_line(error)}"
                new = _Refusal(reason, begins_without=call.begins_without)
            self._admission.add(call.key, [*earlier, new])
            return new

    @property
    def reports(self) -> tuple[Report, ...]:
        """A report for each kind of call, the most recently used first, then one for calls that run as written."""
        entries = chain.from_iterable(map(reversed, reversed(self._admission.entries.values())))
        reports = [entry.scheduled.report for entry in entries if isinstance(entry, _Entry)]
        if self._eager:
            refusals = tuple(self._eager.values())
            reports.append(Report(self._name, "some steps", "plain", refusals=refusals, versions=versions()))
        return tuple(reports)

    def __repr__(self) -> str:
        """The class with the function."""
        return f"{type(self).__name__}({self._name})"


class _Call:
    """A call of a step function, with its signature."""

    def __init__(
        self,
        function: Callable[..., Any],
        parameters: Sequence[Sequence[Tensor]],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: Sequence[Tensor],
        updates: Sequence[Update],
        key: Hashable,
        begins_without: bool,
    ) -> None:
        self.function, self.parameters, self.args, self.kwargs = function, parameters, args, kwargs
        self.tensors, self.updates, self.key, self.begins_without = tensors, updates, key, begins_without


class _Known:
    """Checks whether a call has the signature of an earlier one: each check is one call for all tensors.

    Args:
        call: the earlier one.
        optimizers: of the step.

    Attributes:
        call: the earlier one.
        every: the parameters of all optimizers.
    """

    def __init__(self, call: _Call, optimizers: Sequence[Optimizer]) -> None:
        self.call, self._optimizers = call, optimizers
        self.every = [*chain.from_iterable(call.parameters)]
        self._structure = flatten((call.args, call.kwargs))[1]
        self._alike = metadata_check(call.tensors)
        self._lists = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
        self._sizes = list(map(len, self._lists))
        self._required = list(map(_REQUIRES_GRADIENTS, self.every))
        self._states = [optimizer.state for optimizer in optimizers]
        self._entries = SameEntries(chain.from_iterable([state, *state.values()] for state in self._states))
        written = [*self.every, *chain.from_iterable(each.state.tensors for each in call.updates)]
        self._unmoved = Layouts(written, whole=True).unchanged
        self._storages = frozenset(map(storage_of, written))
        self._are_disjoint = len(self._storages) == len(written)
        self._numerics = numerics()

    def tensors_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Tensor] | None:
        """The tensors of such a call, or ``None`` for one that may have another signature."""
        tensors = tensors_like(self._structure, (args, kwargs)) if self._are_disjoint else None
        if tensors is None or not self._alike(tensors):
            return None
        storages = set(map(storage_of, tensors))
        lists = [group["params"] for optimizer in self._optimizers for group in optimizer.param_groups]
        as_it_was = (
            len(storages) == len(tensors)
            and self._storages.isdisjoint(storages)
            and not any(map(_REQUIRES_GRADIENTS, tensors))
            and not unusual_call()
            and not circumstances()
            and not any(map(obstacle, self._optimizers))
            and list(map(len, lists)) == self._sizes
            and all(map(is_, chain.from_iterable(lists), self.every))
            and list(map(_REQUIRES_GRADIENTS, self.every)) == self._required
            and not have_hooks(self.every)
            and all(optimizer.state is state for optimizer, state in zip(self._optimizers, self._states, strict=True))
            and self._entries.same()
            and self._unmoved()
            and numerics() == self._numerics
        )
        return tensors if as_it_was else None


_REQUIRES_GRADIENTS = attrgetter("requires_grad")


class _Refusal:
    """Why a call is in no graph."""

    def __init__(self, reason: str, *, begins_without: bool = True) -> None:
        self.reason, self._begins_without = reason, begins_without

    def matches(self, call: _Call) -> bool:
        """Whether capturing the call would fail again: it has gradients to add to, or none, as the refused one."""
        return call.begins_without == self._begins_without


class _Entry:
    """A compiled step function.

    Raises:
        TraceError: no graph computes it.
    """

    def __init__(self, name: str, call: _Call, context: ModelContext) -> None:
        stopwatch = Stopwatch()
        with stopwatch("trace"):
            optimizers = [each.optimizer for each in call.updates]
            captured, self._body = capture_step(call.function, optimizers, call.args, call.kwargs)
            self._traced: TracedFunction = trace_function(captured, call.updates, _owner_of(call.function))
        inputs = captured.tensors
        stays = [placeholder.role is not Role.INPUT for placeholder in self._traced.program.placeholders]
        arguments = self._traced.arguments(inputs, call.updates)
        label = Label(name, described(call.tensors))
        self.scheduled = ScheduledProgram(self._traced.program, arguments, stays, label, context, stopwatch)
        self._kinds, self._aliases = list(map(_kind, inputs)), aliases_of(inputs)
        self._required = list(map(_REQUIRES_GRADIENTS, inputs))
        self._captured = replace(captured, tensors=(), changed=())
        self._updates: Sequence[Update] = ()
        self._restored = self._captured.restored(self._launch)

    def matches(self, call: _Call) -> bool:
        """Whether the guards hold."""
        self._body.parameters = call.parameters
        with torch.enable_grad():
            return self._captured.guards(self._body, call.args, call.kwargs)

    def failed(self, call: _Call) -> str:
        """The guard that fails, as Dynamo writes it."""
        with torch.enable_grad():
            return self._captured.guards.failed(self._body, call.args, call.kwargs).strip()

    def run(self, call: _Call) -> Any:
        """Run a step: Dynamo's bytecode fetches inputs, and builds the result."""
        self._updates = call.updates
        try:
            with torch.set_grad_enabled(True):
                return self._restored(self._body, call.args, call.kwargs)
        finally:
            self._updates = ()

    def _launch(self, *inputs: Tensor) -> Sequence[Any]:
        if list(map(_kind, inputs)) != self._kinds or aliases_of(inputs) != self._aliases:
            raise NoSchedule("a tensor that the step reads has another shape or dtype, or shares other memory now")
        if list(map(_REQUIRES_GRADIENTS, inputs)) != self._required:
            raise NoSchedule("a tensor that the step reads requires gradients now, or does not any more")
        if have_hooks([tensor for tensor, required in zip(inputs, self._required, strict=True) if required]):
            raise NoSchedule("a parameter has hooks on its gradient, which a graph would not call")
        with torch.no_grad():
            return self.scheduled(self._traced.arguments(inputs, self._updates))


def _owner_of(function: Callable[..., Any]) -> nn.Module:
    """One module with the modules that the step refers to, for names in reports."""
    owner = nn.Module()
    for at, module in enumerate(modules_in(function)):
        owner.add_module(f"module_{at}", module)
    return owner


def _kind(tensor: Tensor) -> Hashable:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device
