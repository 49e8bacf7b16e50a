"""A call that Dynamo splits at graph breaks: each graph between them is compiled on its own."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from torch import nn
from torch.fx import GraphModule

from autostream.dispatch.compiled_graph import CompiledGraph, InputNames, reports_of_graph
from autostream.frontend.autograd import run_graph
from autostream.frontend.graph_breaks import ending_of, with_breaks
from autostream.frontend.modules import name_of
from autostream.ir import Decision
from autostream.pipeline import versions
from autostream.reporting.report import Report


class MakeGraph(Protocol):
    """Compiles a graph and appends it to a list."""

    def __call__(
        self, graphs: list[CompiledGraph], module: GraphModule, names: InputNames, *, half: str = ""
    ) -> CompiledGraph:
        """See :class:`CompiledGraph`."""


class SplitCall:
    """Runs a model with ``torch.compile``, which splits it where it cannot trace its Python.

    Args:
        model: the live model.
        label: describes the calls in reports.
        reason: why it is not one graph.
        make: compiles a graph.

    Attributes:
        warning: what the user is to know once a call has returned.
        runs: run the graphs, in the order in which they were compiled.
        has_returned: whether a call has returned without an error.
        was_called: whether it has run a call on the slow path.
        beside_model: why it runs calls, and not the model itself, where that was compared.
    """

    was_called = False
    beside_model: Decision | None = None

    def __init__(self, model: nn.Module, label: str, reason: str, make: MakeGraph) -> None:
        self.label, self.reason = label, reason
        self.warning = f"{name_of(model)}: {reason}; splitting it at graph breaks"
        self._called = self.has_returned = False
        self._refusals = {reason: Decision("", "graph breaks", reason)}
        self._graphs: list[tuple[list[CompiledGraph], str]] = []
        self._make = make
        self.runs: list[Callable[..., Any]] = []
        self._run = with_breaks(model, partial(_backend, weakref.ref(self)), self._refuse)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        self._called = True
        value = self._run(*args, **kwargs)
        self.has_returned = True
        return value

    def reports(self, model: str) -> tuple[Report, ...]:
        """One report, with the reports of the graphs that calls have reached so far."""
        parts = tuple(
            replace(report, ended=ended) for graphs, ended in self._graphs for report in reports_of_graph(model, graphs)
        )
        mode = "graph breaks" if self._graphs else "plain" if self._called else "not run yet"
        notes = (self.beside_model,) if self.beside_model else ()
        refusals = (*notes, *self._refusals.values())
        return (Report(model, self.label, mode, refusals=refusals, versions=versions(), parts=parts),)

    def _refuse(self, reason: str) -> None:
        self._refusals.setdefault(reason, Decision("", "plain", reason))

    def add(self, module: GraphModule, example_inputs: Sequence[Any]) -> int:
        """Compile another graph of the model; returns its index in ``runs``."""
        graphs: list[CompiledGraph] = []
        self._graphs.append((graphs, ending_of(module)))
        self.runs.append(run_graph(module, example_inputs, partial(self._make, graphs)))
        return len(self.runs) - 1


def _backend(owner: weakref.ref[SplitCall], module: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """Dynamo's backend. Dynamo never drops what this returns, so it does not own the CUDA graphs."""
    graph_breaks = owner()
    if graph_breaks is None:
        return module.forward
    index = graph_breaks.add(module, example_inputs)

    def run(*values: Any) -> Any:
        alive = owner()
        return module.forward(*values) if alive is None else alive.runs[index](*values)

    return run
