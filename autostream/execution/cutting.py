"""A program in parts: a graph for each, and one that calls them in turn.

What a part needs of earlier ones and of the program's arguments, it is given; what later ones need of it, it returns::

    x ──▶ part_0 ──▶ getitem ──▶ part_1 ──▶ …        getitem: one for each value that part_0 returns

Views of arguments and submodules are nobody's: each part that uses one makes its own.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from autostream.excerpt import excerpt
from autostream.execution.lower import storages_of
from autostream.ir import OpGraph, Placeholder, Program, Role
from autostream.scheduling.cut import Part


@dataclass(frozen=True, slots=True)
class Section:
    """What runs as one.

    Attributes:
        name: of the submodule that it is in the whole.
        program: takes values of the whole, those in ``bound`` first, and returns a tuple of them. Of one that is not
            captured, they may be numbers.
        bound: positions of its arguments that stay where they are from call to call.
        captured: whether in a CUDA graph.
    """

    name: str
    program: Program
    bound: frozenset[int]
    captured: bool


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
    sections = tuple(writer.section(at, part.captured) for at, part in enumerate(parts))
    return Whole(writer.whole({section.name: section.program.module for section in sections}), sections)


class _Writer:
    """Graphs in the making: one section after another, and the whole that calls them."""

    def __init__(
        self, program: Program, graph: OpGraph, parts: Sequence[Part], bound: Sequence[bool], looks: Container[str]
    ) -> None:
        self._program, self._root = program, program.module
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
        self._values: dict[fx.Node, fx.Node] = {}
        for node in placeholders:
            self._values[node] = self._whole.node_copy(node)

    def section(self, at: int, captured: bool) -> Section:
        """The next part, and a call of it in the whole."""
        nodes = [*self._common_to(self._own[at]), *self._own[at]]
        among = set(nodes)
        taken = dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source not in among)
        arguments = sorted(taken, key=lambda node: node not in self._bound)
        results = [node for node in self._own[at] if self._leaves(node)]
        module = fx.GraphModule(self._root, excerpt(fx.Graph(), arguments, nodes, results), class_name="Section")
        name = f"part_{at}"
        call = self._whole.call_module(name, tuple(self._values[node] for node in arguments))
        for place, node in enumerate(results):
            self._values[node] = self._whole.call_function(operator.getitem, (call, place))
        program = replace(
            self._program,
            module=module,
            placeholders=tuple(self._placeholders(arguments)),
            outputs=tuple(node.name for node in results),
        )
        return Section(name, program, frozenset(range(len(self._bound.intersection(arguments)))), captured)

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


def _first_part(parts: Sequence[Part], devices: Collection[str]) -> int:
    """The first part that may have a node with values on these devices: a graph holds none of another than its own."""
    if not devices or len({part.device for part in parts if part.captured}) < 2:
        return 0
    return next((at for at, part in enumerate(parts) if not part.captured or part.device in devices), 0)


def _devices_of(node: fx.Node) -> frozenset[str]:
    tensors = (leaf for leaf in tree_leaves(node.meta.get("val")) if isinstance(leaf, Tensor))
    return frozenset(str(tensor.device) for tensor in tensors) - {"cpu"}
