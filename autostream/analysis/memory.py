"""Which storages, and which parts of them, the values of a program occupy."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from autostream.analysis.effects import Effects
from autostream.analysis.parts import Division
from autostream.analysis.values import concrete, storages_in, tensors_in, value_of
from autostream.ir import Placeholder, Role, Storage

Names = tuple[str, ...]
"""Names of storages, or of parts of them, without repetition, in an order that depends on the program alone."""


class Memory:
    """The storages of a program and the nodes whose values occupy them; filled in program order.

    A tuple occupies storages element by element, so that ``getitem`` can pick. Every value that an op yields occupies
    a storage which that op writes, so that whoever uses the value depends on the op: where the value is a number, or
    a look at memory that the op leaves as it is, that is a storage of 0 bytes.

    Args:
        divisions: the storages that ops use in parts.
    """

    def __init__(self, divisions: Iterable[Division] = ()) -> None:
        self._elements: dict[fx.Node, tuple[Names, ...]] = {}
        self._made: dict[str, tuple[Role, int]] = {}
        self._holders: dict[str, list[str]] = {}
        self._placeable: set[str] = set()
        self._divisions = {division.maker.name: division for division in divisions}

    def occupied(self, nodes: Iterable[fx.Node]) -> Names:
        """The storages that these nodes' values occupy."""
        return _union(element for node in nodes for element in self._elements[node])

    def touched(self, nodes: Iterable[fx.Node]) -> Names:
        """What an access to these nodes' values touches: storages, or parts of those that are divided."""
        if not self._divisions:
            return self.occupied(nodes)
        return _union(self._touched(node, storage) for node in nodes for storage in self.occupied([node]))

    def resources(self, touched: Names) -> Names:
        """The same with the names of all parts in the place of a divided storage's."""
        if not self._divisions:
            return touched
        divisions = self._divisions
        return _union(divisions[name].parts if name in divisions else (name,) for name in touched)

    def add_placeholder(self, node: fx.Node, placeholder: Placeholder) -> None:
        """Take in an argument of the program."""
        self._make(placeholder.storage, placeholder.role, value_of(node))
        self._hold(node, [(placeholder.storage,)])

    def add_attribute(self, node: fx.Node) -> None:
        """Take in a ``get_attr`` node: a tensor of the module, or a submodule, which is no value."""
        if tensors_in(value_of(node)):
            self.add_placeholder(node, Placeholder(node.name, Role.CONSTANT, str(node.target), node.name))
        else:
            self._hold(node, [])

    def add_view(self, node: fx.Node) -> None:
        """Take in a node that launches nothing."""
        self._hold(node, self._viewed(node))

    def viewed(self, node: fx.Node) -> Names:
        """The storages that a node which launches nothing looks at: those of its arguments."""
        return _union(self._viewed(node))

    def made(self, storages: Names) -> Names:
        """Those that come into being in the program."""
        return tuple(storage for storage in storages if self._made[storage][0] is Role.INTERMEDIATE)

    def add_results(self, node: fx.Node, effects: Effects) -> Names:
        """Take in a node that is an op. Returns the storages that come into being."""
        results = _Results(self, node, effects)
        self._hold(node, [_union(map(results.occupied, tree_leaves(element))) for element in _elements_of(node)])
        return tuple(results.made)

    def add_memory(self, node: fx.Node, effects: Effects) -> Names:
        """Take in a node that only takes memory, which no op resizes. Returns the storages that come into being."""
        made = self.add_results(node, effects)
        value = value_of(node)
        if isinstance(value, torch.Tensor) and all(isinstance(n, int) for n in (*value.shape, *value.stride())):
            self._placeable.update(made)
        return made

    def keep_apart(self, storages: Iterable[str]) -> None:
        """Leave these storages blocks of their own."""
        self._placeable.difference_update(storages)

    def storages(self, outputs: Iterable[str]) -> dict[str, Storage]:
        """All storages by name, given the names of the nodes that a program returns."""
        returned = set(outputs)
        return {
            name: Storage(
                name,
                role,
                size,
                tuple(self._holders[name]),
                escapes=not returned.isdisjoint(self._holders[name]),
                parts=self._divisions[name].parts if name in self._divisions else (),
                placeable=name in self._placeable,
            )
            for name, (role, size) in self._made.items()
        }

    def _touched(self, node: fx.Node, storage: str) -> Names:
        division = self._divisions.get(storage)
        return (storage,) if division is None else division.touched.get(node, (storage,))

    def _viewed(self, node: fx.Node) -> tuple[Names, ...]:
        if node.target is operator.getitem:
            source, index = node.args
            elements = self._elements[source]  # type: ignore[index]
            if isinstance(index, int) and isinstance(value_of(source), (list, tuple)):  # type: ignore[arg-type]
                return (elements[index],)
        return (self.occupied(node.all_input_nodes),) * max(1, len(_elements_of(node)))

    def _make(self, name: str, role: Role, value: Any) -> None:
        if name not in self._made:
            self._made[name] = (role, _bytes_of(value))
            self._holders[name] = []

    def _hold(self, node: fx.Node, elements: Iterable[Names]) -> None:
        self._elements[node] = tuple(elements)
        for name in self.occupied([node]):
            self._holders[name].append(node.name)


class _Results:
    """What the results of one op occupy, leaf by leaf."""

    def __init__(self, memory: Memory, node: fx.Node, effects: Effects) -> None:
        self.made: dict[str, None] = {}
        self._memory, self._node, self._aliases = memory, node, effects.aliases
        self._written = frozenset(memory.occupied(effects.writes))
        self._own: dict[int, Names] = {}
        self._lookers: dict[int, list[fx.Node]] = {}
        for source in () if effects.copies else node.all_input_nodes:
            for storage in storages_in(value_of(source)):
                self._lookers.setdefault(storage, []).append(source)
        self._leaves = 0

    def occupied(self, leaf: Any) -> Names:
        """The storages that the next leaf occupies."""
        name = f"{self._node.name}.{self._leaves}" if self._leaves else self._node.name
        self._leaves += 1
        storages = storages_in(leaf)
        shared = [source for storage in storages for source in self._lookers.get(storage, ())]
        looked_at = self._memory.occupied(shared or (self._aliases if storages else ()))
        if shared and not self._written.isdisjoint(looked_at):
            return looked_at
        for storage in storages & self._own.keys():
            return self._own[storage]
        self._memory._make(name, Role.INTERMEDIATE, None if shared else leaf)
        self.made[name] = None
        names = _union([(name,), looked_at])
        self._own.update(dict.fromkeys(storages, names))
        return names


def _elements_of(node: fx.Node) -> list[Any]:
    value = value_of(node)
    if isinstance(value, (list, tuple)):
        return list(value)
    return [value] if value is not None or node.users else []


def _bytes_of(value: Any) -> int:
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return 0
    return concrete(value.untyped_storage().nbytes())


def _union(names: Iterable[Names]) -> Names:
    return tuple(dict.fromkeys(name for group in names for name in group))
