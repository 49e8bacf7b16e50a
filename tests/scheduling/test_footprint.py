"""What is in memory at a time: counted by hand, against brute force, and below what any placement takes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autostream.ir import Assignment, OpGraph, Slice, Storage, Timeline
from autostream.scheduling.arena import place_storages
from autostream.scheduling.peak import Footprint, peak_bytes
from autostream.scheduling.policies import POLICIES
from autostream.scheduling.releases import place_releases
from autostream.scheduling.simulate import simulate
from autostream.scheduling.synchronize import synchronize
from tests.scheduling.graphs import graph_of, profile_with, random_costs, random_graphs

PROFILE = profile_with(same_stream_edge_us=0.5, cross_stream_edge_us=2.0, fork_us=1.0, join_us=1.0)

#   a ─┬─ b ── d        1 KiB each; b and c run side by side, and d is an output
#      └─ c ───┘
DIAMOND = graph_of("a-b a-c b-d c-d", outputs="d")
TIMES = {"a": (0.0, 1.0), "b": (1.0, 9.0), "c": (2.0, 3.0), "d": (9.0, 10.0)}


def timeline(times: dict[str, tuple[float, float]]) -> Timeline:
    return Timeline(tuple(Slice(name, 0, *span) for name, span in times.items()))


def test_the_last_to_end_frees_and_outputs_are_never_freed() -> None:
    """Not the last in program order: that is c, and b ends later."""
    footprint = Footprint(DIAMOND)
    assert footprint.users == {"a": ("a", "b", "c"), "b": ("b", "d"), "c": ("c", "d"), "d": ("d",)}
    assert footprint.allocated_bytes == dict.fromkeys("abcd", 1024)
    assert footprint.freed_bytes(timeline(TIMES)) == {"a": 0, "b": 1024, "c": 0, "d": 2048}


def test_the_most_that_is_live_is_counted_and_what_is_freed_at_a_moment_makes_room_then() -> None:
    """While b runs, a and c are there as well; when d starts, a has gone at that very moment."""
    assert Footprint(DIAMOND).live_bytes(timeline(TIMES)) == 3 * 1024
    assert Footprint(DIAMOND).live_bytes(timeline({**TIMES, "d": (8.5, 10.0)})) == 4 * 1024


def test_what_is_in_use_is_told_from_each_change_on() -> None:
    """At 9, b and c are handed on, or kept, and d is taken, all in one step."""
    kib = [(at, size // 1024) for at, size in Footprint(DIAMOND).in_use(timeline(TIMES))]
    assert kib == [(0, 1), (1, 2), (2, 3), (9, 3), (10, 1)]


def test_parts_belong_to_their_storage_and_what_is_given_takes_nothing() -> None:
    whole = Storage("a", DIAMOND.storages["a"].role, 1024, ("a",), parts=("a.0", "a.1"))
    reads = {"b": frozenset({"a.0"}), "c": frozenset({"a.1", "x_in"})}
    ops = {name: replace(op, reads=reads.get(name, op.reads)) for name, op in DIAMOND.ops.items()}
    graph = replace(DIAMOND, ops=ops, storages={**DIAMOND.storages, "a": whole})
    assert Footprint(graph).users["a"] == ("a", "b", "c")
    assert "x_in" not in Footprint(graph).users
    assert Footprint(graph).live_bytes(timeline(TIMES)) == 3 * 1024


def test_what_no_op_allocates_is_there_from_the_first_to_the_last() -> None:
    """The prelude takes m, of 4 KiB, which a fills; an arena might hold it if it could be placed."""
    a = replace(DIAMOND.ops["a"], writes=frozenset("m"), allocates=frozenset())
    ops = {**DIAMOND.ops, "a": a, **{n: replace(DIAMOND.ops[n], reads=frozenset("m")) for n in "bc"}}
    m = replace(DIAMOND.storages["a"], name="m", bytes=4096, holders=("m",))
    storages = {name: storage for name, storage in DIAMOND.storages.items() if name != "a"}
    graph = replace(DIAMOND, ops=ops, storages={**storages, "m": m}, prelude=("m",))
    footprint = Footprint(graph)
    assert footprint.live_bytes(timeline(TIMES)) == 4096 + 3 * 1024, "to the end, when b, c and d are there"
    assert [size // 1024 for _, size in footprint.in_use(timeline(TIMES))] == [4, 5, 6, 7, 5]
    assert footprint.allocated_bytes == {"a": 0, "b": 1024, "c": 1024, "d": 1024}, "a writes what was taken before"
    assert footprint.freed_bytes(timeline(TIMES)) == {"a": 0, "b": 0, "c": 0, "d": 2048}
    schedule = synchronize(graph, Assignment("by hand", 1, tuple("abcd"), dict.fromkeys("abcd", 0)))
    assert peak_bytes(graph, place_releases(graph, schedule)) == 4096 + 3 * 1024
    placeable = replace(graph, storages={**graph.storages, "m": replace(m, placeable=True)})
    assert Footprint(placeable).live_bytes(timeline(TIMES)) == 4096 + 2 * 1024, "from a to b, and gone when d starts"
    placed = place_releases(placeable, place_storages(placeable, schedule))
    assert peak_bytes(placeable, placed) == 4096 + 3 * 1024, "the arena as a whole"
    assert Footprint(placeable).freed_bytes(timeline(TIMES))["b"] == 4096


def test_nothing_takes_nothing() -> None:
    assert Footprint(graph_of(())).live_bytes(Timeline(())) == 0


@given(data=st.data(), streams=st.integers(1, 4))
def test_it_is_the_most_at_any_start_and_no_more_than_any_placement_takes(data: st.DataObject, streams: int) -> None:
    graph: OpGraph = data.draw(random_graphs())
    sizes = {name: data.draw(st.integers(1, 9)) * 512 for name in graph.ops}
    storages = {
        name: replace(storage, bytes=sizes.get(name, storage.bytes), placeable=name in sizes)
        for name, storage in graph.storages.items()
    }
    graph = replace(graph, storages=storages)
    costs = data.draw(random_costs(graph))
    policy = data.draw(st.sampled_from(["critical_path", "path_cover"]))
    schedule = synchronize(graph, POLICIES[policy](graph, costs, PROFILE, streams, frozenset()))
    run = simulate(schedule, costs, PROFILE)
    start, end = ({s.op: at(s) for s in run.slices} for at in (lambda s: s.start_us, lambda s: s.end_us))

    def live_at(moment: float) -> int:
        users = {name: {name, *graph.digraph.successors(name)} for name in graph.ops}
        return sum(
            graph.storages[name].bytes
            for name in graph.ops
            if start[name] <= moment and (graph.storages[name].escapes or moment < max(end[op] for op in users[name]))
        )

    found = Footprint(graph).live_bytes(run)
    assert found == max((live_at(start[name]) for name in graph.ops), default=0)
    assert found == max(size for _, size in Footprint(graph).in_use(run)), "what is drawn is below what is planned"
    for placed in (schedule, place_storages(graph, schedule)):
        assert found <= peak_bytes(graph, place_releases(graph, placed))


@pytest.mark.parametrize("escapes", [True, False])
def test_an_output_is_there_to_the_end(escapes: bool) -> None:
    graph = graph_of("a-b b-c", outputs="a" if escapes else "")
    times = {"a": (0.0, 1.0), "b": (1.0, 2.0), "c": (2.0, 3.0)}
    assert Footprint(graph).live_bytes(timeline(times)) == (3 if escapes else 2) * 1024
