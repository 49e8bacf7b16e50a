"""What a schedule allocates at most, counted by hand; each op allocates 1024 bytes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from autostream.ir import Launch, OpGraph, Schedule
from autostream.scheduling import POLICIES
from autostream.scheduling.peak import peak_bytes
from autostream.scheduling.releases import place_releases
from autostream.scheduling.synchronize import synchronize
from tests.scheduling.graphs import costs_of, graph_of, profile_with, random_graphs


def test_nothing_takes_nothing() -> None:
    assert peak_bytes(graph_of(""), Schedule("mine", 1, ())) == 0


def test_a_storage_is_there_until_the_launch_that_releases_it() -> None:
    """Behind b, a goes, before c comes: two at a time."""
    graph = graph_of("a-b b-c")
    launches = (Launch("a", 0), Launch("b", 0, releases=("a",)), Launch("c", 0))
    assert peak_bytes(graph, Schedule("mine", 1, launches)) == 2 * 1024
    kept = (Launch("a", 0), Launch("b", 0), Launch("c", 0))
    assert peak_bytes(graph, Schedule("mine", 1, kept)) == 3 * 1024


def test_a_stream_does_not_use_what_another_gave_back() -> None:
    """Stream 0 is done with a and gives it back when stream 1 begins: still one storage on each."""
    graph = graph_of("a-b b-c c-d", names="abcd")
    launches = (
        Launch("a", 0),
        Launch("b", 0, releases=("a",)),
        Launch("c", 1, waits=("b",)),
        Launch("d", 1, releases=("c",)),
    )
    assert peak_bytes(graph, Schedule("mine", 2, launches, ("d",))) == 2 * 1024 + 2 * 1024


def test_what_another_stream_gives_back_counts_where_it_was_allocated() -> None:
    """Stream 1 releases a, of stream 0, before stream 0 allocates c."""
    graph = graph_of("a-b b-c", names="abc")
    launches = (Launch("a", 0), Launch("b", 1, waits=("a",), releases=("a",)), Launch("c", 0, waits=("b",)))
    assert peak_bytes(graph, Schedule("mine", 2, launches)) == 1024 + 1024


@given(graph=random_graphs(), streams=st.integers(1, 4))
def test_it_is_between_the_largest_and_the_sum_of_all(graph: OpGraph, streams: int) -> None:
    assignment = POLICIES["critical_path"](graph, costs_of(graph), profile_with(), streams, frozenset())
    bare = synchronize(graph, assignment)
    whole = 1024 * len(graph.ops)
    assert peak_bytes(graph, bare) == whole
    assert 1024 <= peak_bytes(graph, place_releases(graph, bare)) <= whole
