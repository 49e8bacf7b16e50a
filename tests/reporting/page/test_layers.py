"""Where ops are drawn, on graphs that are easy to draw by hand."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given

from autostream.ir import OpGraph
from autostream.reporting.page.layers import places
from tests.scheduling.graphs import graph_of, random_graphs


def test_a_chain_is_a_column() -> None:
    assert places(graph_of("a-b b-c")) == {"a": (0.0, 0), "b": (0.0, 1), "c": (0.0, 2)}


def test_branches_stand_side_by_side_below_their_fork() -> None:
    """By hand: b, c and d one column apart, with a and e in the middle."""
    found = places(graph_of("a-b a-c a-d b-e c-e d-e"))
    assert found == {"a": (0.0, 0), "b": (-1.0, 1), "c": (0.0, 1), "d": (1.0, 1), "e": (0.0, 2)}


def test_branches_stay_under_their_own_forks() -> None:
    """No arrow crosses another, though the second branch comes first in its layer's program order."""
    found = places(graph_of("a-b a-c c-e b-d", names="abced"))
    assert found["d"][0] == found["b"][0] < found["c"][0] == found["e"][0]


def test_what_depends_on_nothing_stands_right_above_what_needs_it() -> None:
    found = places(graph_of("a-b b-c c-d w-d", names="awbcd"))
    assert found["w"][1] == found["c"][1] == 2


def test_nothing_is_nowhere() -> None:
    assert places(graph_of(())) == {}


@given(random_graphs())
def test_every_arrow_points_down_and_no_op_hides_another(graph: OpGraph) -> None:
    found = places(graph)
    assert found.keys() == graph.ops.keys()
    assert all(found[before][1] < found[after][1] for before, after in graph.digraph.edges)
    for (one, layer), (other, same) in combinations(found.values(), 2):
        assert layer != same or abs(one - other) >= 0.98, "columns are rounded to two digits"
