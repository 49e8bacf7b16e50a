"""A model that Dynamo splits at graph breaks, each graph scheduled for itself."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn
from torch.fx import GraphModule

from autostream.analysis.source import user_line
from autostream.compiled import Compiled
from autostream.frontend.autograd import run_graph
from autostream.frontend.breaks import ending_of, with_breaks
from autostream.ir import Decision
from autostream.pipeline import versions
from autostream.reporting.report import Report

MakeGraph = Callable[[GraphModule, Any], Compiled]
"""Makes what runs a graph, from the graph and what its inputs are."""


class Split:
    """Runs a model by ``torch.compile``, which splits it where it cannot follow its Python.

    Args:
        model: the live model.
        label: of the calls, readable.
        reason: why it is not one graph.
        make: makes what runs a graph.
    """

    def __init__(self, model: nn.Module, label: str, reason: str, make: MakeGraph) -> None:
        self.label = label
        self._refusals = {reason: Decision("", "graph breaks", reason)}
        self._graphs: list[tuple[list[Compiled], str]] = []
        self._make = make
        self._run = with_breaks(model, partial(_backend, weakref.ref(self)), self._refuse)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns for these arguments."""
        return self._run(*args, **kwargs)

    def reports(self, model: str) -> tuple[Report, ...]:
        """What is known now: graphs are made in the calls that get to them."""
        parts = tuple(
            replace(report, ended=ended)
            for made, ended in self._graphs
            for compiled in made
            for report in compiled.reports
        )
        mode = "graph breaks" if self._graphs else "not run yet"
        refusals = tuple(self._refusals.values())
        return (Report(model, self.label, mode, refusals=refusals, versions=versions(), parts=parts),)

    def _refuse(self, reason: str) -> None:
        self._refusals.setdefault(reason, Decision("", "plain", reason))

    def graph(self, module: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """What runs a graph of the model's."""
        made: list[Compiled] = []
        reason, stack = ending_of(module)
        line = user_line(stack)
        self._graphs.append((made, f"{reason} ({line})" if line else reason))

        def make(half: GraphModule, names: Any) -> Compiled:
            compiled = self._make(half, names)
            made.append(compiled)
            return compiled

        return run_graph(module, example_inputs, make)


def _backend(owner: weakref.ref[Split], module: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """A graph as Dynamo keeps it, for good: what is captured, and its memory, go with the model all the same."""
    split = owner()
    run = None if split is None else split.graph(module, example_inputs)
    if split is None or run is None:
        return module.forward
    split.__dict__.setdefault("_kept", []).append(run)
    kept = weakref.ref(split)

    def call(*values: Any) -> Any:
        return (run_ref() or module.forward)(*values) if kept() is not None else module.forward(*values)

    run_ref = weakref.WeakMethod(run) if hasattr(run, "__self__") else weakref.ref(run)
    del run
    return call
