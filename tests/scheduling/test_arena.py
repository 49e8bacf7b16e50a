"""Storages in the arena that may be in use at the same time share no byte, and few bytes are wasted."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autostream.ir import FORK, Arena, Assignment, Launch, OpGraph, Schedule, Storage
from autostream.scheduling import arena
from autostream.scheduling.arena import ALIGNMENT, place_storages
from autostream.scheduling.lifetimes import lifetimes
from autostream.scheduling.synchronize import synchronize
from tests.scheduling.brute_force import Oracle, assignments, conflict_graphs, schedules
from tests.scheduling.graphs import graph_of

Reads = Sequence[Sequence[int]]
Network = tuple[Reads, Sequence[int]]
"""For each op, which earlier ones it reads, and how many units of ``ALIGNMENT`` it writes."""


def sized(graph: OpGraph, sizes: Mapping[str, int] | int = ALIGNMENT) -> OpGraph:
    """The graph with placeable storages of these sizes."""

    def placeable(storage: Storage) -> Storage:
        return replace(storage, placeable=True, bytes=sizes if isinstance(sizes, int) else sizes[storage.name])

    return replace(graph, storages={name: placeable(storage) for name, storage in graph.storages.items()})


def placed(graph: OpGraph, *launches: Launch) -> Arena:
    return place_storages(graph, Schedule("drawn", 8, launches)).arena


@pytest.mark.parametrize(("wait", "units"), [(FORK, 4), ("c", 2)])
def test_a_stream_reuses_memory_of_another_if_it_waits_for_it(wait: str, units: int) -> None:
    """
    0:  a ─▶ b ─▶ c            d waits for c, or for nothing
                   ╲
    1:              d ─▶ e
    """
    graph = sized(graph_of("a-b b-c d-e", names="abcde"))
    launches = (*(Launch(name, 0) for name in "abc"), Launch("d", 1, (wait,)), Launch("e", 1))
    assert placed(graph, *launches).bytes == units * 512


def test_the_rest_of_the_schedule_is_unchanged_and_an_older_arena_is_replaced() -> None:
    launches = (Launch("a", 1, (FORK,)), Launch("b", 0, ("a",), releases=("a",)))
    before = Schedule("mine", 2, launches, ("a",), arena=Arena(4, {"z": 0}))
    after = place_storages(sized(graph_of("a-b")), before)
    assert after == replace(before, arena=Arena(1024, {"a": 0, "b": 512}))


@st.composite
def plans(draw: st.DrawFn, max_ops: int = 7) -> tuple[OpGraph, Schedule]:
    """Graphs with every kind of access and schedules, some of which lack waits."""
    graph = draw(conflict_graphs(max_ops))
    bytes_of = st.sampled_from([0, 1, 512, 2048]) | st.integers(0, 5000)
    graph = sized(graph, {name: draw(bytes_of) for name in graph.storages})
    return graph, draw(assignments(graph).map(lambda drawn: synchronize(graph, drawn)) | schedules(graph))


@given(plan=plans(), sizes=st.sampled_from([0, arena.MAX_SIZES]))
@settings(max_examples=120)
def test_what_may_be_in_use_at_the_same_time_shares_no_byte(plan: tuple[OpGraph, Schedule], sizes: int) -> None:
    graph, bare = plan
    with patch.object(arena, "MAX_SIZES", sizes):
        schedule = place_storages(graph, bare)
    assert list(schedule.arena.offsets) == list(lifetimes(graph, schedule))
    assert Oracle(graph).is_safe_arena(schedule)


@given(plan=plans(max_ops=12), block=st.integers(1, 5), chunk=st.integers(1, 3))
@settings(max_examples=50)
def test_blocks_and_chunks_change_nothing(plan: tuple[OpGraph, Schedule], block: int, chunk: int) -> None:
    """Conflicts are computed for all storages or block by block, and segments are in chunks of any length."""
    graph, schedule = plan
    best = place_storages(graph, schedule)
    with patch.multiple(arena, CHUNK=chunk):
        assert place_storages(graph, schedule) == best
    with patch.multiple(arena, RULES=arena.RULES[:1], ROUNDS=0):
        whole = place_storages(graph, schedule)
    with patch.multiple(arena, MANY=0, BLOCK=block, CHUNK=chunk):
        assert place_storages(graph, schedule) == whole


def built(network: Network, streams: int = 1) -> tuple[OpGraph, Schedule]:
    """A network whose ops are on each of the streams in turn."""
    reads, sizes = network
    edges = [(f"n{before}", f"n{after}") for after, some in enumerate(reads) for before in sorted(set(some))]
    graph = graph_of(edges, [f"n{at}" for at in range(len(reads))])
    graph = sized(graph, {"x_in": 0, **{f"n{at}": ALIGNMENT * size for at, size in enumerate(sizes)}})
    stream = {name: at % streams for at, name in enumerate(graph.ops)}
    return graph, synchronize(graph, Assignment("in turn", streams, tuple(graph.ops), stream))


def most_alive(network: Network) -> int:
    """The most bytes that are alive at once when the ops run one by one: no arena is smaller."""
    reads, sizes = network
    last = {before: at for at, some in enumerate(reads) for before in some}
    return ALIGNMENT * max(
        sum(sizes[one] for one in range(at + 1) if last.get(one, one) >= at) for at in range(len(reads))
    )


def training(choose: random.Random) -> Network:
    """Forward, then backward: each layer's result lives until its gradient is computed."""
    layers = 60
    reads: list[list[int]] = [[], *([at] for at in range(layers - 1))]
    sizes = [choose.choice([8, 16, 64, 200, 777]) for _ in range(layers)]
    for at in reversed(range(1, layers)):
        gradient = len(reads) - (2 if at < layers - 1 else 1)
        reads += [[at, gradient], [at - 1, gradient]]
        sizes += [sizes[at - 1], choose.choice([1, 3, 64])]
    return reads, sizes


def anything(choose: random.Random, ops: int = 300) -> Network:
    """Ops that read one to three of the twenty before them, of sizes over three orders of magnitude."""
    reads = [
        [choose.randrange(max(0, at - 20), at) for _ in range(choose.randint(1, 3))] if at else [] for at in range(ops)
    ]
    return reads, [int(2 ** choose.uniform(0, 10)) for _ in reads]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("network", "waste"),
    [(training, 1.02), (anything, 1.25)],
)
def test_on_one_stream_little_is_wasted(network: Callable[[random.Random], Network], waste: float, seed: int) -> None:
    drawn = network(random.Random(seed))
    assert place_storages(*built(drawn)).arena.bytes <= waste * most_alive(drawn)


def test_many_storages_are_placed_as_safely() -> None:
    """More than ``MANY`` of more than ``MAX_SIZES`` sizes, in several blocks and chunks, streams that seldom wait."""
    choose = random.Random(0)
    reads = [[choose.randrange(max(0, at - 40), at)] if at % 3 else [] for at in range(300)]
    graph, schedule = built((reads, [choose.randint(1, 3000) for _ in reads]), 3)
    with patch.multiple(arena, MANY=100, MAX_SIZES=50):
        whole = place_storages(graph, schedule)
        with patch.multiple(arena, BLOCK=128, CHUNK=2):
            assert place_storages(graph, schedule) == whole
    assert Oracle(graph).is_safe_arena(whole)
