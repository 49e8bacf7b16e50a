"""The baseline: one stream, program order."""

from __future__ import annotations

from hypothesis import given

from autostream.ir import OpGraph
from autostream.scheduling.policies.sequential import one_stream, sequential
from autostream.scheduling.simulate import simulate
from tests.scheduling.graphs import costs_of, graph_of, profile_with, random_graphs, schedule_of


@given(random_graphs())
def test_everything_on_stream_0_in_program_order(graph: OpGraph) -> None:
    assignment = sequential(graph, costs_of(graph), profile_with(), 4, graph.pinned)
    assert assignment.order == tuple(graph.ops)
    assert set(assignment.stream.values()) == {0}
    assert assignment.streams == 1
    assert [decision.op for decision in assignment.decisions] == [""]


@given(random_graphs())
def test_its_schedule_waits_for_nothing(graph: OpGraph) -> None:
    schedule = one_stream(graph)
    assert [launch.op for launch in schedule.launches] == [*graph.ops]
    assert (schedule.policy, schedule.streams, schedule.wait_count) == ("sequential", 1, 0)


def test_it_takes_the_sum_of_its_ops_and_gaps() -> None:
    graph = graph_of("a-b a-c b-d c-d")
    profile = profile_with(same_stream_edge_us=0.5, cross_stream_edge_us=9.0, fork_us=9.0, join_us=9.0)
    schedule = schedule_of(graph, sequential(graph, costs_of(graph, 10.0), profile, 4, frozenset()))
    assert simulate(schedule, costs_of(graph, 10.0, sm_share=1.0), profile).makespan_us == 41.5
