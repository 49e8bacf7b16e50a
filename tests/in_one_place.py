"""Graphs that leave shared outputs at one address, as captured graphs do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autostream.dispatch.compiled_graph import CompiledGraph
from autostream.runtime.lower import storages_of


class InOnePlace(CompiledGraph):
    """It has the shared outputs that it computes at the same addresses in each call."""

    shared: frozenset[int] = frozenset()

    def share_outputs(self, values: Sequence[Any], indices: frozenset[int], *, aliased: bool = False) -> frozenset[int]:
        graph = self._module.graph
        given = {storage for node in graph.find_nodes(op="placeholder") for storage in storages_of(node)}
        results: Any = graph.output_node().args[0]
        self.shared = frozenset(at for at in indices if given.isdisjoint(storages_of(results[at])))
        return self.shared

    def __call__(self, *values: Any) -> list[Any]:
        outputs = list(super().__call__(*values))
        memory = self.__dict__.setdefault("memory", {})
        for at in self.shared:
            outputs[at] = memory.setdefault(at, outputs[at].clone()).copy_(outputs[at])
        return outputs
