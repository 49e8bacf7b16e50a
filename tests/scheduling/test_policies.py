"""What every policy owes, whatever its choices."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autostream.ir import DeviceProfile
from autostream.options import PolicyName
from autostream.scheduling.policies import POLICIES, Policy
from autostream.scheduling.simulate import simulate
from tests.scheduling.graphs import (
    check_assignment,
    costs_of,
    critical_path_us,
    graph_of,
    profile_with,
    random_costs,
    random_graphs,
    schedule_of,
)

each_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)

PRICED = profile_with(same_stream_edge_us=0.5, cross_stream_edge_us=2.0, fork_us=1.0, join_us=1.0)


def test_the_registry_has_what_the_options_offer() -> None:
    assert set(POLICIES) == set(get_args(PolicyName)) - {"auto"}
    graph = graph_of("a-b")
    for name, policy in POLICIES.items():
        assert policy(graph, costs_of(graph), PRICED, 2, frozenset()).policy == name


@each_policy
@given(data=st.data(), streams=st.integers(1, 5), profile=st.sampled_from([profile_with(), PRICED]))
def test_assignments_are_valid_and_deterministic(
    policy: Policy, data: st.DataObject, streams: int, profile: DeviceProfile
) -> None:
    graph = data.draw(random_graphs())
    costs = data.draw(random_costs(graph))
    assignment = policy(graph, costs, profile, streams, graph.pinned)
    check_assignment(graph, assignment, streams, graph.pinned)
    assert assignment == policy(graph, costs, profile, streams, graph.pinned)
    if streams == 1:
        assert set(assignment.stream.values()) == {0}


@each_policy
@given(data=st.data(), streams=st.integers(1, 5))
def test_no_schedule_beats_the_critical_path_or_an_equal_share_of_the_work(
    policy: Policy, data: st.DataObject, streams: int
) -> None:
    graph = data.draw(random_graphs())
    costs = data.draw(random_costs(graph))
    schedule = schedule_of(graph, policy(graph, costs, PRICED, streams, frozenset()))
    makespan = simulate(schedule, costs, PRICED).makespan_us
    total = sum(cost.duration_us for cost in costs.values())
    assert makespan >= max(critical_path_us(graph, costs), total / streams) - 1e-9


@each_policy
def test_an_empty_graph_has_an_empty_assignment(policy: Policy) -> None:
    assignment = policy(graph_of(""), {}, PRICED, 4, frozenset())
    assert (assignment.order, assignment.stream, assignment.streams) == ((), {}, 1)


@each_policy
def test_a_chain_stays_on_one_stream(policy: Policy) -> None:
    graph = graph_of("a-b b-c c-d")
    assignment = policy(graph, costs_of(graph, 10.0), PRICED, 4, frozenset())
    assert assignment.order == ("a", "b", "c", "d")
    assert set(assignment.stream.values()) == {0}


@each_policy
def test_ten_thousand_ops(policy: Policy) -> None:
    """A ladder: each rung reads the one before and the one a hundred earlier."""
    names = [f"n{at}" for at in range(10_000)]
    edges = [(names[at - step], names[at]) for at in range(1, len(names)) for step in (100, 7) if at >= step]
    graph = graph_of(edges, names)
    check_assignment(graph, policy(graph, costs_of(graph, 3.0), PRICED, 8, frozenset()), 8)
