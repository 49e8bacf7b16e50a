"""Path covers on drawn graphs worked out by hand, and their smallness by networkx."""

from __future__ import annotations

from itertools import combinations, pairwise

import networkx as nx
from hypothesis import given

from autostream.ir import Decision, OpGraph
from autostream.scheduling.policies.path_cover import minimum_path_cover, path_cover
from tests.scheduling.graphs import costs_of, graph_of, profile_with, random_graphs

FREE = profile_with()
NONE: frozenset[str] = frozenset()


def test_a_diamond_is_two_paths() -> None:
    """The branch d is left over.

    a ─ b ─ c ─ e
     └─── d ────┘
    """
    graph = graph_of("a-b a-d b-c c-e d-e", names="abcde")
    assert minimum_path_cover(graph) == (("a", "b", "c", "e"), ("d",))
    assignment = path_cover(graph, costs_of(graph), FREE, 4, NONE)
    assert assignment.stream == {"a": 0, "b": 0, "c": 0, "d": 1, "e": 0}
    assert assignment.decisions == (
        Decision("", "2 streams", "2 paths hold every op, and no fewer do"),
        Decision("d", "stream 1", "begins path 2 of 2"),
    )


def test_a_greedy_choice_is_undone() -> None:
    """Both a and b could go on to c, and a comes first, but b has no other way to go on.

    a ─┬─ d
       └─ c
    b ────┘
    """
    graph = graph_of("a-c a-d b-c", names="abcd")
    assert minimum_path_cover(graph) == (("a", "d"), ("b", "c"))


def test_shortcuts_do_not_count() -> None:
    """In a ─ b ─ c the shortcut a ─ c is not an edge of the minimum equivalent graph, so c follows b."""
    assert minimum_path_cover(graph_of("a-b a-c b-c")) == (("a", "b", "c"),)


def test_branches_of_successive_blocks_share_a_stream() -> None:
    """One branch, c, is done when the other, f, can start: two streams do for three paths.

    a ─┬─ b ─┬─ d ─┬─ e ─┬─ g
       └─ c ─┘     └─ f ─┘
    """
    graph = graph_of("a-b a-c b-d c-d d-e d-f e-g f-g")
    assert len(minimum_path_cover(graph)) == 3
    assignment = path_cover(graph, costs_of(graph, 0.1), FREE, 8, NONE)
    assert assignment.stream == {"a": 0, "b": 0, "c": 1, "d": 0, "e": 0, "f": 1, "g": 0}


def test_a_path_may_begin_the_moment_another_ends() -> None:
    """At 2 µs, c ends, and e begins in its place.

    a ─┬─ b ─┬─ d
       └─ c  └─ e
    """
    graph = graph_of("a-b a-c b-d b-e")
    assert path_cover(graph, costs_of(graph), FREE, 8, NONE).stream == {"a": 0, "b": 0, "c": 1, "d": 0, "e": 1}


def test_paths_beyond_the_streams_go_where_work_ends_first() -> None:
    """After a come b(4) on stream 0, up to 5, and c(3) on stream 1, up to 4; then d(2), up to 6, and e(1)."""
    graph = graph_of("a-b a-c a-d a-e")
    costs = costs_of(graph, {"a": 1.0, "b": 4.0, "c": 3.0, "d": 2.0, "e": 1.0})
    assert path_cover(graph, costs, FREE, 2, NONE).stream == {"a": 0, "b": 0, "c": 1, "d": 1, "e": 0}


def test_launches_are_issued_by_earliest_start() -> None:
    """Op c can start at once, b after a only, though b comes first in program order."""
    graph = graph_of("a-b", names="abc")
    assert path_cover(graph, costs_of(graph), FREE, 2, NONE).order == ("a", "c", "b")


def test_pinned_ops_leave_their_path_alone() -> None:
    """Only f is pinned; d and e stay where they are.

    a ─ b ─ c
    d ─ e ─ f
    """
    graph = graph_of("a-b b-c d-e e-f")
    assignment = path_cover(graph, costs_of(graph), FREE, 2, frozenset("f"))
    assert assignment.stream == {"a": 0, "b": 0, "c": 0, "d": 1, "e": 1, "f": 0}
    assert assignment.decisions[-1] == Decision(
        "f", "stream 0", "must be on the caller's stream; its path is on stream 1"
    )


@given(random_graphs())
def test_paths_are_disjoint_follow_dependencies_and_are_as_few_as_possible(graph: OpGraph) -> None:
    paths = minimum_path_cover(graph)
    assert sorted(name for path in paths for name in path) == sorted(graph.ops)
    reduced = nx.transitive_reduction(graph.digraph)
    assert all(reduced.has_edge(before, after) for path in paths for before, after in pairwise(path))
    bipartite = nx.Graph((("out", before), ("in", after)) for before, after in reduced.edges)
    lefts = [node for node in bipartite if node[0] == "out"]
    matched = len(nx.bipartite.hopcroft_karp_matching(bipartite, lefts)) // 2
    assert len(paths) == len(graph.ops) - matched


@given(random_graphs())
def test_ops_that_may_run_side_by_side_are_on_different_paths(graph: OpGraph) -> None:
    for path in minimum_path_cover(graph):
        assert all(nx.has_path(graph.digraph, before, after) for before, after in combinations(path, 2))
