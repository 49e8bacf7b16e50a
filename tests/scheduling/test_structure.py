"""What the shape of a graph allows, on drawn graphs worked out by hand and on random ones by brute force."""

from __future__ import annotations

from itertools import combinations

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autostream.ir import FORK, JOIN, Costs, OpGraph
from autostream.scheduling import structure
from autostream.scheduling.structure import Region
from tests.scheduling.graphs import costs_of, graph_of, random_costs, random_graphs

DIAMOND = graph_of("a-b a-d b-c c-e d-e")
r"""
a(1) ─ b(2) ─ c(3) ─ e(1)
   └── d(4) ──────────┘
"""
DIAMOND_COSTS = costs_of(DIAMOND, {"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0, "e": 1.0})

TWO_TOWERS = graph_of("a1-a2 a2-a3 b1-b2")
"""
a1 ─ a2 ─ a3
b1 ─ b2
"""

INCEPTION = graph_of("stem-p stem-q1 stem-r1 stem-s1 q1-q2 r1-r2 r2-r3 s1-s2 p-cat q2-cat r3-cat s2-cat cat-head")
"""
        ┌─ p ─────────────┐
        ├─ q1 ─ q2 ───────┤
 stem ──┤                 ├─ cat ─ head
        ├─ r1 ─ r2 ─ r3 ──┤
        └─ s1 ─ s2 ───────┘
"""


def test_levels_and_slack_of_a_diamond() -> None:
    assert structure.bottom_levels(DIAMOND, DIAMOND_COSTS) == {"a": 7, "b": 6, "c": 4, "d": 5, "e": 1}
    assert structure.top_levels(DIAMOND, DIAMOND_COSTS) == {"a": 0, "b": 1, "c": 3, "d": 1, "e": 6}
    assert structure.slack(DIAMOND, DIAMOND_COSTS) == {"a": 0, "b": 0, "c": 0, "d": 1, "e": 0}


def test_critical_path_of_a_diamond() -> None:
    assert structure.critical_path(DIAMOND, DIAMOND_COSTS) == ("a", "b", "c", "e")


def test_of_equal_paths_the_first_in_program_order_is_critical() -> None:
    graph = graph_of("a-b a-c b-d c-d")
    assert structure.critical_path(graph, costs_of(graph)) == ("a", "b", "d")


def test_an_empty_graph_has_no_path() -> None:
    graph = graph_of("")
    assert structure.critical_path(graph, {}) == ()
    assert structure.width(graph) == 0
    assert structure.regions(graph) == ()


@pytest.mark.parametrize(
    ("graph", "width"),
    [
        (graph_of("a-b b-c"), 1),
        (DIAMOND, 2),
        (TWO_TOWERS, 2),
        (INCEPTION, 4),
        (graph_of([("a", f"b{at}") for at in range(20)]), 20),
        (graph_of("a-c a-d b-d b-e c-f d-f e-f", names="abcdef"), 3),
    ],
)
def test_width_of_drawn_graphs(graph: OpGraph, width: int) -> None:
    assert structure.width(graph) == width


def test_width_counts_chains_of_the_closure_not_of_the_graph() -> None:
    """Two paths cross in c: three disjoint paths are needed to cover the graph, but no three ops are independent.

    a ─┐   ┌─ d
       ├ c ┤
    b ─┘   └─ e
    """
    assert structure.width(graph_of("a-c b-c c-d c-e", names="ab")) == 2


def test_regions_of_an_inception_block() -> None:
    assert structure.cuts(INCEPTION) == ("stem", "cat", "head")
    branches = (("p",), ("q1", "q2"), ("r1", "r2", "r3"), ("s1", "s2"))
    assert structure.regions(INCEPTION) == (Region("stem", "cat", branches),)


def test_towers_are_branches_between_fork_and_join() -> None:
    assert structure.cuts(TWO_TOWERS) == ()
    assert structure.regions(TWO_TOWERS) == (Region(FORK, JOIN, (("a1", "a2", "a3"), ("b1", "b2"))),)


def test_a_skip_connection_is_no_branch() -> None:
    """In a ─ b ─ c the shortcut a ─ c is nothing to run beside b."""
    assert structure.regions(graph_of("a-b a-c b-c")) == ()


@given(random_graphs())
def test_cuts_are_the_ops_that_nothing_is_independent_of(graph: OpGraph) -> None:
    reached = nx.transitive_closure_dag(graph.digraph)
    alone = tuple(name for name in graph.ops if len({*reached.pred[name], *reached.succ[name]}) == len(graph.ops) - 1)
    assert structure.cuts(graph) == alone


@given(random_graphs(max_ops=9))
def test_width_is_the_largest_antichain(graph: OpGraph) -> None:
    assert structure.width(graph) == max(len(antichain) for antichain in nx.antichains(graph.digraph))


@given(random_graphs())
def test_branches_of_a_region_do_not_depend_on_each_other(graph: OpGraph) -> None:
    for region in structure.regions(graph):
        for one, other in combinations(region.branches, 2):
            between = nx.subgraph(graph.digraph, [*one, *other]).edges
            assert all((before in one) == (after in one) for before, after in between)


@given(st.data())
def test_critical_path_is_a_longest_path(data: st.DataObject) -> None:
    graph = data.draw(random_graphs())
    costs: Costs = data.draw(random_costs(graph))
    path = structure.critical_path(graph, costs)
    assert nx.is_path(graph.digraph, list(path))
    length = sum(costs[name].duration_us for name in path)
    weighted = nx.DiGraph(
        (dep.before, dep.after, {"weight": costs[dep.before].duration_us}) for dep in graph.dependencies
    )
    weighted.add_weighted_edges_from((name, JOIN, costs[name].duration_us) for name in graph.ops)
    assert length == nx.dag_longest_path_length(weighted) == max(structure.bottom_levels(graph, costs).values())
    assert all(structure.slack(graph, costs)[name] == 0 for name in path)


def test_ten_thousand_ops() -> None:
    """A hundred towers of a hundred ops: a closure with half a million pairs, where antichains are beyond counting."""
    graph = graph_of([(f"t{tower}_{at}", f"t{tower}_{at + 1}") for tower in range(100) for at in range(99)])
    assert structure.width(graph) == 100
    assert [len(region.branches) for region in structure.regions(graph)] == [100]
