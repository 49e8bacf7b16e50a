"""A model that Dynamo splits at graph breaks, each graph scheduled for itself."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from torch import nn
from torch.fx import GraphModule

from autostream.analysis.source import user_line
from autostream.dispatch.compiled_graph import CompiledGraph, InputNames, reports_of_graph
from autostream.frontend.autograd import run_graph
from autostream.frontend.breaks import ending_of, with_breaks
from autostream.ir import Decision
from autostream.pipeline import versions
from autostream.reporting.report import Report


class MakeGraph(Protocol):
    """Makes what runs a graph, and notes it."""

    def __call__(
        self, made: list[CompiledGraph], module: GraphModule, names: InputNames, *, half: str = ""
    ) -> CompiledGraph:
        """From the graph and what its inputs are."""


class GraphBreaks:
    """Runs a model by ``torch.compile``, which splits it where it cannot follow its Python.

    Args:
        model: the live model.
        label: of the calls, readable.
        reason: why it is not one graph.
        make: makes what runs a graph.

    Attributes:
        runs: what runs the graphs, in the order of their making.
        has_returned: whether a call has ended without an error.
    """

    def __init__(self, model: nn.Module, label: str, reason: str, make: MakeGraph) -> None:
        self.label, self.reason = label, reason
        self._called = self.has_returned = False
        self._refusals = {reason: Decision("", "graph breaks", reason)}
        self._graphs: list[tuple[list[CompiledGraph], str]] = []
        self._make = make
        self.runs: list[Callable[..., Any]] = []
        self._run = with_breaks(model, partial(_backend, weakref.ref(self)), self._refuse)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns for these arguments."""
        self._called = True
        value = self._run(*args, **kwargs)
        self.has_returned = True
        return value

    def reports(self, model: str) -> tuple[Report, ...]:
        """What is known now: graphs are made in the calls that get to them."""
        parts = tuple(
            replace(report, ended=ended) for made, ended in self._graphs for report in reports_of_graph(model, made)
        )
        mode = "graph breaks" if self._graphs else "plain" if self._called else "not run yet"
        refusals = tuple(self._refusals.values())
        return (Report(model, self.label, mode, refusals=refusals, versions=versions(), parts=parts),)

    def _refuse(self, reason: str) -> None:
        self._refusals.setdefault(reason, Decision("", "plain", reason))

    def add(self, module: GraphModule, example_inputs: Sequence[Any]) -> int:
        """Make what runs one more graph of the model's; returns its position among them."""
        made: list[CompiledGraph] = []
        reason, stack = ending_of(module)
        line = user_line(stack)
        self._graphs.append((made, f"{reason} ({line})" if line else reason))

        self.runs.append(run_graph(module, example_inputs, partial(self._make, made)))
        return len(self.runs) - 1


def _backend(owner: weakref.ref[GraphBreaks], module: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """A graph as Dynamo keeps it, for good: what is captured, and its memory, go with the model all the same."""
    split = owner()
    if split is None:
        return module.forward
    number = split.add(module, example_inputs)

    def run(*values: Any) -> Any:
        living = owner()
        return module.forward(*values) if living is None else living.runs[number](*values)

    return run
