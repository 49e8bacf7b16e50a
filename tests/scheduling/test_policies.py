"""What holds for every policy: valid, deterministic assignments, no faster than the bounds."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autostream.ir import DeviceProfile
from autostream.options import PolicyName
from autostream.scheduling.policies import POLICIES, Policy
from autostream.scheduling.policies.sequential import one_stream
from autostream.scheduling.simulate import simulate
from autostream.scheduling.synchronize import synchronize
from tests.scheduling.graphs import (
    FREE,
    PRICED,
    check_assignment,
    costs_of,
    critical_path_us,
    graph_of,
    random_costs,
    random_graphs,
)

each_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


def test_there_is_a_policy_for_each_option() -> None:
    assert set(POLICIES) == set(get_args(PolicyName)) - {"auto"}
    graph = graph_of("a-b")
    for name, policy in POLICIES.items():
        assert policy(graph, costs_of(graph), PRICED, 2, frozenset()).policy == name


def test_the_sequential_policy_is_program_order_on_stream_0() -> None:
    """Program order is a, c, b; its decision is about the whole, and it takes the sum of its ops and gaps."""
    graph = graph_of("a-b", names="acb")
    found = POLICIES["sequential"](graph, costs_of(graph), PRICED, 4, frozenset())
    assert (found.order, found.stream, found.streams) == (("a", "c", "b"), dict.fromkeys("acb", 0), 1)
    assert [(decision.op, decision.choice) for decision in found.decisions] == [("", "1 stream")]
    assert one_stream(graph) == synchronize(graph, found)
    assert simulate(one_stream(graph), costs_of(graph, 10.0, sm_share=1.0), PRICED).makespan_us == 31.0


@each_policy
@settings(max_examples=20)
@given(data=st.data(), streams=st.integers(1, 5), profile=st.sampled_from([FREE, PRICED]))
def test_assignments_are_valid_deterministic_and_no_faster_than_the_bounds(
    policy: Policy, data: st.DataObject, streams: int, profile: DeviceProfile
) -> None:
    """The bounds are the critical path, and an equal share of the work for each stream."""
    graph = data.draw(random_graphs())
    costs = data.draw(random_costs(graph))
    assignment = policy(graph, costs, profile, streams, graph.pinned)
    check_assignment(graph, assignment, streams, graph.pinned)
    assert assignment == policy(graph, costs, profile, streams, graph.pinned)
    makespan_us = simulate(synchronize(graph, assignment), costs, profile).makespan_us
    total_us = sum(cost.duration_us for cost in costs.values())
    assert makespan_us >= max(critical_path_us(graph, costs), total_us / streams) - 1e-9


@each_policy
def test_an_empty_graph_and_a_chain_are_on_one_stream(policy: Policy) -> None:
    empty = policy(graph_of(""), {}, PRICED, 4, frozenset())
    assert (empty.order, empty.stream, empty.streams) == ((), {}, 1)
    graph = graph_of("a-b b-c c-d")
    assignment = policy(graph, costs_of(graph, 10.0), PRICED, 4, frozenset())
    assert (assignment.order, set(assignment.stream.values())) == (("a", "b", "c", "d"), {0})


@each_policy
def test_ten_thousand_ops(policy: Policy) -> None:
    """A ladder: each op reads the one seven and the one a hundred earlier."""
    names = [f"n{at}" for at in range(10_000)]
    edges = [(names[at - step], names[at]) for at in range(1, len(names)) for step in (100, 7) if at >= step]
    graph = graph_of(edges, names)
    check_assignment(graph, policy(graph, costs_of(graph, 3.0), PRICED, 8, frozenset()), 8)
