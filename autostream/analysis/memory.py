"""Maps the values of a program to the storages that they occupy, and to parts of storages."""

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
"""Distinct names of storages, or of parts of them, in a deterministic order."""


class Memory:
    """The storages of a program and the nodes whose values occupy them; filled in program order.

    The storages of a tuple are kept by element, for ``getitem``. Every value that an op returns occupies a storage that
    the op writes, so that users of the value depend on the op. For a number, or a view of memory that the op does not
    write, this is a storage of 0 bytes.

    Args:
        divisions: the storages that ops use in parts.
    """

    def __init__(self, divisions: Iterable[Division] = ()) -> None:
        self._elements: dict[fx.Node, tuple[Names, ...]] = {}
        self._roles_and_bytes: dict[str, tuple[Role, int]] = {}
        self._holders: dict[str, list[str]] = {}
        self._placeable: set[str] = set()
        self._divisions = {division.base.name: division for division in divisions}

    def occupied(self, nodes: Iterable[fx.Node]) -> Names:
        """The storages that these nodes' values occupy."""
        return _union(element for node in nodes for element in self._elements[node])

    def touched(self, nodes: Iterable[fx.Node]) -> Names:
        """The storages, or parts of divided storages, that an access to these nodes' values touches."""
        if not self._divisions:
            return self.occupied(nodes)
        return _union(self._touched(node, storage) for node in nodes for storage in self.occupied([node]))

    def resources(self, touched: Names) -> Names:
        """These storages and parts, with each divided storage replaced by all of its parts."""
        if not self._divisions:
            return touched
        divisions = self._divisions
        return _union(divisions[name].parts if name in divisions else (name,) for name in touched)

    def add_placeholder(self, node: fx.Node, placeholder: Placeholder) -> None:
        """Add an argument of the program."""
        self._add_storage(placeholder.storage, placeholder.role, value_of(node))
        self._hold(node, [(placeholder.storage,)])

    def add_attribute(self, node: fx.Node) -> None:
        """Add a ``get_attr`` node: a tensor of the module, or a submodule, which occupies nothing."""
        if tensors_in(value_of(node)):
            self.add_placeholder(node, Placeholder(node.name, Role.CONSTANT, str(node.target), node.name))
        else:
            self._hold(node, [])

    def add_view(self, node: fx.Node) -> None:
        """Add a node that launches nothing."""
        self._hold(node, self._viewed(node))

    def viewed(self, node: fx.Node) -> Names:
        """The storages that a node which launches nothing views: those of its arguments."""
        return _union(self._viewed(node))

    def intermediate(self, storages: Names) -> Names:
        """Those of these storages that the program itself allocates."""
        return tuple(storage for storage in storages if self._roles_and_bytes[storage][0] is Role.INTERMEDIATE)

    def add_results(self, node: fx.Node, effects: Effects) -> Names:
        """Add a node that is an op. Returns the storages that it allocates."""
        results = _Results(self, node, effects)
        self._hold(node, [_union(map(results.occupied, tree_leaves(element))) for element in _elements_of(node)])
        return tuple(results.allocated)

    def add_memory(self, node: fx.Node, effects: Effects) -> Names:
        """Add a node that only allocates memory, which no op resizes. Returns the storages that it allocates."""
        allocated = self.add_results(node, effects)
        value = value_of(node)
        if isinstance(value, torch.Tensor) and all(isinstance(n, int) for n in (*value.shape, *value.stride())):
            self._placeable.update(allocated)
        return allocated

    def keep_apart(self, storages: Iterable[str]) -> None:
        """Keep these storages out of the arena, in blocks of their own."""
        self._placeable.difference_update(storages)

    def storages(self, outputs: Iterable[str]) -> dict[str, Storage]:
        """All storages by name; ``outputs`` names the nodes that the program returns."""
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
            for name, (role, size) in self._roles_and_bytes.items()
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

    def _add_storage(self, name: str, role: Role, value: Any) -> None:
        if name not in self._roles_and_bytes:
            self._roles_and_bytes[name] = (role, _bytes_of(value))
            self._holders[name] = []

    def _hold(self, node: fx.Node, elements: Iterable[Names]) -> None:
        self._elements[node] = tuple(elements)
        for name in self.occupied([node]):
            self._holders[name].append(node.name)


class _Results:
    """The storages that the results of one op occupy, leaf by leaf."""

    def __init__(self, memory: Memory, node: fx.Node, effects: Effects) -> None:
        self.allocated: dict[str, None] = {}
        self._memory, self._node, self._aliases = memory, node, effects.aliases
        self._written = frozenset(memory.occupied(effects.writes))
        self._seen: dict[int, Names] = {}  # by identity of the fake storage: what earlier leaves occupy
        self._aliased_arguments: dict[int, list[fx.Node]] = {}
        for source in () if effects.copies else node.all_input_nodes:
            for storage in storages_in(value_of(source)):
                self._aliased_arguments.setdefault(storage, []).append(source)
        self._leaves = 0

    def occupied(self, leaf: Any) -> Names:
        """The storages that the next leaf occupies."""
        name = f"{self._node.name}.{self._leaves}" if self._leaves else self._node.name
        self._leaves += 1
        storages = storages_in(leaf)
        shared = [source for storage in storages for source in self._aliased_arguments.get(storage, ())]
        viewed = self._memory.occupied(shared or (self._aliases if storages else ()))
        if shared and not self._written.isdisjoint(viewed):
            return viewed
        for storage in storages & self._seen.keys():
            return self._seen[storage]
        self._memory._add_storage(name, Role.INTERMEDIATE, None if shared else leaf)
        self.allocated[name] = None
        names = _union([(name,), viewed])
        self._seen.update(dict.fromkeys(storages, names))
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
