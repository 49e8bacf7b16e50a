"""Why each op is on its stream, on schedules small enough to see it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autostream.ir import FORK, Candidate, Launch, OpGraph, Schedule
from autostream.reporting.placements import placements
from autostream.scheduling.simulate import simulate
from tests.reporting.reports import CHOSEN, COSTS, DIAMOND, TWO_STREAMS
from tests.scheduling.graphs import costs_of, graph_of, profile_with

UNTOLD = replace(CHOSEN, schedule=replace(TWO_STREAMS, decisions=()))


def reasons(graph: OpGraph, streams: dict[str, int], captured: bool = True) -> dict[str, str]:
    """Of ops of 10 µs, launched in program order on these streams, without any reason of a policy's."""
    launches = []
    for name in graph.ops:
        foreign = [before for before in graph.digraph.predecessors(name) if streams[before] != streams[name]]
        launches.append(Launch(name, streams[name], tuple(foreign) or (FORK,) * bool(streams[name])))
    schedule = Schedule("search", max(streams.values()) + 1, tuple(launches))
    timeline = simulate(schedule, costs_of(graph, 10.0), profile_with())
    return placements(graph, Candidate(schedule, captured, 0.0), timeline)


def test_an_op_that_left_what_it_needs_found_its_stream_busy() -> None:
    """Op d needs a, as b does, which runs behind it meanwhile."""
    assert placements(DIAMOND, UNTOLD, simulate(TWO_STREAMS, COSTS, profile_with())) == {
        "a": "the caller's stream, where nothing need be waited for",
        "b": "needs a, which is there",
        "d": "stream 0 is busy with b",
        "c": "needs b, which is there",
        "e": "needs c, which is there",
    }


def test_of_what_an_op_needs_on_its_stream_the_last_is_named() -> None:
    """Op c needs both a and b.

    stream 0   a ── b ── c
    stream 1   d
    """
    graph = graph_of("a-c b-c", names="abcd")
    assert reasons(graph, {"a": 0, "b": 0, "c": 0, "d": 1})["c"] == "needs b, which is there"


def test_an_op_that_needs_nothing_leaves_the_callers_stream_because_of_what_is_there() -> None:
    found = reasons(graph_of((), names="ab"), {"a": 0, "b": 1})
    assert found == {"a": "the caller's stream, where nothing need be waited for", "b": "stream 0 is busy with a"}


def test_what_is_over_or_to_come_keeps_no_stream_busy() -> None:
    """Op c could as well run behind a, where b has ended and d is not ready.

    stream 0   a ── b             d
    stream 1             c ── e
    """
    graph = graph_of("a-b a-c b-c c-e e-d", names="abced")
    found = reasons(graph, {"a": 0, "b": 0, "c": 1, "e": 1, "d": 0})
    assert (found["c"], found["d"]) == ("its stream is free then", "its stream is free then")


@pytest.mark.parametrize(
    ("captured", "why"), [(False, "must be on the caller's stream"), (True, "stream 1 is busy with c")]
)
def test_an_output_must_be_on_the_callers_stream_where_no_graph_is_captured(captured: bool, why: str) -> None:
    graph = graph_of("b-c b-d", names="abcd", outputs="d")
    assert reasons(graph, {"a": 0, "b": 1, "c": 1, "d": 0}, captured)["d"] == why
