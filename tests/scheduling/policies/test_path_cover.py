"""Path covers on drawn graphs worked out by hand, and their size by networkx."""

from __future__ import annotations

from itertools import combinations, pairwise

import networkx as nx
import pytest
from hypothesis import given

from autostream.ir import Decision, OpGraph
from autostream.scheduling.policies.path_cover import minimum_path_cover, path_cover
from tests.scheduling.graphs import FREE, costs_of, graph_of, random_graphs

NONE: frozenset[str] = frozenset()


@pytest.mark.parametrize(
    ("edges", "paths", "stream"),
    [
        # a ─┬─ d      a greedy choice of c for a is undone
        # b ─┴─ c
        ("a-c a-d b-c", "ad bc", "0110"),
        # a ── b ── c      the edge from a to c is implied
        ("a-b a-c b-c", "abc", "000"),
        # a ─┬─ b ─┬─ d ─┬─ e ─┬─ g      c ends before f starts: two streams for three paths
        #    └─ c ─┘     └─ f ─┘
        ("a-b a-c b-d c-d d-e d-f e-g f-g", "abdeg c f", "0010010"),
        # a ─┬─ b ─┬─ d      e begins when c ends
        #    └─ c  └─ e
        ("a-b a-c b-d b-e", "abd c e", "00101"),
    ],
)
def test_paths_and_their_streams(edges: str, paths: str, stream: str) -> None:
    graph = graph_of(edges, names=sorted({*edges} - {*"- "}))
    assert " ".join("".join(path) for path in minimum_path_cover(graph)) == paths
    assert "".join(map(str, path_cover(graph, costs_of(graph), FREE, 8, NONE).stream.values())) == stream


def test_further_paths_go_where_work_ends_first_and_launches_are_in_order_of_earliest_start() -> None:
    """After a come b(4) on stream 0, up to 5, and c(3) on stream 1, up to 4; then d(2), up to 6, and e(1).

    In the second graph c can start at once, b only after a, though b comes first in program order.
    """
    graph = graph_of("a-b a-c a-d a-e")
    costs = costs_of(graph, {"a": 1.0, "b": 4.0, "c": 3.0, "d": 2.0, "e": 1.0})
    assert path_cover(graph, costs, FREE, 2, NONE).stream == {"a": 0, "b": 0, "c": 1, "d": 1, "e": 0}
    later = graph_of("a-b", names="abc")
    assert path_cover(later, costs_of(later), FREE, 2, NONE).order == ("a", "c", "b")


def test_pinned_ops_leave_their_path_alone() -> None:
    """Only f is pinned; d and e stay on stream 1.

    a ─ b ─ c
    d ─ e ─ f
    """
    graph = graph_of("a-b b-c d-e e-f")
    assignment = path_cover(graph, costs_of(graph), FREE, 2, frozenset("f"))
    assert assignment.stream == {"a": 0, "b": 0, "c": 0, "d": 1, "e": 1, "f": 0}
    reason = "must be on the caller's stream; its path is on stream 1"
    assert assignment.decisions[-1] == Decision("f", "stream 0", reason)


@given(random_graphs())
def test_paths_are_disjoint_follow_dependencies_and_are_as_few_as_possible(graph: OpGraph) -> None:
    paths = minimum_path_cover(graph)
    assert sorted(name for path in paths for name in path) == sorted(graph.ops)
    reduced = nx.transitive_reduction(graph.digraph)
    assert all(reduced.has_edge(before, after) for path in paths for before, after in pairwise(path))
    assert all(nx.has_path(graph.digraph, *pair) for path in paths for pair in combinations(path, 2))
    bipartite = nx.Graph((("out", before), ("in", after)) for before, after in reduced.edges)
    lefts = [node for node in bipartite if node[0] == "out"]
    matched = len(nx.bipartite.hopcroft_karp_matching(bipartite, lefts)) // 2
    assert len(paths) == len(graph.ops) - matched
