"""Compiled training steps: a cache of scheduled graphs, looked up by key and guards.

    call, optimizers ──▶ like a recent call? ──▶ StepReplay (fast path)
                          │ no
                          └─▶ key ──▶ an entry whose guards hold ──▶ CapturedStep
                                        │ none
                                        └─▶ capture ──▶ trace ──▶ CapturedStep

Where capturing or tracing fails, there is a ``Refusal`` instead, and the caller falls back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn

from autostream.dispatch.admission import Admission
from autostream.dispatch.captured_step import CapturedStep
from autostream.dispatch.compiled_graph import TOO_LITTLE, section
from autostream.dispatch.paranoid import compared
from autostream.dispatch.scheduled_program import ModelContext, NoSchedule
from autostream.dispatch.step_calls import Call, Key, Refusal, WrittenStep, call_of
from autostream.dispatch.step_replay import StepReplay
from autostream.errors import (
    AutostreamError,
    FastPathError,
    GroupError,
    OptionError,
    TargetError,
    TraceError,
    first_line,
)
from autostream.frontend.inputs import described
from autostream.frontend.optimizers import FirstUpdateError
from autostream.frontend.parameters import have_hooks
from autostream.frontend.reasons import AS_A_TENSOR, changed_number, failed_guard
from autostream.frontend.steps import HOOKED
from autostream.options import Options, paranoid
from autostream.reporting.report import Report
from autostream.runtime.cuda_graph import GraphPools
from autostream.runtime.input_buffers import BufferTable
from autostream.tuning.agreement import agree
from autostream.utils.locks import lock_of, preparing

_MOST_REPLAYS = 4
"""How many kinds of calls have a fast path."""


@dataclass(frozen=True)
class Done:
    """A step that a graph has run.

    Attributes:
        result: what it returned.
    """

    result: Any


class StepGraphs:
    """The compiled graphs of a training step.

    Args:
        step: as it is written.
        options: how to schedule it.
        input_buffers: buffers that captured graphs may read in place.
    """

    def __init__(self, step: WrittenStep, options: Options, input_buffers: BufferTable) -> None:
        self.step, self.options = step, options
        context = ModelContext(options, GraphPools(), input_buffers)
        self._context = replace(context, make_section=partial(section, context, step.name))
        self._admission = Admission[list[CapturedStep | Refusal]](options.max_signatures)
        self._lock, self._paranoid = lock_of(self), paranoid()
        self._replays: list[StepReplay] = []
        self._first: Key | None = None
        """Of the latest call in which an optimizer makes its state, which is part of the key."""

    def replayed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Done | None:
        """The step, if it is like a recent one, by its fast path."""
        for replay in self._replays:
            if (tensors := replay.fits(args, kwargs)) is not None:
                run = partial(replay, tensors, args, kwargs)
                return Done(self._run(replay.key, replay.entry, run))
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
            call = call_of(self.step, args, kwargs)
        if isinstance(call, Refusal):
            self._replays = []  # what they compare hyperparameters with may have been read anew
            return self.refused(call)
        self._replays = [replay for replay in self._replays if replay.key.groups == call.key.groups]
        self.step.body.parameters = call.parameters
        call = self._known(call)
        entry, inputs = self._entry(call) or self._new_entry(call)
        if isinstance(entry, Refusal):
            return self.refused(entry)
        if have_hooks([tensor for tensor in inputs if tensor.requires_grad]):
            return self.refused(Refusal(HOOKED))
        try:
            if self._paranoid:
                return Done(self._run(call.key, entry, lambda: self._compared(entry, call, inputs)))
            result = self._run(call.key, entry, lambda: entry.run(call, inputs))
        except NoSchedule as reason:
            return self.refused(Refusal(str(reason)))
        self._add_replay(entry, call, inputs)
        return Done(result)

    def _run(self, key: Key, entry: CapturedStep, run: Callable[[], Any]) -> Any:
        """What this returns, which runs a compiled step."""
        try:
            return run()
        except torch.OutOfMemoryError as error:
            self._give_up(key, entry, error)
            raise

    def forget_refusals(self) -> None:
        """Capture refused steps again when they come again: they may have failed because of an error of the caller."""
        for key, entries in [*self._admission.entries.items()]:
            compiled: list[CapturedStep | Refusal] = [entry for entry in entries if isinstance(entry, CapturedStep)]
            if compiled:
                self._admission.entries[key] = compiled
            else:
                self._admission.drop(key)

    def _give_up(self, key: Key, entry: CapturedStep, error: torch.OutOfMemoryError) -> None:
        """Refuse a compiled step from now on, and release its memory: in the next call there would be too little too.

        ``strict=True`` keeps it.
        """
        if self.options.strict:
            return
        self._replays = [replay for replay in self._replays if replay.entry is not entry]
        refusal = Refusal(TOO_LITTLE.format(first_line(error)), begins_without=None)
        entries = self._admission.entries
        entries[key] = [refusal if each is entry else each for each in entries.get(key, [])]

    @property
    def reports(self) -> tuple[Report, ...]:
        """The reports of all entries, the most recently used first."""
        entries = chain.from_iterable(map(reversed, reversed(self._admission.entries.values())))
        return tuple(entry.scheduled.report for entry in entries if isinstance(entry, CapturedStep))

    def refused(self, refusal: Refusal) -> Refusal:
        """The refusal.

        Raises:
            TraceError: ``strict=True``.
        """
        if self.options.strict and not refusal.first:
            raise TraceError(refusal.reason)
        return refusal

    def _entry(self, call: Call) -> tuple[CapturedStep | Refusal, Sequence[Tensor]] | None:
        """The entry or the refusal with this key whose guards hold, and the inputs of its graph."""
        for entry in self._admission.entries.get(call.key, ()):
            if (inputs := entry.inputs(call)) is not None:
                self._admission.hit(call.key)
                return entry, inputs
        return None

    def _known(self, call: Call) -> Call:
        """The call with the key of a captured one that differs in integers alone, whose guards hold: it reads none."""
        if call.key not in self._admission.entries:
            for key, entries in self._admission.alike(call.key):
                captured = (entry for entry in entries if isinstance(entry, CapturedStep))
                if any(entry.inputs(call) is not None for entry in captured):
                    return replace(call, key=cast(Key, key))
        return call

    def _new_entry(self, call: Call) -> tuple[CapturedStep | Refusal, Sequence[Tensor]]:
        with self._lock, preparing:
            if known := self._entry(call):  # another thread has compiled it
                return known
            if call.key == self._first:  # the state is still to be made: a scaler may skip updates
                return Refusal("an optimizer makes its state", first=True), ()
            if reason := self._full(call):
                self._admission.miss(call.key)
                return Refusal(reason, full=True), ()
            try:
                new: CapturedStep | Refusal = CapturedStep(self.step, call, self._context)
                inputs = new.inputs(call)
                assert inputs is not None, "the guards hold for the call that was captured"
            except (OptionError, TargetError):
                raise
            except GroupError as error:
                raise GroupError(f"{error}; {self._compiling(call)}") from error
            except FirstUpdateError as error:
                self._first = call.key
                return Refusal(str(error), first=True), ()
            except Exception as error:
                if self.options.strict:
                    raise
                expected = isinstance(error, AutostreamError | FastPathError)
                reason = str(error) if expected else f"it cannot be scheduled: {first_line(error)}"
                if self.step.data_parallel is not None:  # the others may not wait for a graph of this process
                    agree(self.step.data_parallel.group, ["the step as it is written"])
                new, inputs = Refusal(reason, begins_without=call.begins_without), ()
            self._admission.add(call.key, [*self._admission.entries.get(call.key, []), new])
            return new, inputs

    def _compiling(self, call: Call) -> str:
        """Which call is compiled in this process, for those who look for the one in which others differ."""
        here = f"here {self.step.name} was compiled for {described(call.tensors)}"
        known = [report.signature for report in self.reports if report.signature != described(call.tensors)]
        return f"{here}, after {known[0]}: have batches of the same shapes in all processes" if known else here

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
            if name := changed_number(self.step.body.function, call.key.structure, latest.structure):
                return f"{reason}, and meets another, since a number in {name} changes: {AS_A_TENSOR}"
            return f"{reason}, and meets another: {call.key.difference(latest)} changed"
        failed = entries[-1].failed(call)
        reason = f"{reason}, and meets another"
        return f"{reason}, since {failed_guard(failed)}" if failed else reason

    def _compared(self, entry: CapturedStep, call: Call, inputs: Sequence[Tensor]) -> Any:
        """The result of a run that was compared with the eager step."""
        eager = _EagerStep(self.step, call, inputs)
        return compared(eager, lambda: entry.run(call, inputs), call.tensors, call.args, call.kwargs)

    def _add_replay(self, entry: CapturedStep, call: Call, inputs: Sequence[Tensor]) -> None:
        former = next((each for each in self._replays if each.entry is entry), None)
        try:
            replay = StepReplay(self.step, entry, call, inputs, self.options, former)
        except NoSchedule:
            return
        self._replays = [replay, *(each for each in self._replays if each is not former)][:_MOST_REPLAYS]


class _EagerStep(nn.Module):
    """The eager step as a module whose parameters and buffers are all tensors that it may write."""

    def __init__(self, step: WrittenStep, call: Call, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.step_modules, self._step = step.modules(), step
        known = set(map(id, chain(self.parameters(), self.buffers(), call.tensors)))
        states = chain.from_iterable(each.state.tensors for each in call.updates)
        for at, tensor in enumerate(chain(states, inputs)):
            if id(tensor) not in known:
                self.register_buffer(f"tensor_{at}", tensor)

    def _get_name(self) -> str:
        return self._step.name

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._step.eager(*args, **kwargs)
