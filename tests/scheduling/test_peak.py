"""Peak memory in each pool and in use at each time, counted by hand and against brute force."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from autostream.ir import FORK, Arena, Launch, OpGraph, Role, Schedule, Slice, Storage, Timeline
from autostream.scheduling.arena import place_storages
from autostream.scheduling.peak import ARENA, Footprint, Pool, peak_bytes, pools
from autostream.scheduling.policies.sequential import one_stream
from autostream.scheduling.releases import place_releases
from autostream.scheduling.simulate import simulate
from tests.scheduling.graphs import PRICED, graph_of, planned


def sized(graph: OpGraph, sizes: Mapping[str, int]) -> OpGraph:
    """The graph with storages of other sizes."""
    storages = {name: replace(graph.storages[name], bytes=size) for name, size in sizes.items()}
    return replace(graph, storages={**graph.storages, **storages})


def with_halves(graph: OpGraph, storage: str) -> OpGraph:
    """The graph with a storage in two parts."""
    halves = replace(graph.storages[storage], parts=(f"{storage}.0", f"{storage}.1"))
    return replace(graph, storages={**graph.storages, storage: halves})


def test_memory_of_the_prelude_stays_to_the_end_on_the_callers_stream() -> None:
    """No op allocates m. In the arena it counts with that."""
    m = Storage("m", Role.INTERMEDIATE, 512, ("m",), placeable=True)
    alone = OpGraph({}, (), {"m": m}, ("m",), "cuda:0")
    assert pools(alone, Schedule("mine", 1, ())) == (Pool(0, 512, ("m",)),)
    graph = replace(graph_of("a-b"), storages={**graph_of("a-b").storages, "m": m})
    schedule = Schedule("mine", 2, (Launch("a", 1, (FORK,)), Launch("b", 1, releases=("a",))), ("b",))
    assert pools(graph, schedule) == (Pool(1, 2048, ("a", "b")), Pool(0, 512, ("m",)))
    assert peak_bytes(graph, schedule) == 512 + 2048
    assert peak_bytes(graph, replace(schedule, arena=Arena(512, {"m": 0}))) == 512 + 2048


def test_a_pool_is_described_by_what_it_holds_when_it_is_fullest() -> None:
    """Stream 1 has e alone. Stream 0 is fullest at d if b and c are released there, else at c.

    stream 0   a ── b ── c ── d
    stream 1        └─── e
    """
    graph = sized(graph_of("a-b b-c a-e c-d", names="abcde"), {"a": 100, "b": 50, "c": 200, "d": 60, "e": 80})
    a, b, e = Launch("a", 0), Launch("b", 0, releases=("a",)), Launch("e", 1, waits=("a",))
    launches = (a, b, e, Launch("c", 0), Launch("d", 0, releases=("b", "c")))
    found = pools(graph, Schedule("mine", 2, launches))
    assert found == (Pool(0, 310, ("c", "d", "b")), Pool(1, 80, ("e",)))
    swapped = tuple(replace(launch, stream=1 - launch.stream) for launch in launches)
    assert [pool.stream for pool in pools(graph, Schedule("mine", 2, swapped))] == [1, 0], "the largest first"
    earlier = (a, b, e, Launch("c", 0, releases=("b",)), Launch("d", 0, releases=("c",)))
    assert pools(graph, Schedule("mine", 2, earlier))[0] == Pool(0, 260, ("c", "d"))


def test_the_arena_counts_as_a_whole_and_holds_what_ops_access() -> None:
    """The arena has a gap of 40 bytes between b and c. If c reads half of a, all of a is in use.

    a ── b ── c ── d
    """
    graph = sized(graph_of("a-b b-c c-d", names="abcd"), {"a": 100, "b": 50, "c": 200, "d": 10})
    launches = tuple(Launch(name, 0) for name in "abcd")
    schedule = Schedule("mine", 1, launches, arena=Arena(290, {"a": 90, "b": 0, "c": 90}))
    assert pools(graph, schedule) == (Pool(ARENA, 290, ("c", "b")), Pool(0, 10, ("d",)))
    assert peak_bytes(graph, schedule) == 300
    reads = replace(graph.ops["c"], reads=frozenset({"a.1", "b"}))
    halves = replace(with_halves(graph, "a"), ops={**graph.ops, "c": reads})
    apart = replace(schedule, arena=Arena(350, {"a": 0, "b": 100, "c": 150}))
    assert pools(halves, apart)[0] == Pool(ARENA, 350, ("c", "a", "b"))


DIAMOND = graph_of("a-b a-c b-d c-d", outputs="d")
TIMES = {"a": (0.0, 1.0), "b": (1.0, 9.0), "c": (2.0, 3.0), "d": (9.0, 10.0)}
"""1 KiB each; b and c run at the same time, and d is an output.

a ─┬─ b ── d
   └─ c ───┘
"""


def timeline(times: dict[str, tuple[float, float]]) -> Timeline:
    return Timeline(tuple(Slice(name, 0, *span) for name, span in times.items()))


def test_the_footprint_of_the_prelude() -> None:
    """The prelude allocates m, of 4 KiB, which a fills: it stays to the end, unless the arena can hold it."""
    a = replace(DIAMOND.ops["a"], writes=frozenset("m"), allocates=frozenset())
    ops = {**DIAMOND.ops, "a": a, **{n: replace(DIAMOND.ops[n], reads=frozenset("m")) for n in "bc"}}
    m = replace(DIAMOND.storages["a"], name="m", bytes=4096, holders=("m",))
    storages = {name: storage for name, storage in DIAMOND.storages.items() if name != "a"}
    graph = replace(DIAMOND, ops=ops, storages={**storages, "m": m}, prelude=("m",))
    footprint = Footprint(graph)
    assert [size // 1024 for _, size in footprint.in_use(timeline(TIMES))] == [4, 5, 6, 7, 5]
    assert footprint.live_bytes(timeline(TIMES)) == peak_bytes(graph, place_releases(graph, one_stream(graph))) == 7168
    assert footprint.allocated_bytes == {"a": 0, "b": 1024, "c": 1024, "d": 1024}
    assert footprint.freed_bytes(timeline(TIMES)) == {"a": 0, "b": 0, "c": 0, "d": 2048}
    placeable = replace(graph, storages={**graph.storages, "m": replace(m, placeable=True)})
    assert Footprint(placeable).live_bytes(timeline(TIMES)) == 4096 + 2 * 1024, "from a to b, and free when d starts"
    assert Footprint(placeable).freed_bytes(timeline(TIMES))["b"] == 4096
    placed = place_releases(placeable, place_storages(placeable, one_stream(placeable)))
    assert peak_bytes(placeable, placed) == 4096 + 3 * 1024, "the arena as a whole"


@given(data=st.data())
def test_pools_add_up_to_the_peak_and_no_schedule_takes_less_than_the_footprint(data: st.DataObject) -> None:
    graph, costs, schedule = data.draw(planned())
    storages = {
        name: replace(storage, bytes=data.draw(st.integers(1, 9)) * 512, placeable=True)
        for name, storage in graph.storages.items()
    }
    graph = replace(graph, storages=storages)
    run = simulate(schedule, costs, PRICED)

    def live_at(time: float) -> int:
        users = {name: {name, *graph.digraph.successors(name)} for name in graph.ops}
        return sum(
            graph.storages[name].bytes
            for name in graph.ops
            if run.starts[name] <= time
            and (graph.storages[name].escapes or time < max(run.ends[op] for op in users[name]))
        )

    live = Footprint(graph).live_bytes(run)
    assert live == max(live_at(run.starts[name]) for name in graph.ops)
    assert live == max(size for _, size in Footprint(graph).in_use(run))
    released = place_releases(graph, schedule)
    some = [name for name in graph.ops if data.draw(st.booleans())]
    ends = [*accumulate((graph.storages[name].bytes for name in some), initial=0)]
    apart = replace(released, arena=Arena(ends[-1], dict(zip(some, ends, strict=False))))
    for each in (schedule, released, place_releases(graph, place_storages(graph, schedule)), apart):
        assert live <= peak_bytes(graph, each) == sum(pool.bytes for pool in pools(graph, each))
        for pool in pools(graph, each):
            sizes = [graph.storages[name].bytes for name in pool.live]
            assert sizes == sorted(sizes, reverse=True)
            assert sum(sizes) == pool.bytes or (pool.stream == ARENA and sum(sizes) < pool.bytes)
