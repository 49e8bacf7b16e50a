"""Transitive closure and reduction are those of networkx, whatever the size of the blocks."""

from __future__ import annotations

import networkx as nx
from hypothesis import given
from hypothesis import strategies as st

from autostream.ir import OpGraph
from autostream.scheduling.bitsets import closure, reduction
from tests.scheduling.graphs import random_graphs


@given(random_graphs(), st.integers(1, 13))
def test_closure_and_reduction_are_those_of_networkx(graph: OpGraph, size: int) -> None:
    """From one op a block to all ops in one."""
    rows = {at: {after: {} for after in row} for at, row in enumerate(graph.successors)}
    digraph: nx.DiGraph[int] = nx.DiGraph(rows)  # type: ignore[arg-type]
    found: dict[int, set[int]] = {at: set() for at in range(len(graph.ops))}
    for block in closure(graph.successors, size):
        for at, after in enumerate(block.after):
            found[at] |= {block.start + bit for bit in range(size) if after >> bit & 1}
            assert after >> size == 0
    assert found == {at: nx.descendants(digraph, at) for at in found}
    reduced = nx.transitive_reduction(digraph)
    assert reduction(graph.successors, size) == [sorted(reduced[at]) for at in range(len(graph.ops))]


def test_an_edge_across_many_blocks_is_removed() -> None:
    """A chain of 10,000 ops, of which the first also leads to the last."""
    chain = [[at + 1] for at in range(9_999)] + [[]]
    assert reduction([[1, 9_999], *chain[1:]]) == chain
