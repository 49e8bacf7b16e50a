"""Splits a program into parts: one fx graph for each part, and one that calls them in order.

A part takes the values that it needs of earlier parts and of the program's arguments, and returns the values that later
parts need::

    x ──▶ part_0 ──▶ getitem ──▶ part_1 ──▶ …        getitem: one for each value that part_0 returns

Views of arguments and submodules belong to no part: each part that uses one has a copy of the node. So it is with views
of copies from one device to another, which run beside parts. What an op writes in place and returns is what it wrote:
other parts take that, which may be an argument that stays where it is.

Copies to and from the host that run beside other parts (:mod:`~autostream.runtime.host_copies`) are not in a submodule.
The part that produces the source of a copy ends before it, and the destination is allocated there::

    x ──▶ reserve ──▶ part_0 ──▶ … ──▶ upload ──▶ part_2
"""

from __future__ import annotations

import copy
import operator
from collections import defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from autostream.errors import TraceError
from autostream.ir import Op, OpGraph, Placeholder, Program, Role
from autostream.runtime import host_copies
from autostream.runtime.lower import storages_of
from autostream.scheduling.cut import Part
from autostream.utils.operators import base_name, bound_arguments, written_and_returned


@dataclass(frozen=True, slots=True)
class Section:
    """One part of a split program.

    Attributes:
        name: of its submodule in the split program.
        program: takes values of the split program, those in ``bound`` first, and returns a tuple of them. The results
            of a part that is not captured may be numbers.
        bound: positions of its arguments that stay at their addresses from call to call.
        captured: whether it runs as a CUDA graph.
        beside: whether its copies run beside other parts; then it has no submodule.
    """

    name: str
    program: Program
    bound: frozenset[int]
    captured: bool
    beside: bool


@dataclass(frozen=True, slots=True)
class SplitProgram:
    """A program in parts.

    Attributes:
        module: takes and returns what the program does; it calls the sections, which are its submodules.
        sections: in the order in which they run.
    """

    module: fx.GraphModule
    sections: tuple[Section, ...]


def split_program(
    program: Program, graph: OpGraph, parts: Sequence[Part], bound: Sequence[bool], views: Container[str]
) -> SplitProgram:
    """Write each part of a program as an fx graph.

    Takes linear time. The nodes keep names and metadata; ``program.module`` stays as it is.

    Args:
        program: the traced model.
        graph: its ops.
        parts: at least one; what :func:`~autostream.scheduling.cut.cut` returned for it.
        bound: which of the program's arguments stay at their addresses from call to call.
        views: nodes that are views of arguments or of copies between devices, or submodules.

    Raises:
        TraceError: an op changes the shape of a tensor in place, and is no view.
    """
    module = fx.GraphModule(program.module, _with_written(program.module.graph, graph.ops))
    writer = _Writer(replace(program, module=module), graph, parts, bound, views)
    sections = tuple(map(writer.section, range(len(parts))))
    called = {section.name: section.program.module for section in sections if not section.beside}
    return SplitProgram(writer.whole(called), sections)


def _with_written(graph: fx.Graph, ops: Mapping[str, Op]) -> fx.Graph:
    """The same graph, in which parts agree on what a tensor is that one of them changes.

    What an op of ATen's writes in place and returns is used instead of its result. An op that changes the shape of a
    tensor, as ``t_`` does, is a view instead: another part, or the next call, would get the tensor with that shape.

    Raises:
        TraceError: there is no such view.
    """
    written = copy.deepcopy(graph)
    for node in written.nodes:
        target, op = node.target, ops.get(node.name)
        argument = written_and_returned(node, target) if isinstance(target, OpOverload) and op else None
        if argument is not None and torch.Tag.inplace_view in target.tags:
            node.target = _as_view(target)
        elif argument is not None and target.namespace == "aten" and op and not op.crosses:
            node.replace_all_uses_with(argument)
    return written


def _as_view(target: OpOverload) -> OpOverload:
    """The operator that returns what an operator makes of its argument, such as ``t`` for ``t_``."""
    name = base_name(target)
    packet = getattr(getattr(torch.ops, target.namespace), name.removesuffix("_"), None)
    view = getattr(packet, target._overloadname, None)
    if view is None or not view.is_view:
        raise TraceError(
            f"{name} changes the shape of a tensor in place, and the model is cut into sections: use a view"
        )
    return view  # type: ignore[no-any-return]


def excerpt(nodes: Iterable[fx.Node], inputs: Iterable[fx.Node], results: Iterable[fx.Node]) -> fx.Graph:
    """Copy some nodes of a graph, with their names and metadata, to a new graph.

    Args:
        nodes: to copy, in topological order.
        inputs: nodes that become placeholders.
        results: nodes that the graph returns, as a tuple.

    Example:
        >>> x, plus, times, _ = fx.symbolic_trace(lambda x: (x + 1) * 2).graph.nodes
        >>> part = excerpt([times], inputs=[plus], results=[times])
        >>> [node.name for node in part.nodes]
        ['add', 'mul', 'output']
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in results))
    return graph


def with_copies(
    module: fx.GraphModule, names: Container[str], make: Callable[[str, Callable[[Tensor], Tensor]], nn.Module]
) -> tuple[fx.GraphModule, list[str]]:
    """The same graph, with modules in place of copies that it only returns.

    Args:
        module: a part of a program; it stays as it is.
        names: of the copies.
        make: makes the module for a copy, given its name and what copies a tensor.

    Returns:
        The graph, and the names of the copies that were replaced.

    Example:
        >>> def f(x):
        ...     return (torch.clone(x),)
        >>> graph, names = with_copies(fx.symbolic_trace(f), {"clone"}, lambda name, copy: torch.nn.Identity())
        >>> names, [node.op for node in graph.graph.nodes]
        (['clone'], ['placeholder', 'call_module', 'output'])
    """
    root, graph, replaced = fx.GraphModule(module, fx.Graph()), copy.deepcopy(module.graph), []
    for name, child in module.named_children():
        root.add_module(name, child)
    output = graph.output_node()
    for node in [*graph.nodes]:
        source = node.args[0] if node.args else None
        if node.name in names and [*node.users] == [output] and node.all_input_nodes == [source]:
            called = f"{node.name}_beside"
            root.add_module(called, make(node.name, partial(_first_of, node.target, node.args[1:], node.kwargs)))
            with graph.inserting_before(node):
                node.replace_all_uses_with(graph.call_module(called, (source,)))
            graph.erase_node(node)
            replaced.append(node.name)
    return fx.GraphModule(root, graph), replaced


def _first_of(target: Callable[..., Tensor], args: Sequence[Any], kwargs: Mapping[str, Any], source: Tensor) -> Tensor:
    return target(source, *args, **kwargs)


class _Writer:
    """Writes one section after another, and the graph that calls them."""

    def __init__(
        self, program: Program, graph: OpGraph, parts: Sequence[Part], bound: Sequence[bool], views: Container[str]
    ) -> None:
        self._program, self._root = program, program.module
        self._graph, self._parts = graph, parts
        self._arguments = {placeholder.name: placeholder for placeholder in program.placeholders}
        original = program.module.graph
        by_name = {node.name: node for node in original.nodes}
        placeholders = original.find_nodes(op="placeholder")
        self._bound = {node for node, stays in zip(placeholders, bound, strict=True) if stays}
        self._position = {node: at for at, node in enumerate(original.nodes)}

        def nodes_of(op: Op) -> list[fx.Node]:
            return [by_name[name] for name in op.nodes if not (op.crosses == "peer" and name in views)]

        nodes = [[node for op in part.ops for node in nodes_of(graph.ops[op])] for part in parts]
        in_parts = set(chain.from_iterable(nodes))
        self._copied = {node for node in original.nodes if node.name in views and node not in in_parts}
        # Other nodes of the prelude come before all ops, since an op may write what they read.
        for node in reversed([node for node in map(by_name.__getitem__, graph.prelude) if node not in self._copied]):
            nodes[_first_part(parts, _devices_of(node))].insert(0, node)
        self._nodes = nodes
        self._parts_of = defaultdict[fx.Node, set[int]](set)
        for at, node in ((at, node) for at, of_part in enumerate(nodes) for node in of_part):
            self._parts_of[node].add(at)
        self._output = original.output_node()
        self._whole = fx.Graph()
        self._values = {node: self._whole.node_copy(node) for node in placeholders}
        self._ends = [self._last]  # before the first part, then of each

    @property
    def _last(self) -> fx.Node | None:
        return next(iter(reversed(self._whole.nodes)), None)

    def section(self, at: int) -> Section:
        """Write the next part, and a call of it in the graph of the whole program."""
        inside = {*self._copied_for(self._nodes[at]), *self._nodes[at]}
        nodes = sorted(inside, key=self._position.__getitem__)
        inputs = dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source not in inside)
        arguments = sorted(inputs, key=lambda node: node not in self._bound)
        results = [node for node in self._nodes[at] if self._is_result(node)]
        module = fx.GraphModule(self._root, excerpt(nodes, arguments, results), class_name="Section")
        name, part = f"part_{at}", self._parts[at]
        if part.beside:
            for node in nodes:
                self._values[node] = self._copy_beside(node)
        else:
            call = self._whole.call_module(name, tuple(self._values[node] for node in arguments))
            for index, node in enumerate(results):
                self._values[node] = self._whole.call_function(operator.getitem, (call, index))
        self._ends.append(self._last)
        program = replace(
            self._program,
            module=module,
            placeholders=tuple(self._placeholders(arguments)),
            outputs=tuple(node.name for node in results),
        )
        bound = frozenset(range(len(self._bound.intersection(arguments))))
        return Section(name, program, bound, part.captured, part.beside)

    def _copy_beside(self, node: fx.Node) -> fx.Node:
        """Write a node of a part that runs beside others into the graph of the whole program."""
        op, target = self._graph.ops.get(node.name), node.target
        if op is None or not isinstance(target, OpOverload):  # views
            return self._whole.node_copy(node, self._values.__getitem__)
        value: Tensor = node.meta["val"]
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._values.__getitem__)
        if op.crosses == "download" or not op.allocates:
            since = self._call_before(node, op, host_copies.mark)
            arguments = (since, op.device, op.crosses, target, *args)
            return self._whole.call_function(host_copies.copy_beside, arguments, kwargs)
        if base_name(target) in _UPLOADS and _has_static_layout(value):
            layout = (tuple(value.shape), value.stride(), value.dtype)
            destination = self._call_before(node, op, host_copies.reserve, *layout)
            non_blocking = bound_arguments(node, target)["non_blocking"]
            return self._whole.call_function(host_copies.upload, (destination, args[0], non_blocking))
        return self._whole.node_copy(node, self._values.__getitem__)

    def _call_before(self, node: fx.Node, op: Op, function: Callable[..., Any], *arguments: Any) -> fx.Node:
        """Write a call at the end of the last part that a copy depends on."""
        ops = list(self._graph.ops)
        before = {ops[at] for at in self._graph.predecessors[ops.index(op.name)]}
        needed = {at for at, part in enumerate(self._parts) if not before.isdisjoint(part.ops)}
        needed = needed.union(*(self._parts_of[source] for source in node.all_input_nodes))
        ended = range(len(self._ends) - 1)  # nodes that only the copy needs are in its own part
        with self._whole.inserting_after(self._ends[1 + max(needed.intersection(ended), default=-1)]):
            return self._whole.call_function(function, (op.device, *arguments))

    def whole(self, sections: Mapping[str, fx.GraphModule]) -> fx.GraphModule:
        """The module that calls the sections."""
        for node in [*self._copied_for([self._output]), self._output]:
            self._values[node] = self._whole.node_copy(node, self._values.__getitem__)
        root = fx.GraphModule(self._root, fx.Graph())
        for name, module in {**dict(self._root.named_children()), **sections}.items():
            root.add_module(name, module)
        return fx.GraphModule(root, self._whole, class_name="Cut")

    def _placeholders(self, arguments: Sequence[fx.Node]) -> Iterator[Placeholder]:
        owners: dict[object, str] = {}
        for at, node in enumerate(arguments):
            (block, *_) = [*storages_of(node), node.name]
            role = self._arguments[node.name].role if node.name in self._arguments else Role.INPUT
            yield Placeholder(node.name, role, str(at), owners.setdefault(block or node.name, node.name))

    def _is_result(self, node: fx.Node) -> bool:
        """Whether a node is used outside of the part that computes it."""
        return any(
            user is self._output or user in self._copied or self._parts_of[user] - self._parts_of[node]
            for user in node.users
        )

    def _copied_for(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        """The nodes that each part copies, of which these nodes use some, in program order."""
        pending, copied = list(nodes), set[fx.Node]()
        for node in pending:
            new = [source for source in node.all_input_nodes if source in self._copied and source not in copied]
            copied.update(new)
            pending += new
        return sorted(copied, key=self._position.__getitem__)


_UPLOADS = ("to", "_to_copy")


def _has_static_layout(value: Tensor) -> bool:
    """Whether a tensor can be allocated before anything is known of a call."""
    numbers = (*value.shape, *value.stride()) if value.layout is torch.strided else (None,)
    return all(isinstance(number, int) for number in numbers)


def _first_part(parts: Sequence[Part], devices: Collection[str]) -> int:
    """The first part that may have a node with values on these devices: a captured part has those of its own only."""
    if not devices or len({part.device for part in parts if part.captured}) < 2:
        return 0
    return next((at for at, part in enumerate(parts) if not part.captured or part.device in devices), 0)


def _devices_of(node: fx.Node) -> frozenset[str]:
    tensors = (leaf for leaf in tree_leaves(node.meta.get("val")) if isinstance(leaf, Tensor))
    return frozenset(str(tensor.device) for tensor in tensors) - {"cpu"}
