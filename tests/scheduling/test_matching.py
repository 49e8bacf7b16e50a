"""Matchings are valid, as large as those of networkx, and need no recursion."""

from __future__ import annotations

import networkx as nx
from hypothesis import given
from hypothesis import strategies as st

from autostream.ir import OpGraph
from autostream.scheduling.matching import maximum_chain_matching, maximum_matching
from tests.scheduling.graphs import random_graphs


def largest(rows: list[list[int]]) -> int:
    """How many pairs a maximum matching has."""
    bipartite = nx.Graph((("left", left), ("right", right)) for left, row in enumerate(rows) for right in row)
    return len(nx.bipartite.hopcroft_karp_matching(bipartite, [node for node in bipartite if node[0] == "left"])) // 2


@given(st.lists(st.sets(st.integers(0, 7)).map(sorted), max_size=8))
def test_a_matching_is_valid_and_as_large_as_that_of_networkx(rows: list[list[int]]) -> None:
    matching = maximum_matching(rows)
    assert all(right in rows[left] for left, right in matching.items())
    assert len(set(matching.values())) == len(matching) == largest(rows)


@given(random_graphs(max_ops=14))
def test_a_chain_matching_is_one_of_the_closure_and_as_large_as_that_of_networkx(graph: OpGraph) -> None:
    digraph = nx.DiGraph((at, after) for at, row in enumerate(graph.successors) for after in row)
    digraph.add_nodes_from(range(len(graph.ops)))
    closure = [sorted(nx.descendants(digraph, at)) for at in range(len(graph.ops))]
    matching = maximum_chain_matching(graph.successors)
    assert all(right in closure[left] for left, right in matching.items())
    assert len(set(matching.values())) == len(matching) == largest(closure)


def test_a_long_augmenting_path_needs_no_recursion() -> None:
    """Left i may have right i or i + 1, the last only 0: a greedy matching gives all of them i, and all must change."""
    count = 3000
    rows = [[at, at + 1] for at in range(count)] + [[0]]
    assert maximum_matching(rows) == {at: at + 1 for at in range(count)} | {count: 0}


def test_paths_that_cross_many_times_are_two_chains() -> None:
    """No two disjoint paths get past every third op, but two chains of the closure do.

    0 ─┐   ┌─ 3 ─┐   ┌─ 6 ─┐
       ├ 2 ┤     ├ 5 ┤     ├ …
    1 ─┘   └─ 4 ─┘   └─ 7 ─┘
    """
    count = 30_000
    successors = [[at + 1, at + 2] if at % 3 == 2 else [at + 2 - at % 3] for at in range(count - 1)] + [[]]
    assert len(maximum_matching(successors)) == count - 1 - count // 3
    assert len(maximum_chain_matching(successors)) == count - 2
