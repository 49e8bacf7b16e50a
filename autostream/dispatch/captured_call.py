"""A call that Dynamo captured as one graph: runs it on the slow path, and makes the replay of its fast path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import Tensor

from autostream.dispatch.compiled_graph import CompiledGraph, CompiledSignature, reports_of_graph
from autostream.dispatch.replay import GuardFailed, Replay
from autostream.dispatch.results import structure_of_result
from autostream.frontend.capture import Capture, Input
from autostream.frontend.guards import GUARDS_SKIP_WEIGHTS
from autostream.frontend.inputs import aliases_of
from autostream.frontend.tree import TENSOR, Structure, flatten, merged, objects_in, same
from autostream.ir import Decision
from autostream.reporting.report import Report
from autostream.runtime.layouts import SameMetadata
from autostream.runtime.partial_call import PartialCall
from autostream.runtime.restore import Restore


class CapturedCall:
    """Runs calls for which the guards of a capture hold.

    Args:
        captured: the graph and its guards.
        run: runs the graph; takes and returns flat tensors.
        label: describes the calls in reports.
        signature: the graph's schedule for these calls, if no gradients are recorded.
        halves: the graphs of the forward and the backward, if gradients are recorded; filled when they first run.

    Attributes:
        captured: the graph and its guards, without the tensors that it was captured with.
        guards: whether it may run a call.
        label: describes the calls in reports.
        was_called: whether it has run a call on the slow path.
        beside_model: why it runs calls, and not the model itself, where that was compared.
    """

    was_called = False
    beside_model: Decision | None = None

    def __init__(
        self,
        captured: Capture,
        run: Callable[..., Sequence[Any]],
        label: str,
        signature: CompiledSignature | None = None,
        halves: Sequence[CompiledGraph] = (),
    ) -> None:
        self.captured, self.label = replace(captured, tensors=()), label
        self.guards = captured.guards
        self._run, self._ready, self._halves = run, signature, halves
        self._call = TENSOR
        """The structure of the arguments of calls on the slow path. Integers that differ there are read by no guard."""
        run = _checking_weights(captured, run) if GUARDS_SKIP_WEIGHTS else run
        self._restored = captured.restored(_marking_kept(captured.kept, run) if captured.kept else run)

    def __call__(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call with the Python side effects that the model has, and return what the model returns.

        Raises:
            GuardFailed: the model's tensors have other dtypes, sizes or strides, which Dynamo's guards did not check.
                Nothing was run.
        """
        return self._restored(model, args, kwargs)

    @property
    def compiled(self) -> CompiledGraph | None:
        """Runs the graph with a schedule; ``None`` if gradients are recorded."""
        return self._run if isinstance(self._run, CompiledGraph) else None

    @property
    def repeatable(self) -> bool:
        """Whether a failed call may run again: it has no side effects that the user could see."""
        graphs = [self.compiled] if self.compiled else self._halves
        schedules = (signature.scheduled for graph in graphs for signature in graph.signatures)
        side_effects = self.captured.effects or self.captured.stores
        return not side_effects and all(scheduled is None or scheduled.repeatable for scheduled in schedules)

    def reports(self, model: str) -> tuple[Report, ...]:
        """The reports of its schedules."""
        notes = (self.beside_model,) if self.beside_model else ()
        if self.compiled is not None:
            signatures = self.compiled.signatures
            current = [each for each in signatures if each is self._ready] or signatures  # it may have been dropped
            reports = tuple(
                replace(report, signature=self.label, refusals=(*notes, *report.refusals))
                for report in (each.report for each in current)
            )
            return (*reports, *self.compiled.refused)
        return tuple(replace(report, signature=self.label) for report in reports_of_graph(model, self._halves))

    def undone(
        self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> AbstractContextManager[Restore] | None:
        """Restores what more runs of a call write; ``None`` if they would be seen all the same.

        Args:
            model: the live model.
            args: the positional arguments of a call that it has run.
            kwargs: the keyword arguments.
        """
        captured, compiled = self.captured, self.compiled
        if captured.effects or captured.kept or captured.does_more or compiled is None:
            return None
        if not self.guards(model, args, kwargs):
            return None  # where a run makes a guard fail, the next one would do something else
        values = captured.graph_inputs(model, args, kwargs)
        signature = compiled.signature(values)
        if signature is None or signature.scheduled is None:
            return None
        return signature.scheduled.undone(signature.arguments(values))

    def count_replays(self, calls: int) -> None:
        """Count calls that ran on the fast path."""
        if self._ready is not None and self._ready.scheduled is not None:
            self._ready.scheduled.count_replays(calls)

    def replay(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, guarded: bool) -> Replay | None:
        """The fast path of calls like this one; ``None`` if they have to take the slow path.

        Args:
            model: the live model.
            args: the positional arguments of a call that it has run.
            kwargs: the keyword arguments.
            guarded: whether to check guards in each call.
        """
        captured, compiled = self.captured, self.compiled
        if captured.effects or compiled is None:
            return None
        try:
            tensors, call = flatten((args, kwargs), same)
        except Exception:  # there are objects without weak references
            return None
        former, self._call = self._call, call
        objects, now = objects_in(former), objects_in(call)
        if len(objects) != len(now) or not all(map(is_, objects, now)):
            return None  # other objects, such as batches, may come in each call
        values = captured.graph_inputs(model, args, kwargs)
        if guarded and all(isinstance(value, Tensor) for value in values):  # no integer goes into the graph
            self._call = call = merged(former, call)
        signature = compiled.signature(values)
        self._ready = signature or self._ready  # the one before may have been dropped
        scheduled = None if signature is None else signature.scheduled
        if signature is None or scheduled is None or not signature.is_direct or scheduled.detached or scheduled.frozen:
            return None
        arguments, graph = signature.arguments(values), None
        if scheduled.captured is not None and (graph := scheduled.reading(arguments)) is None:
            return None
        try:
            structure, returned = self._returned(model, args, kwargs)
        except Exception:  # the model reads an output's value, or returns what cannot be made again
            return None
        state = {id(value) for value, source in zip(values, captured.inputs, strict=True) if not source.is_argument}
        positions = {id(tensor): at for at, tensor in enumerate(tensors)}
        inside = [
            (source, value)
            for source, value in zip(captured.inputs, values, strict=True)
            if source.is_argument and id(value) not in positions
        ]
        if not _are_there(inside, args, kwargs):
            return None
        inputs = [None if id(a) in state else positions.get(id(a)) for a in arguments]
        held = [argument for argument, at in zip(arguments, inputs, strict=True) if at is None]
        sources = _sources(returned, len(scheduled.program.outputs), [*tensors, *held])
        if not tensors or aliases_of(tensors) or sources is None:
            return None
        return Replay(
            PartialCall(scheduled, graph, held, inputs, len(tensors)),
            held,
            call,
            tensors,
            (structure, sources),
            partial(captured.guards, model) if guarded else None,
            partial(_are_there, inside) if inside else None,
            captured.stores,
            guards_first=graph is None or not scheduled.harmless,
            writes=scheduled.writes,
        )

    def _returned(
        self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Structure, list[int | Tensor]]:
        """See :func:`structure_of_result`."""
        _, call = flatten((args, kwargs), same)
        given = [reference() for reference in objects_in(call)]

        def rebuild(outputs: Sequence[Tensor]) -> object:
            return self.captured.restored(lambda *_: outputs)(model, args, kwargs)

        return structure_of_result(self.captured.module, rebuild, partial(_one_of, given))


def _one_of(objects: Sequence[object], value: object) -> Structure:
    if not any(value is each for each in objects):
        raise ValueError("an object that is no argument is returned")
    return same(value)


def _are_there(inside: Sequence[tuple[Input, object]], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether objects among the arguments have these values where the graph's inputs come from."""
    try:
        return all(source.fetch(args, kwargs) is value for source, value in inside)
    except Exception:
        return False


def _checking_weights(captured: Capture, run: Callable[..., Sequence[Any]]) -> Callable[..., Sequence[Any]]:
    """Run a graph only if its inputs that are no arguments of the call are like those that it was captured with."""
    held = [at for at, source in enumerate(captured.inputs) if not source.is_argument]
    alike = SameMetadata([captured.tensors[at] for at in held], gradients=True)

    def checked(*values: Any) -> Sequence[Any]:
        if not alike([values[at] for at in held]):
            raise GuardFailed
        return run(*values)

    return checked


def _marking_kept(kept: Sequence[int], run: Callable[..., Sequence[Any]]) -> Callable[..., Sequence[Any]]:
    """Run a graph; tensors that its arguments keep are said to stay where they are, for calls that read them."""

    def marked(*values: Any) -> Sequence[Any]:
        outputs = run(*values)
        for at in kept:
            torch._dynamo.mark_static_address(outputs[at])
        return outputs

    return marked


def _sources(returned: Sequence[int | Tensor], outputs: int, others: Sequence[Tensor]) -> list[int] | None:
    """The index of each returned tensor among the outputs, then the others; ``None`` if one is neither.

    Args:
        returned: an output by its index, another tensor by itself.
        outputs: how many outputs there are.
        others: the tensors that come after them.
    """
    known = {id(tensor): outputs + at for at, tensor in enumerate(others)}
    sources = [source if isinstance(source, int) else known.get(id(source)) for source in returned]
    return None if None in sources else [source for source in sources if source is not None]
