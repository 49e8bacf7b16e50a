"""Costs that are missing or no finite numbers from 0 are refused with the op, its line and the number."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan

import pytest

from autostream.errors import CostError
from autostream.scheduling.cost_check import check_costs
from tests.scheduling.graphs import costs_of, graph_of


@pytest.mark.parametrize("value", [nan, inf, -1e-9])
@pytest.mark.parametrize("name", ["duration_us", "sm_share", "bandwidth_share"])
def test_costs_that_are_no_finite_numbers_from_zero_are_refused(name: str, value: float) -> None:
    graph = graph_of("a-b b-c")
    op = replace(graph.ops["b"], source="model.py:12: y = self.conv(x)")
    graph, costs = replace(graph, ops={**graph.ops, "b": op}), costs_of(graph, {"a": 0.0, "b": 1e9}, sm_share=1.0)
    check_costs(graph, costs)
    message = rf"the roofline cost of 'b' \(model.py:12: y = self.conv\(x\)\) has {name}={value!r}, .*: measure it"
    with pytest.raises(CostError, match=message):
        check_costs(graph, {**costs, "b": replace(costs["b"], **{name: value})})
    with pytest.raises(CostError, match="'c' has no cost"):
        check_costs(graph, {name: cost for name, cost in costs.items() if name != "c"})
