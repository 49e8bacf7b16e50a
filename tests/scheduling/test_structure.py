"""Critical path, slack, width and regions of drawn graphs by hand, and of random ones by brute force."""

from __future__ import annotations

from itertools import combinations

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autostream.ir import JOIN, OpGraph
from autostream.scheduling import structure
from tests.scheduling.graphs import costs_of, graph_of, random_costs, random_graphs

DIAMOND = graph_of("a-b a-d b-c c-e d-e")
r"""
a(1) ─ b(2) ─ c(3) ─ e(1)
   └── d(4) ──────────┘
"""

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

CROSSING = graph_of("a-c b-c c-d c-e", names="ab")
"""Three disjoint paths are needed to cover it, but two chains of its closure are enough.

a ─┐   ┌─ d
   ├ c ┤
b ─┘   └─ e
"""


def test_levels_slack_and_critical_path_of_a_diamond() -> None:
    costs = costs_of(DIAMOND, {"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0, "e": 1.0})
    assert structure.bottom_levels(DIAMOND, costs) == {"a": 7, "b": 6, "c": 4, "d": 5, "e": 1}
    assert structure.top_levels(DIAMOND, costs) == {"a": 0, "b": 1, "c": 3, "d": 1, "e": 6}
    assert structure.slack(DIAMOND, costs) == {"a": 0, "b": 0, "c": 0, "d": 1, "e": 0}
    assert structure.critical_path(DIAMOND, costs) == ("a", "b", "c", "e")
    equal = graph_of("a-b a-c b-d c-d")
    assert structure.critical_path(equal, costs_of(equal)) == ("a", "b", "d"), "the first in program order"


@pytest.mark.parametrize(
    ("graph", "width", "cuts", "branches"),
    [
        (graph_of(""), 0, "", ()),
        (graph_of("a-b a-c b-c"), 1, "abc", ()),  # an edge from a to c is no branch
        (DIAMOND, 2, "ae", (("b", "c"), ("d",))),
        (CROSSING, 2, "c", (("a",), ("b",))),
        (TWO_TOWERS, 2, (), (("a1", "a2", "a3"), ("b1", "b2"))),
        (INCEPTION, 4, ("stem", "cat", "head"), (("p",), ("q1", "q2"), ("r1", "r2", "r3"), ("s1", "s2"))),
    ],
)
def test_width_cuts_and_the_branches_of_the_first_region(
    graph: OpGraph, width: int, cuts: str, branches: tuple[tuple[str, ...], ...]
) -> None:
    assert structure.width(graph) == width
    assert structure.cuts(graph) == tuple(cuts)
    assert [region.branches for region in structure.regions(graph)][:1] == [branches][: len(branches)]


@given(random_graphs(max_ops=9), st.data())
def test_random_graphs_by_brute_force(graph: OpGraph, data: st.DataObject) -> None:
    """Cuts depend on all ops or the other way round, the width is the largest antichain, branches are independent."""
    reached = nx.transitive_closure_dag(graph.digraph)
    cuts = tuple(name for name in graph.ops if len({*reached.pred[name], *reached.succ[name]}) == len(graph.ops) - 1)
    assert structure.cuts(graph) == cuts
    assert structure.width(graph) == max(len(antichain) for antichain in nx.antichains(graph.digraph))
    for region in structure.regions(graph):
        for one, other in combinations(region.branches, 2):
            between = nx.subgraph(graph.digraph, [*one, *other]).edges
            assert all((before in one) == (after in one) for before, after in between)
    costs = data.draw(random_costs(graph))
    path = structure.critical_path(graph, costs)
    assert nx.is_path(graph.digraph, list(path))
    weights = {(before, after): costs[before].duration_us for before, after in graph.digraph.edges}
    weights |= {(name, JOIN): costs[name].duration_us for name in graph.ops}
    weighted = nx.DiGraph((before, after, {"weight": us}) for (before, after), us in weights.items())
    length = sum(costs[name].duration_us for name in path)
    assert length == nx.dag_longest_path_length(weighted) == max(structure.bottom_levels(graph, costs).values())
    assert all(structure.slack(graph, costs)[name] == 0 for name in path)


def test_ten_thousand_ops() -> None:
    """A hundred towers of a hundred ops: too many antichains to enumerate."""
    graph = graph_of([(f"t{tower}_{at}", f"t{tower}_{at + 1}") for tower in range(100) for at in range(99)])
    assert structure.width(graph) == 100
    assert [len(region.branches) for region in structure.regions(graph)] == [100]
