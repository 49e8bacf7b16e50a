"""Closure, reduction and matching agree with networkx, and stay right where its matching would recurse too deep."""

from __future__ import annotations

import networkx as nx
from hypothesis import given
from hypothesis import strategies as st

from autostream.ir import OpGraph
from autostream.scheduling.bitsets import ancestors, descendants, maximum_matching, members, reduction
from tests.scheduling.graphs import graph_of, random_graphs


def names_of(graph: OpGraph, rows: tuple[int, ...]) -> dict[str, set[str]]:
    names = list(graph.ops)
    return {name: {names[at] for at in members(row)} for name, row in zip(names, rows, strict=True)}


@given(random_graphs())
def test_closure_is_that_of_networkx(graph: OpGraph) -> None:
    assert names_of(graph, descendants(graph)) == {name: nx.descendants(graph.digraph, name) for name in graph.ops}
    assert names_of(graph, ancestors(graph)) == {name: nx.ancestors(graph.digraph, name) for name in graph.ops}


@given(random_graphs())
def test_reduction_is_that_of_networkx(graph: OpGraph) -> None:
    reduced = nx.transitive_reduction(graph.digraph)
    assert names_of(graph, reduction(graph)) == {name: set(reduced.successors(name)) for name in graph.ops}


def test_reduction_drops_what_follows_from_a_longer_path() -> None:
    """The chain a ─ b ─ c ─ d has shortcuts a ─ c and a ─ d."""
    graph = graph_of("a-b a-c a-d b-c c-d")
    assert names_of(graph, reduction(graph)) == {"a": {"b"}, "b": {"c"}, "c": {"d"}, "d": set()}


@given(st.lists(st.integers(0, 2**8 - 1), max_size=8))
def test_matching_is_valid_and_as_large_as_that_of_networkx(rows: list[int]) -> None:
    matching = maximum_matching(rows)
    assert all(rows[left] >> right & 1 for left, right in matching.items())
    assert len(set(matching.values())) == len(matching)
    bipartite = nx.Graph()
    bipartite.add_nodes_from(("left", left) for left in range(len(rows)))
    bipartite.add_edges_from(
        (("left", left), ("right", right)) for left, row in enumerate(rows) for right in members(row)
    )
    lefts = [("left", left) for left in range(len(rows))]
    assert len(matching) == len(nx.bipartite.hopcroft_karp_matching(bipartite, lefts)) // 2


def test_a_long_augmenting_path_needs_no_recursion() -> None:
    """Left i may have right i or i + 1, the last only the first: greedy gives everyone i, and then all must move on."""
    count = 3000
    rows = [0b11 << at for at in range(count)] + [0b1]
    assert maximum_matching(rows) == {at: at + 1 for at in range(count)} | {count: 0}
