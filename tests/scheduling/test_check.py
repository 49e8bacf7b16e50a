"""Costs that no time can be made of are refused with the op, its line and the number."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan

import pytest

from autostream.errors import CostError
from autostream.scheduling.check import check_costs
from tests.scheduling.graphs import costs_of, graph_of

GRAPH = graph_of("a-b b-c")


def test_numbers_from_zero_are_costs() -> None:
    check_costs(GRAPH, costs_of(GRAPH, {"a": 0.0, "b": 1e9}, sm_share=1.0))
    check_costs(graph_of(""), {})


@pytest.mark.parametrize("value", [nan, inf, -inf, -1e-9])
@pytest.mark.parametrize("name", ["duration_us", "sm_share", "bandwidth_share"])
def test_what_is_no_number_or_less_than_nothing_is_refused(name: str, value: float) -> None:
    costs = costs_of(GRAPH)
    wrong = {**costs, "b": replace(costs["b"], **{name: value})}
    with pytest.raises(CostError, match=f"the roofline cost of 'b' has {name}={value!r}, .*: measure it again"):
        check_costs(GRAPH, wrong)


def test_the_users_line_is_named() -> None:
    op = replace(GRAPH.ops["b"], source="model.py:12: y = self.conv(x)")
    graph = replace(GRAPH, ops={**GRAPH.ops, "b": op})
    with pytest.raises(CostError, match=r"'b' \(model.py:12: y = self.conv\(x\)\) has duration_us=nan"):
        check_costs(graph, costs_of(graph, {"b": nan}))


def test_every_op_needs_a_cost() -> None:
    costs = {name: cost for name, cost in costs_of(GRAPH).items() if name != "c"}
    with pytest.raises(CostError, match="'c' has no cost"):
        check_costs(GRAPH, costs)
