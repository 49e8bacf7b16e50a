"""Chains of short ops, drawn and worked out by hand; no policy splits them."""

from __future__ import annotations

from itertools import pairwise

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autostream.ir import Assignment, OpCost, OpGraph
from autostream.scheduling.coarsen import coarsen
from autostream.scheduling.policies import POLICIES, Policy, in_chains
from autostream.scheduling.synchronize import synchronize
from autostream.scheduling.verify import verify
from tests.scheduling.graphs import check_assignment, costs_of, graph_of, profile_with, random_costs, random_graphs

NONE: frozenset[str] = frozenset()

PROFILE = profile_with(same_stream_edge_us=1.0, cross_stream_edge_us=4.0)
"""To change streams costs 3 µs."""

ALL_SHORT = dict.fromkeys("abcdef", 1.0)


@pytest.mark.parametrize(
    ("edges", "durations", "pinned", "chains"),
    [
        pytest.param("a-b b-c c-d", {"b": 2.9}, "", ["abc", "d"], id="a short op joins its only neighbours"),
        pytest.param("a-b b-c", {"b": 3.0}, "", ["a", "b", "c"], id="3 µs are worth an edge"),
        pytest.param("a-b b-c a-d d-e c-f e-f", ALL_SHORT, "", ["a", "bc", "de", "f"], id="two branches"),
        pytest.param("a-b a-b", {"a": 1.0}, "", ["ab"], id="two hazards between two ops"),
        pytest.param("a-b b-c c-d", ALL_SHORT, "cd", ["ab", "cd"], id="pinned ops stay apart from others"),
    ],
)
def test_chains_of_drawn_graphs(edges: str, durations: dict[str, float], pinned: str, chains: list[str]) -> None:
    """Ops take 10 µs unless given otherwise."""
    graph = graph_of(edges)
    costs = costs_of(graph, {**dict.fromkeys(graph.ops, 10.0), **durations})
    coarse = coarsen(graph, costs, PROFILE, frozenset(pinned))
    assert ["".join(chain) for chain in coarse.chains.values()] == chains
    assert coarse.pinned == frozenset(pinned[:1])


def test_the_cost_of_a_chain_is_its_time_alone_with_average_shares() -> None:
    """Two ops with a gap of 1 µs; for half of the 4 µs, a fills all multiprocessors, then b half the bandwidth."""
    graph = graph_of("a-b")
    costs = {"a": OpCost(2.0, 1.0, 0.0, "measured"), "b": OpCost(1.0, 0.0, 0.5, "measured")}
    assert coarsen(graph, costs, PROFILE, NONE).costs == {"a": OpCost(4.0, 0.5, 0.125, "measured")}
    free = coarsen(graph, costs_of(graph, 0.0, sm_share=0.5), profile_with(cross_stream_edge_us=1.0), NONE)
    assert free.costs == {"a": OpCost(0.0, 0.5, 0.0, "roofline")}


@given(data=st.data(), streams=st.integers(1, 4))
def test_a_coarse_graph_keeps_reachability_and_any_assignment_of_it_is_right(data: st.DataObject, streams: int) -> None:
    graph = data.draw(random_graphs())
    costs = data.draw(random_costs(graph))
    coarse = coarsen(graph, costs, PROFILE, graph.pinned)
    head = {name: first for first, chain in coarse.chains.items() for name in chain}
    assert sorted(head) == sorted(graph.ops)
    position = {name: at for at, name in enumerate(coarse.graph.ops)}
    assert all(position[before] < position[after] for before, after in coarse.graph.digraph.edges)
    for before, after in nx.transitive_closure_dag(graph.digraph).edges:
        assert head[before] == head[after] or nx.has_path(coarse.graph.digraph, head[before], head[after])
    for chain in coarse.chains.values():
        assert all(set(graph.digraph.successors(before)) == {after} for before, after in pairwise(chain))
        assert all(set(graph.digraph.predecessors(after)) == {before} for before, after in pairwise(chain))
        assert set(chain) <= graph.pinned or graph.pinned.isdisjoint(chain)

    def scattered(chains: OpGraph, costs: object, profile: object, most: int, pinned: frozenset[str]) -> Assignment:
        stream = {name: 0 if name in pinned else data.draw(st.integers(0, most - 1)) for name in chains.ops}
        return Assignment("scattered", most, tuple(chains.ops), stream)

    assignment = in_chains(scattered)(graph, costs, PROFILE, streams, graph.pinned)
    check_assignment(graph, assignment, streams, graph.pinned)
    verify(graph, synchronize(graph, assignment), pinned=graph.pinned)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@settings(max_examples=20)
@given(data=st.data(), streams=st.integers(1, 4))
def test_no_policy_splits_a_chain(policy: Policy, data: st.DataObject, streams: int) -> None:
    graph = data.draw(random_graphs(max_ops=8))
    costs = data.draw(random_costs(graph))
    assignment = policy(graph, costs, PROFILE, streams, graph.pinned)
    for chain in coarsen(graph, costs, PROFILE, graph.pinned).chains.values():
        assert len({assignment.stream[name] for name in chain}) == 1
