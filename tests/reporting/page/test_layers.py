"""Where ops are drawn, on graphs that are easy to draw by hand."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given

from autostream.ir import OpGraph
from autostream.reporting.page.layers import places
from tests.scheduling.graphs import graph_of, random_graphs


def test_what_depends_on_nothing_stands_right_above_what_needs_it() -> None:
    found = places(graph_of("a-b b-c c-d w-d", names="awbcd"))
    assert found["w"][1] == found["c"][1] == 2


@given(random_graphs())
def test_every_arrow_points_down_and_no_op_hides_another(graph: OpGraph) -> None:
    found = places(graph)
    assert found.keys() == graph.ops.keys()
    assert all(found[before][1] < found[after][1] for before, after in graph.digraph.edges)
    for (one, layer), (other, same) in combinations(found.values(), 2):
        assert layer != same or abs(one - other) >= 0.98, "columns are rounded to two digits"
