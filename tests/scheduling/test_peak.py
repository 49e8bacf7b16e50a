"""What a schedule allocates at most, counted by hand; each op allocates 1024 bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from autostream.ir import FORK, Arena, Launch, OpGraph, Role, Schedule, Storage
from autostream.scheduling.peak import ARENA, Pool, peak_bytes, pools
from autostream.scheduling.policies import POLICIES
from autostream.scheduling.releases import place_releases
from autostream.scheduling.synchronize import synchronize
from tests.scheduling.graphs import costs_of, graph_of, profile_with, random_graphs


def test_nothing_takes_nothing() -> None:
    assert peak_bytes(graph_of(""), Schedule("mine", 1, ())) == 0
    assert pools(graph_of(""), Schedule("mine", 1, ())) == ()


def test_memory_is_taken_before_the_fork_even_where_nothing_is_launched() -> None:
    graph = OpGraph({}, (), {"m": Storage("m", Role.INTERMEDIATE, 512, ("m",), escapes=True)}, ("m",), "cuda:0")
    assert peak_bytes(graph, Schedule("mine", 1, ())) == 512
    assert pools(graph, Schedule("mine", 1, ())) == (Pool(0, 512, ("m",)),)


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


def test_what_is_taken_before_the_fork_is_there_to_the_end_on_the_callers_stream() -> None:
    """No op allocates m. In the arena it counts with that."""
    graph = graph_of("a-b")
    graph = replace(
        graph, storages={**graph.storages, "m": Storage("m", Role.INTERMEDIATE, 512, ("m",), placeable=True)}
    )
    launches = (Launch("a", 1, (FORK,)), Launch("b", 1, releases=("a",)))
    schedule = Schedule("mine", 2, launches, ("b",))
    assert peak_bytes(graph, schedule) == 512 + 2 * 1024
    assert Pool(0, 512, ("m",)) in pools(graph, schedule)
    assert peak_bytes(graph, replace(schedule, arena=Arena(512, {"m": 0}))) == 512 + 2 * 1024


@given(graph=random_graphs(), streams=st.integers(1, 4))
def test_it_is_between_the_largest_and_the_sum_of_all(graph: OpGraph, streams: int) -> None:
    assignment = POLICIES["critical_path"](graph, costs_of(graph), profile_with(), streams, frozenset())
    bare = synchronize(graph, assignment)
    whole = 1024 * len(graph.ops)
    assert peak_bytes(graph, bare) == whole
    assert 1024 <= peak_bytes(graph, place_releases(graph, bare)) <= whole


def sized(graph: OpGraph, sizes: Mapping[str, int]) -> OpGraph:
    """The graph with storages of other sizes."""
    storages = {name: replace(graph.storages[name], bytes=size) for name, size in sizes.items()}
    return replace(graph, storages={**graph.storages, **storages})


def test_what_holds_the_memory_is_told_by_stream_and_size() -> None:
    """Stream 0 holds most at d, behind which b is let go, or behind c; stream 1 has e alone.

    stream 0   a ── b ── c ── d
    stream 1        └─── e
    """
    graph = sized(graph_of("a-b b-c a-e c-d", names="abcde"), {"a": 100, "b": 50, "c": 200, "d": 60, "e": 80})
    launches = (
        Launch("a", 0),
        Launch("b", 0, releases=("a",)),
        Launch("e", 1, waits=("a",)),
        Launch("c", 0),
        Launch("d", 0, releases=("b", "c")),
    )
    found = pools(graph, Schedule("mine", 2, launches))
    assert found == (Pool(0, 310, ("c", "d", "b")), Pool(1, 80, ("e",)))
    swapped = tuple(replace(launch, stream=1 - launch.stream) for launch in launches)
    assert [pool.stream for pool in pools(graph, Schedule("mine", 2, swapped))] == [1, 0], "the largest first"
    earlier = (*launches[:3], Launch("c", 0, releases=("b",)), Launch("d", 0, releases=("c",)))
    assert pools(graph, Schedule("mine", 2, earlier))[0] == Pool(0, 260, ("c", "d"))


def test_an_arena_counts_as_a_whole_and_is_told_by_what_is_touched_when_most_of_it_is_in_use() -> None:
    """Of a (100), b (50) and c (200), the last two are in use when c reads b; the arena has a gap of 40 between them.

    a ── b ── c ── d
    """
    graph = sized(graph_of("a-b b-c c-d", names="abcd"), {"a": 100, "b": 50, "c": 200, "d": 10})
    arena = Arena(290, {"a": 90, "b": 0, "c": 90})
    schedule = Schedule("mine", 1, tuple(Launch(name, 0) for name in "abcd"), arena=arena)
    assert pools(graph, schedule) == (Pool(ARENA, 290, ("c", "b")), Pool(0, 10, ("d",)))
    assert peak_bytes(graph, schedule) == 300


def test_a_placed_storage_is_in_use_as_long_as_one_of_its_parts_is() -> None:
    """Op c reads the second half of a: all of a is there beside b and c."""
    graph = sized(graph_of("a-c b-c", names="abc"), {"a": 100, "b": 50, "c": 20})
    halves = {
        "a": replace(graph.ops["a"], writes=frozenset({"a.0", "a.1"})),
        "c": replace(graph.ops["c"], reads=frozenset({"a.1", "b"})),
    }
    graph = replace(
        graph,
        ops={**graph.ops, **halves},
        storages={**graph.storages, "a": replace(graph.storages["a"], parts=("a.0", "a.1"))},
    )
    launches = tuple(Launch(name, 0) for name in "abc")
    arena = Arena(170, {"a": 0, "b": 100, "c": 150})
    assert pools(graph, Schedule("mine", 1, launches, arena=arena)) == (Pool(ARENA, 170, ("a", "b", "c")),)


@given(graph=random_graphs(), streams=st.integers(1, 4), data=st.data())
def test_pools_make_up_the_peak_and_what_is_live_makes_up_each(
    graph: OpGraph, streams: int, data: st.DataObject
) -> None:
    """Any storages may be placed here: side by side, so that the arena is as large as all of them."""
    graph = sized(graph, {name: data.draw(st.integers(0, 9)) for name in graph.ops})
    placed = [name for name in graph.ops if data.draw(st.booleans())]
    ends = [*accumulate((graph.storages[name].bytes for name in placed), initial=0)]
    arena = Arena(ends[-1], dict(zip(placed, ends, strict=False)))
    assignment = POLICIES["critical_path"](graph, costs_of(graph), profile_with(), streams, frozenset())
    schedule = replace(place_releases(graph, synchronize(graph, assignment)), arena=arena)
    found = pools(graph, schedule)
    assert sum(pool.bytes for pool in found) == peak_bytes(graph, schedule)
    for pool in found:
        live = [graph.storages[name].bytes for name in pool.live]
        assert live == sorted(live, reverse=True)
        assert sum(live) == pool.bytes or (pool.stream == ARENA and sum(live) < pool.bytes)
