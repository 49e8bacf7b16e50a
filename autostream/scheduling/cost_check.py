"""Checks that no cost is infinite or negative: with such costs, a policy chooses a bad schedule without an error."""

from __future__ import annotations

from math import isfinite

from autostream.errors import CostError
from autostream.ir import Costs, OpGraph


def check_costs(graph: OpGraph, costs: Costs) -> None:
    """Raise unless every op has a cost, with a finite duration and finite shares, none of them negative.

    Raises:
        CostError: the message names the first op without such a cost.

    Example:
        >>> from autostream.ir import Op, OpCost
        >>> graph = OpGraph({"a": Op("a", "f", ("a",), frozenset(), frozenset({"a"}))}, (), {}, (), "cuda:0")
        >>> check_costs(graph, {"a": OpCost(3.0, 0.5, 0.1, "roofline")})
        >>> check_costs(graph, {"a": OpCost(float("nan"), 0.5, 0.1, "measured")})
        Traceback (most recent call last):
        ...
        autostream.errors.CostError: the measured cost of 'a' has duration_us=nan, where a finite number from 0 is \
needed: measure it again
    """
    for op in graph.ops.values():
        at = f" ({op.source})" if op.source else ""
        if op.name not in costs:
            raise CostError(f"{op.name!r}{at} has no cost, and every op needs one: price the graph that is scheduled")
        cost = costs[op.name]
        for name in ("duration_us", "sm_share", "bandwidth_share"):
            value = getattr(cost, name)
            if not (isfinite(value) and value >= 0):
                raise CostError(
                    f"the {cost.source} cost of {op.name!r}{at} has {name}={value!r}, where a finite number from 0 is "
                    "needed: measure it again"
                )
