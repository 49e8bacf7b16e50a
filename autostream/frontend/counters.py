"""Counters: integers that a call reads from an object and writes back, such as how many tokens a cache has.

    graph(n, x) → n + 1, y  ──apart──▶  graph(x) → y       what is scheduled: the same for every n
                                 └────▶  numbers(n) → n + 1  on the host

Dynamo guards an integer by its value, so that each call would be another graph. As one of
``torch.compiler.config.dynamic_sources`` it is an input, and Dynamo guards what the call asks of it (``n < 16``).
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from autostream.errors import TraceError
from autostream.frontend.guards import source_name
from autostream.frontend.tensor_parallel import is_mesh

Run = Callable[..., Sequence[Any]]
"""Runs a graph: takes and returns flat values."""


def dynamic(sources: Sequence[str]) -> AbstractContextManager[Any]:
    """Let Dynamo take the integers from these sources as inputs; without any, PyTorch's setting stays as it is."""
    if not sources:
        return nullcontext()
    patterns = ",".join(f"{re.escape(source)}$" for source in sources)
    config: Any = torch.compiler.config
    patched: AbstractContextManager[Any] = config.patch(dynamic_sources=patterns)
    return patched


def counters_in(stores: Mapping[Any, Mapping[str, Any]]) -> tuple[str, ...]:
    """The sources of the attributes that a trace assigns integers to.

    Args:
        stores: Dynamo's variable of an object to what is assigned to its attributes.
    """
    from torch._dynamo.source import AttrSource

    names = [
        source_name(AttrSource(item.source, name))
        for item, attributes in stores.items()
        if item.source is not None
        for name, value in attributes.items()
        if type(getattr(value, "value", None)) is int
    ]
    return tuple(name for name in names if not set(name) & _SEPARATORS)


def guarded_among(sources: Sequence[str], output: Any) -> tuple[str, ...]:
    """Those of these sources that Dynamo guards in a trace: the call reads them."""
    guards = output.graph_capture_output().output_graph.guards
    guarded = {source_name(guard.originating_source) for guard in guards}
    return tuple(source for source in sources if source in guarded)


_SEPARATORS = frozenset(",: ")
"""A source with one of these cannot be in ``dynamic_sources``."""


@dataclass(frozen=True, slots=True)
class Numbers:
    """What the numbers of a graph become.

    Attributes:
        taken: positions of the graph's inputs that are numbers.
        returned: positions of its outputs that are computed from them.
        compute: takes the former and returns the latter.
    """

    taken: tuple[int, ...]
    returned: tuple[int, ...]
    compute: Callable[..., Sequence[Any]]

    def beside(self, run: Run) -> Run:
        """Run what takes and returns everything else, and put the numbers back in their places."""
        taken = frozenset(self.taken)

        def both(*values: Any) -> Sequence[Any]:
            outputs = list(run(*(value for at, value in enumerate(values) if at not in taken)))
            for at, number in zip(self.returned, self.compute(*(values[at] for at in self.taken)), strict=True):
                outputs.insert(at, number)
            return outputs

        return both


def apart(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Numbers | None:
    """Remove the numbers among its inputs from a graph, with all that is computed from them.

    Args:
        module: the graph.
        example_inputs: of it.

    Returns:
        ``None`` if it takes no numbers.

    Raises:
        TraceError: a tensor depends on one of them, or what is computed from them may fail at other numbers: then the
            graph would have run, and Python would not have counted. The graph has not changed.
    """
    placeholders = module.graph.find_nodes(op="placeholder")
    taken = tuple(at for at, value in enumerate(example_inputs) if not isinstance(value, Tensor))
    if not taken:
        return None
    inputs = [placeholders[at] for at in taken]
    for node, at in zip(inputs, taken, strict=True):
        if is_mesh(example_inputs[at]):
            _hold(module, node, example_inputs[at])
    depends = dict.fromkeys(inputs)
    for node in module.graph.nodes:
        if node.op != "output" and not depends.keys().isdisjoint(node.all_input_nodes):
            if not _never_fails(node) or not depends.keys() >= {*node.all_input_nodes}:
                raise TraceError(f"the graph takes a number, {inputs[0].name}: pass it as a tensor")
            depends[node] = None
    output = module.graph.output_node()
    results: Any = output.args[0]
    returned = tuple(at for at, result in enumerate(results) if result in depends)
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in depends:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[results[at]] for at in returned))
    output.args = (tuple(result for at, result in enumerate(results) if at not in returned),)
    for node in reversed(depends):
        module.graph.erase_node(node)
    module.recompile()
    return Numbers(taken, returned, fx.GraphModule(module, graph).forward)


def _hold(module: fx.GraphModule, placeholder: fx.Node, value: object) -> None:
    """Let a graph take an object that is guarded by its identity from itself, in place of an input."""
    with module.graph.inserting_after(placeholder):
        node = module.graph.create_node("get_attr", f"held_{placeholder.name}")
    setattr(module, str(node.target), value)
    placeholder.replace_all_uses_with(node)


def _never_fails(node: fx.Node) -> bool:
    """Whether a node computes a number, and does so from any numbers."""
    if not isinstance(node.meta.get("example_value"), int | torch.SymInt | torch.SymBool):
        return False
    if node.target in _DIVISIONS:
        return isinstance(node.args[1], int) and node.args[1] != 0
    if node.target is operator.pow:
        return isinstance(node.args[1], int) and node.args[1] >= 0
    return node.target in _TOTAL


_DIVISIONS = frozenset({operator.floordiv, operator.mod})

_ARITHMETIC = {operator.add, operator.sub, operator.mul, operator.neg, operator.pos, operator.abs, abs}

_LOGIC = {operator.and_, operator.or_, operator.xor, operator.invert, operator.not_, torch.sym_not}

_COMPARISONS = {operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne}

_TOTAL = frozenset({*_ARITHMETIC, *_LOGIC, *_COMPARISONS, torch.sym_min, torch.sym_max, torch.sym_int})
"""Functions of integers that fail at none."""
