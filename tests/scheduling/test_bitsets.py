"""Closure and reduction agree with networkx, whatever the size of the blocks."""

from __future__ import annotations

import networkx as nx
from hypothesis import given
from hypothesis import strategies as st

from autostream.ir import OpGraph
from autostream.scheduling.bitsets import closure, reduction
from tests.scheduling.graphs import graph_of, random_graphs

sizes = st.integers(1, 13)
"""From one op a block to all ops in one."""


def positions(graph: OpGraph) -> nx.DiGraph[int]:
    """The graph of the ops' positions."""
    return nx.DiGraph(
        {at: {after: {} for after in row} for at, row in enumerate(graph.successors)}  # type: ignore[arg-type]
    )


@given(random_graphs(), sizes)
def test_closure_is_that_of_networkx(graph: OpGraph, size: int) -> None:
    found: dict[int, set[int]] = {at: set() for at in range(len(graph.ops))}
    for block in closure(graph.successors, size):
        for at, after in enumerate(block.after):
            found[at] |= {block.start + bit for bit in range(size) if after >> bit & 1}
            assert after >> size == 0
    assert found == {at: nx.descendants(positions(graph), at) for at in found}


@given(random_graphs(), sizes)
def test_reduction_is_that_of_networkx(graph: OpGraph, size: int) -> None:
    reduced = nx.transitive_reduction(positions(graph))
    assert reduction(graph.successors, size) == [sorted(reduced[at]) for at in range(len(graph.ops))]


def test_reduction_drops_what_follows_from_a_longer_path() -> None:
    """The chain a ─ b ─ c ─ d has shortcuts a ─ c and a ─ d."""
    assert reduction(graph_of("a-b a-c a-d b-c c-d").successors) == [[1], [2], [3], []]


def test_a_shortcut_across_many_blocks_is_seen() -> None:
    """A chain of 10,000 ops, of which the first also leads to the last."""
    chain = [[at + 1] for at in range(9_999)] + [[]]
    assert reduction([[1, 9_999], *chain[1:]]) == chain
