"""A program in parts: a graph for each, and one that calls them in turn.

What a part needs of earlier ones and of the program's arguments, it is given; what later ones need of it, it returns::

    x ──▶ part_0 ──▶ getitem ──▶ part_1 ──▶ …        getitem: one for each value that part_0 returns

Views of arguments and submodules are nobody's: each part that uses one makes its own.

Copies beside other parts stand in the whole itself (:mod:`~autostream.runtime.host_copies`). What they wait for ends
before those parts, and new memory that they copy to is taken there::

    x ──▶ reserve ──▶ part_0 ──▶ … ──▶ upload ──▶ part_2
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from autostream.ir import Op, OpGraph, Placeholder, Program, Role
from autostream.runtime import host_copies as crossing
from autostream.runtime.excerpt import excerpt
from autostream.runtime.lower import storages_of
from autostream.scheduling.cut import Part
from autostream.utils.operators import base_name, bound_arguments


@dataclass(frozen=True, slots=True)
class Section:
    """What runs as one.

    Attributes:
        name: of the submodule that it is in the whole.
        program: takes values of the whole, those in ``bound`` first, and returns a tuple of them. Of one that is not
            captured, they may be numbers.
        bound: positions of its arguments that stay where they are from call to call.
        captured: whether in a CUDA graph.
        beside: whether it is no submodule: its copies stand in the whole itself.
    """

    name: str
    program: Program
    bound: frozenset[int]
    captured: bool
    beside: bool


@dataclass(frozen=True, slots=True)
class Whole:
    """A program in parts.

    Attributes:
        module: takes and returns what the program does; it calls the sections, which are submodules.
        sections: in the order in which they run.
    """

    module: fx.GraphModule
    sections: tuple[Section, ...]


def take_apart(
    program: Program, graph: OpGraph, parts: Sequence[Part], bound: Sequence[bool], looks: Container[str]
) -> Whole:
    """Write parts of a program down as graphs.

    Takes linear time. The nodes keep names and metadata; ``program.module`` stays as it is.

    Args:
        program: the traced model.
        graph: its ops.
        parts: at least one; what :func:`~autostream.scheduling.cut.cut` made of it.
        bound: which of the program's arguments stay where they are from call to call.
        looks: nodes that only look at arguments, or name submodules.
    """
    writer = _Writer(program, graph, parts, bound, looks)
    sections = tuple(map(writer.section, range(len(parts))))
    called = {section.name: section.program.module for section in sections if not section.beside}
    return Whole(writer.whole(called), sections)


class _Writer:
    """Graphs in the making: one section after another, and the whole that calls them."""

    def __init__(
        self, program: Program, graph: OpGraph, parts: Sequence[Part], bound: Sequence[bool], looks: Container[str]
    ) -> None:
        self._program, self._root = program, program.module
        self._graph, self._parts = graph, parts
        self._given = {placeholder.name: placeholder for placeholder in program.placeholders}
        original = program.module.graph
        nodes = {node.name: node for node in original.nodes}
        placeholders = original.find_nodes(op="placeholder")
        self._bound = {node for node, stays in zip(placeholders, bound, strict=True) if stays}
        self._place = {node: at for at, node in enumerate(original.nodes)}
        own = [[nodes[name] for op in part.ops for name in graph.ops[op].nodes] for part in parts]
        of_parts = set(chain.from_iterable(own))
        self._common = {node for node in original.nodes if node.name in looks and node not in of_parts}
        # What is neither an op's nor everybody's comes before all ops that may write what it looks at.
        for node in reversed([node for node in map(nodes.__getitem__, graph.prelude) if node not in self._common]):
            own[_first_part(parts, _devices_of(node))].insert(0, node)
        self._own = own
        self._homes = defaultdict[fx.Node, set[int]](set)
        for at, node in ((at, node) for at, mine in enumerate(own) for node in mine):
            self._homes[node].add(at)
        self._output = original.output_node()
        self._whole = fx.Graph()
        self._values = {node: self._whole.node_copy(node) for node in placeholders}
        self._ends = [self._last]  # before the first part, then of each

    @property
    def _last(self) -> fx.Node | None:
        return next(iter(reversed(self._whole.nodes)), None)

    def section(self, at: int) -> Section:
        """The next part, and a call of it in the whole."""
        nodes = [*self._common_to(self._own[at]), *self._own[at]]
        among = set(nodes)
        taken = dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source not in among)
        arguments = sorted(taken, key=lambda node: node not in self._bound)
        results = [node for node in self._own[at] if self._leaves(node)]
        module = fx.GraphModule(self._root, excerpt(fx.Graph(), arguments, nodes, results), class_name="Section")
        name, part = f"part_{at}", self._parts[at]
        if part.beside:
            for node in nodes:
                self._values[node] = self._copied(node)
        else:
            call = self._whole.call_module(name, tuple(self._values[node] for node in arguments))
            for place, node in enumerate(results):
                self._values[node] = self._whole.call_function(operator.getitem, (call, place))
        self._ends.append(self._last)
        program = replace(
            self._program,
            module=module,
            placeholders=tuple(self._placeholders(arguments)),
            outputs=tuple(node.name for node in results),
        )
        bound = frozenset(range(len(self._bound.intersection(arguments))))
        return Section(name, program, bound, part.captured, part.beside)

    def _copied(self, node: fx.Node) -> fx.Node:
        """What stands in the whole for a node of a part that runs beside others."""
        op, target = self._graph.ops.get(node.name), node.target
        if op is None or not isinstance(target, OpOverload):  # views
            return self._whole.node_copy(node, self._values.__getitem__)
        value: Tensor = node.meta["val"]
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._values.__getitem__)
        if op.crosses == "download" or not op.allocates:
            since = self._begun(node, op, crossing.mark)
            given = (since, op.device, op.crosses, target, *args)
            return self._whole.call_function(crossing.copy_beside, given, kwargs)
        if base_name(target) in _UPLOADS and _has_known_layout(value):
            place = self._begun(node, op, crossing.reserve, tuple(value.shape), value.stride(), value.dtype)
            non_blocking = bound_arguments(node, target)["non_blocking"]
            return self._whole.call_function(crossing.upload, (place, args[0], non_blocking))
        return self._whole.node_copy(node, self._values.__getitem__)

    def _begun(self, node: fx.Node, op: Op, begin: Callable[..., Any], *arguments: Any) -> fx.Node:
        """A call at the end of the last part that a copy needs something of: an op, or what is none, such as memory."""
        ops = list(self._graph.ops)
        before = {ops[at] for at in self._graph.predecessors[ops.index(op.name)]}
        needed = {at for at, part in enumerate(self._parts) if not before.isdisjoint(part.ops)}
        needed = needed.union(*(self._homes[source] for source in node.all_input_nodes))
        ended = range(len(self._ends) - 1)  # what is taken for the copy alone is in its own part
        with self._whole.inserting_after(self._ends[1 + max(needed.intersection(ended), default=-1)]):
            return self._whole.call_function(begin, (op.device, *arguments))

    def whole(self, sections: Mapping[str, fx.GraphModule]) -> fx.GraphModule:
        """The graph that calls the sections."""
        for node in [*self._common_to([self._output]), self._output]:
            self._values[node] = self._whole.node_copy(node, self._values.__getitem__)
        root = fx.GraphModule(self._root, fx.Graph())
        for name, module in {**dict(self._root.named_children()), **sections}.items():
            root.add_module(name, module)
        return fx.GraphModule(root, self._whole, class_name="Cut")

    def _placeholders(self, arguments: Sequence[fx.Node]) -> Iterator[Placeholder]:
        owners: dict[object, str] = {}
        for place, node in enumerate(arguments):
            (block, *_) = [*storages_of(node), node.name]
            role = self._given[node.name].role if node.name in self._given else Role.INPUT
            yield Placeholder(node.name, role, str(place), owners.setdefault(block or node.name, node.name))

    def _leaves(self, node: fx.Node) -> bool:
        """Whether a node is used where it is not made."""
        return any(user is self._output or self._homes[user] - self._homes[node] for user in node.users)

    def _common_to(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        """What these nodes use of what everybody makes, in program order."""
        pending, found = list(nodes), set[fx.Node]()
        for node in pending:
            new = [source for source in node.all_input_nodes if source in self._common and source not in found]
            found.update(new)
            pending += new
        return sorted(found, key=self._place.__getitem__)


_UPLOADS = ("to", "_to_copy")


def _has_known_layout(value: Tensor) -> bool:
    """Whether memory for a tensor can be taken before anything is known of a call."""
    numbers = (*value.shape, *value.stride()) if value.layout is torch.strided else (None,)
    return all(isinstance(number, int) for number in numbers)


def _first_part(parts: Sequence[Part], devices: Collection[str]) -> int:
    """The first part that may have a node with values on these devices: a graph holds none of another than its own."""
    if not devices or len({part.device for part in parts if part.captured}) < 2:
        return 0
    return next((at for at, part in enumerate(parts) if not part.captured or part.device in devices), 0)


def _devices_of(node: fx.Node) -> frozenset[str]:
    tensors = (leaf for leaf in tree_leaves(node.meta.get("val")) if isinstance(leaf, Tensor))
    return frozenset(str(tensor.device) for tensor in tensors) - {"cpu"}
