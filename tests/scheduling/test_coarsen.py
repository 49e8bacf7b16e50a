"""Chains of short ops, drawn and worked out by hand; and that no policy splits them."""

from __future__ import annotations

from itertools import pairwise

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autostream.ir import Assignment, OpCost, OpGraph
from autostream.scheduling.coarsen import coarsen, expand
from autostream.scheduling.policies import POLICIES, Policy, in_chains
from autostream.scheduling.policies.critical_path import critical_path
from autostream.scheduling.synchronize import synchronize
from autostream.scheduling.verify import verify
from tests.scheduling.graphs import check_assignment, costs_of, graph_of, profile_with, random_costs, random_graphs

NONE: frozenset[str] = frozenset()

PROFILE = profile_with(same_stream_edge_us=1.0, cross_stream_edge_us=4.0)
"""Leaving a stream costs 3 µs more than staying."""


def chains(graph: OpGraph, durations: dict[str, float], pinned: frozenset[str] = NONE) -> list[str]:
    """Chains as words; ops take 10 µs unless said otherwise."""
    costs = costs_of(graph, {**dict.fromkeys(graph.ops, 10.0), **durations})
    return ["".join(chain) for chain in coarsen(graph, costs, PROFILE, pinned).chains.values()]


def test_a_short_op_joins_its_only_neighbours() -> None:
    """Of a ─ b ─ c ─ d, b is short; d is long, and so is c before it."""
    assert chains(graph_of("a-b b-c c-d"), {"b": 2.9}) == ["abc", "d"]


def test_what_is_worth_an_edge_stays_alone() -> None:
    """Three µs are what leaving the stream costs."""
    assert chains(graph_of("a-b b-c"), {"b": 3.0}) == ["a", "b", "c"]


def test_where_paths_part_or_meet_there_is_no_link() -> None:
    """All are short, but only b-c and d-e are links.

    a ─┬─ b ─ c ─┬─ f
       └─ d ─ e ─┘
    """
    graph = graph_of("a-b b-c a-d d-e c-f e-f", names="abcdef")
    assert chains(graph, dict.fromkeys("abcdef", 1.0)) == ["a", "bc", "de", "f"]


def test_two_hazards_between_two_ops_are_one_link() -> None:
    graph = graph_of("a-b a-b")
    assert chains(graph, {"a": 1.0}) == ["ab"]


def test_pinned_ops_and_others_stay_apart() -> None:
    """Otherwise c, which must be on stream 0, would take a and b there."""
    graph = graph_of("a-b b-c c-d")
    assert chains(graph, dict.fromkeys("abcd", 1.0), frozenset("cd")) == ["ab", "cd"]
    costs = costs_of(graph, 1.0)
    assert coarsen(graph, costs, PROFILE, frozenset("cd")).pinned == {"c"}


def test_a_chain_costs_what_it_takes_alone() -> None:
    """Two ops with a gap of 1 µs; for half of the 4 µs, a fills all multiprocessors, then b half the bandwidth."""
    graph = graph_of("a-b")
    costs = {"a": OpCost(2.0, 1.0, 0.0, "measured"), "b": OpCost(1.0, 0.0, 0.5, "measured")}
    assert coarsen(graph, costs, PROFILE, NONE).costs == {"a": OpCost(4.0, 0.5, 0.125, "measured")}


def test_a_chain_of_nothing_costs_nothing() -> None:
    graph = graph_of("a-b")
    free = profile_with(cross_stream_edge_us=1.0)
    costs = costs_of(graph, 0.0, sm_share=0.5)
    assert coarsen(graph, costs, free, NONE).costs == {"a": OpCost(0.0, 0.5, 0.0, "roofline")}


def test_expanding_puts_each_op_behind_the_one_before_it() -> None:
    """Chains a-b and c-d, launched the second first."""
    graph = graph_of("a-b c-d", names="acbd")
    coarse = coarsen(graph, costs_of(graph), PROFILE, NONE)
    found = expand(coarse, Assignment("mine", 2, ("c", "a"), {"a": 0, "c": 1}))
    assert (found.order, found.stream) == (("c", "d", "a", "b"), {"a": 0, "b": 0, "c": 1, "d": 1})


@given(data=st.data())
def test_a_coarse_graph_is_a_graph_in_program_order(data: st.DataObject) -> None:
    """Its reachability is that of the ops, and chains are paths of links."""
    graph = data.draw(random_graphs())
    costs = data.draw(random_costs(graph))
    coarse = coarsen(graph, costs, PROFILE, graph.pinned)
    head = {name: first for first, chain in coarse.chains.items() for name in chain}
    assert sorted(head) == sorted(graph.ops)
    place = {name: at for at, name in enumerate(coarse.graph.ops)}
    assert all(place[before] < place[after] for before, after in coarse.graph.digraph.edges)
    for before, after in nx.transitive_closure_dag(graph.digraph).edges:
        assert head[before] == head[after] or nx.has_path(coarse.graph.digraph, head[before], head[after])
    for chain in coarse.chains.values():
        assert all(set(graph.digraph.successors(before)) == {after} for before, after in pairwise(chain))
        assert all(set(graph.digraph.predecessors(after)) == {before} for before, after in pairwise(chain))
        assert set(chain) <= graph.pinned or graph.pinned.isdisjoint(chain)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@given(data=st.data(), streams=st.integers(1, 4))
def test_no_policy_splits_a_chain(policy: Policy, data: st.DataObject, streams: int) -> None:
    graph = data.draw(random_graphs(max_ops=8))
    costs = data.draw(random_costs(graph))
    assignment = policy(graph, costs, PROFILE, streams, graph.pinned)
    for chain in coarsen(graph, costs, PROFILE, graph.pinned).chains.values():
        assert len({assignment.stream[name] for name in chain}) == 1


def test_list_scheduling_would_split_one() -> None:
    """When u is done, z takes its stream, since it has more behind it than v; v would go where x has just ended.

    x ─ y     u ─ v ─┬─ s     z
                     └─ t
    """
    graph = graph_of("x-y u-v v-s v-t", names="xuzyvst")
    costs = costs_of(graph, {"x": 15.0, "u": 10.0, "z": 22.0, "y": 20.0, "v": 1.0, "s": 20.0, "t": 20.0})
    alone = critical_path(graph, costs, PROFILE, 2, NONE).stream
    assert alone["u"] != alone["v"]
    kept = POLICIES["critical_path"](graph, costs, PROFILE, 2, NONE).stream
    assert kept["u"] == kept["v"]


@given(data=st.data(), streams=st.integers(1, 4))
def test_any_assignment_of_chains_is_one_of_ops(data: st.DataObject, streams: int) -> None:
    """One that scatters chains at random is expanded to a schedule that can be proven right."""

    def scattered(graph: OpGraph, costs: object, profile: object, most: int, pinned: frozenset[str]) -> Assignment:
        stream = {name: 0 if name in pinned else data.draw(st.integers(0, most - 1)) for name in graph.ops}
        return Assignment("scattered", most, tuple(graph.ops), stream)

    graph = data.draw(random_graphs())
    costs = data.draw(random_costs(graph))
    assignment = in_chains(scattered)(graph, costs, PROFILE, streams, graph.pinned)
    check_assignment(graph, assignment, streams, graph.pinned)
    verify(graph, synchronize(graph, assignment), pinned=graph.pinned)
