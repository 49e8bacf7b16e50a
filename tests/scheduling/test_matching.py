"""Matchings are valid, and as large as those of networkx, and stay right where its own would recurse too deep."""

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
def test_matching_is_valid_and_as_large_as_that_of_networkx(rows: list[list[int]]) -> None:
    matching = maximum_matching(rows)
    assert all(right in rows[left] for left, right in matching.items())
    assert len(set(matching.values())) == len(matching) == largest(rows)


@given(random_graphs(max_ops=14))
def test_chain_matching_is_one_of_the_closure_and_as_large_as_that_of_networkx(graph: OpGraph) -> None:
    successors = graph.successors
    digraph = nx.DiGraph((at, after) for at, row in enumerate(successors) for after in row)
    digraph.add_nodes_from(range(len(successors)))
    closure = [sorted(nx.descendants(digraph, at)) for at in range(len(successors))]
    matching = maximum_chain_matching(successors)
    assert all(right in closure[left] for left, right in matching.items())
    assert len(set(matching.values())) == len(matching) == largest(closure)


def test_a_long_augmenting_path_needs_no_recursion() -> None:
    """Left i may have right i or i + 1, the last only the first: greedy gives everyone i, and then all must move on."""
    count = 3000
    rows = [[at, at + 1] for at in range(count)] + [[0]]
    assert maximum_matching(rows) == {at: at + 1 for at in range(count)} | {count: 0}


def test_paths_that_cross_in_one_op_again_and_again_are_two_chains() -> None:
    """Every third op is one that two come before and two after: no two chains of edges get past it.

    0 ─┐   ┌─ 3 ─┐   ┌─ 6 ─┐
       ├ 2 ┤     ├ 5 ┤     ├ …
    1 ─┘   └─ 4 ─┘   └─ 7 ─┘
    """
    count = 30_000
    successors = [[at + 1, at + 2] if at % 3 == 2 else [at + 2 - at % 3] for at in range(count - 1)] + [[]]
    assert len(maximum_matching(successors)) == count - 1 - count // 3
    assert len(maximum_chain_matching(successors)) == count - 2


def test_a_match_gives_way_where_another_lies_behind_an_op_that_is_taken() -> None:
    """Of the edges to 5, that from 1 is taken first; 4 gets it when 1 goes past 2 and on to 4.

    0 ─┐   ┌─ 3
       ├ 2 ┤
    1 ─┤   └─ 4 ─┐
       └─────────┴─ 5
    """
    successors = [[2], [2, 5], [3, 4], [], [5], []]
    assert len(maximum_matching(successors)) == 3
    assert maximum_chain_matching(successors) == {0: 2, 1: 4, 2: 3, 4: 5}
