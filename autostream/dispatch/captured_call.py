"""A call that Dynamo captured as one graph: what runs it, and its short way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autostream.dispatch.compiled_graph import CompiledGraph, CompiledSignature, report_of_halves
from autostream.dispatch.replay import GuardFailed, Replay
from autostream.frontend.capture import GUARDS_SKIP_WEIGHTS, Capture
from autostream.frontend.signature import aliases_of
from autostream.frontend.tree import Structure, flatten, shares_containers
from autostream.reporting.report import Report
from autostream.runtime.addresses import SameMetadata
from autostream.runtime.partial_call import PartialCall


class CapturedCall:
    """Runs calls for which the guards of a capture hold.

    Args:
        captured: the graph and its guards.
        run: what runs the graph; takes and returns flat tensors.
        label: of the calls, readable.
        ready: the schedule that runs it, where no gradients are recorded.
        halves: what is scheduled of a call that records gradients: the forward and the backward, once they have run.

    Attributes:
        captured: as given, without the tensors of its call.
        guards: say which calls it may run.
        label: as given.
    """

    def __init__(
        self,
        captured: Capture,
        run: Callable[..., Sequence[Any]],
        label: str,
        ready: CompiledSignature | None = None,
        halves: Sequence[CompiledGraph] = (),
    ) -> None:
        self.captured, self.label = replace(captured, tensors=()), label
        self.guards = captured.guards
        self._run, self._ready, self._halves = run, ready, halves
        self._restored = captured.restored(_looking_at_weights(captured, run) if GUARDS_SKIP_WEIGHTS else run)

    def __call__(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the model returns, with all that it does to Python's objects.

        Raises:
            GuardFailed: the model's tensors are not what they were, which no guard has seen. Nothing has been done.
        """
        return self._restored(model, args, kwargs)

    @property
    def compiled(self) -> CompiledGraph | None:
        """What runs the graph by a schedule; ``None`` where gradients are recorded."""
        return self._run if isinstance(self._run, CompiledGraph) else None

    @property
    def repeatable(self) -> bool:
        """Whether a call that failed may be made again: nothing that anybody can see has changed."""
        compiled = [self.compiled] if self.compiled else self._halves
        made = (ready.scheduled for own in compiled for ready in own.made)
        writes = self.captured.effects or self.captured.stores
        return not writes and all(scheduled is None or scheduled.repeatable for scheduled in made)

    def reports(self, model: str) -> tuple[Report, ...]:
        """What is known of it."""
        if self.compiled is not None:
            made = self.compiled.made
            own = [ready for ready in made if ready is self._ready] or made  # another, where it has been dropped
            reports = tuple(replace(ready.report, signature=self.label) for ready in own)
            return (*reports, *self.compiled.refused)
        return (replace(report_of_halves(model, self._halves), signature=self.label),)

    def served(self, calls: int) -> None:
        """The short way has served so many calls."""
        if self._ready is not None and self._ready.scheduled is not None:
            self._ready.scheduled.served(calls)

    def replay(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, guarded: bool) -> Replay | None:
        """The short way of calls like this one, where there is one.

        Args:
            model: what is called.
            args: the positional arguments of a call that it has run.
            kwargs: the keyword arguments.
            guarded: whether guards are asked in each call.
        """
        captured, compiled = self.captured, self.compiled
        if captured.effects or compiled is None:
            return None
        values = captured.given(model, args, kwargs)
        ready = compiled.ready(values)
        self._ready = ready or self._ready  # another, where that which there was has been dropped
        scheduled = None if ready is None else ready.scheduled
        if ready is None or scheduled is None or not ready.is_direct or scheduled.detached or scheduled.frozen:
            return None
        arguments, place = ready.arguments(values), None
        if scheduled.captured is not None and (place := scheduled.reading(arguments)) is None:
            return None
        try:
            tensors, call = flatten((args, kwargs))
            structure, found = self._returned(model, args, kwargs)
        except Exception:  # such as what is no known container, or asks an output for its value
            return None
        own = {id(value) for value, given in zip(values, captured.inputs, strict=True) if not given.is_argument}
        numbers = {id(tensor): at for at, tensor in enumerate(tensors)}
        places = [None if id(a) in own else numbers.get(id(a)) for a in arguments]
        held = [argument for argument, at in zip(arguments, places, strict=True) if at is None]
        sources = _sources(found, len(scheduled.program.outputs), [*tensors, *held])
        if not tensors or aliases_of(tensors) or sources is None:
            return None
        return Replay(
            PartialCall(scheduled, place, held, places, len(tensors)),
            held,
            call,
            tensors,
            (structure, sources),
            partial(captured.guards, model) if guarded else None,
            captured.stores,
            looks_first=place is None or not scheduled.harmless,
            writes=scheduled.writes,
        )

    def _returned(
        self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Structure, list[int | Tensor]]:
        """How the model's value is put together: for each of its tensors, which output of the graph, or itself.

        Found by Dynamo's bytecode with stand-ins for the graph's outputs.

        Raises:
            ValueError: it does not make all containers anew.
        """
        results: Any = self.captured.module.graph.output_node().args[0]
        outputs = [torch.empty(0) for _ in results]
        restored = self.captured.restored(lambda *_: outputs)
        value, again = restored(model, args, kwargs), restored(model, args, kwargs)
        if shares_containers(value, again):
            raise ValueError("a container that the model has is returned")
        found, structure = flatten(value)
        positions = {id(output): at for at, output in enumerate(outputs)}
        return structure, [positions.get(id(tensor), tensor) for tensor in found]


def _looking_at_weights(captured: Capture, run: Callable[..., Sequence[Any]]) -> Callable[..., Sequence[Any]]:
    """Run a graph only where its inputs that are no arguments of the call are as they were when it was captured."""
    held = [at for at, given in enumerate(captured.inputs) if not given.is_argument]
    alike = SameMetadata([captured.tensors[at] for at in held], gradients=True)

    def looking(*values: Any) -> Sequence[Any]:
        if not alike([values[at] for at in held]):
            raise GuardFailed
        return run(*values)

    return looking


def _sources(found: Sequence[int | Tensor], outputs: int, others: Sequence[Tensor]) -> list[int] | None:
    """Where the tensors of a value come from: so many outputs, then others; ``None`` where one is from elsewhere."""
    known = {id(tensor): outputs + at for at, tensor in enumerate(others)}
    sources = [source if isinstance(source, int) else known.get(id(source)) for source in found]
    return None if None in sources else [source for source in sources if source is not None]
