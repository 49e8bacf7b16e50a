"""The arena: storages that may be in use at the same time share no byte, and little room is wasted."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import permutations
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autostream.ir import FORK, Arena, Assignment, Launch, OpGraph, Role, Schedule, Storage
from autostream.scheduling import arena
from autostream.scheduling.arena import ALIGNMENT, place_storages
from autostream.scheduling.synchronize import synchronize
from tests.scheduling.brute_force import assignments, conflict_graphs, happens_before, in_parts, schedules
from tests.scheduling.graphs import graph_of, op

Reads = Sequence[Sequence[int]]
Network = tuple[Reads, Sequence[int]]
"""For each op, which earlier ones it reads, and how many units of ``ALIGNMENT`` it writes."""


def sized(graph: OpGraph, sizes: Mapping[str, int] | int = ALIGNMENT) -> OpGraph:
    """The graph with storages that may lie anywhere, of these sizes."""

    def placeable(storage: Storage) -> Storage:
        return replace(storage, placeable=True, bytes=sizes if isinstance(sizes, int) else sizes[storage.name])

    return replace(graph, storages={name: placeable(storage) for name, storage in graph.storages.items()})


def placed(graph: OpGraph, *launches: Launch) -> Arena:
    return place_storages(graph, Schedule("drawn", 8, launches)).arena


def accesses(graph: OpGraph) -> Mapping[str, Sequence[str]]:
    """The storages that may be placed, with the ops that touch them or parts of them."""
    touching = {
        name: [op.name for op in graph.ops.values() if in_parts(graph, [name]) & in_parts(graph, op.reads | op.writes)]
        for name, storage in graph.storages.items()
        if storage.role is Role.INTERMEDIATE and storage.placeable and not storage.escapes and storage.bytes
    }
    return {name: ops for name, ops in touching.items() if ops}


def unordered(graph: OpGraph, schedule: Schedule) -> set[tuple[str, str]]:
    """Pairs of storages that may be in use at the same time, both ways round."""
    ordered, touching = happens_before(schedule), accesses(graph)

    def before(one: str, other: str) -> bool:
        return {(a, b) for a in touching[one] for b in touching[other]} <= ordered

    return {(a, b) for a in touching for b in touching if a != b and not before(a, b) and not before(b, a)}


def clashes(graph: OpGraph, schedule: Schedule) -> set[tuple[str, str]]:
    """Pairs of storages that share bytes of the arena and may be in use at the same time."""
    plan = schedule.arena
    last = {name: offset + graph.storages[name].bytes for name, offset in plan.offsets.items()}
    return {(a, b) for a, b in unordered(graph, schedule) if plan.offsets[a] < last[b] and plan.offsets[b] < last[a]}


class TestDrawn:
    def test_nothing_takes_nothing(self) -> None:
        assert placed(graph_of("")) == Arena()
        assert placed(graph_of("a-b"), Launch("a", 0), Launch("b", 0)) == Arena()

    def test_a_chain_goes_to_and_fro_between_two_places(self) -> None:
        """0:  a ─▶ b ─▶ c ─▶ d"""
        plan = placed(sized(graph_of("a-b b-c c-d")), *(Launch(name, 0) for name in "abcd"))
        assert plan == Arena(1024, {"a": 0, "b": 512, "c": 0, "d": 512})

    def test_small_ones_lie_side_by_side_where_a_large_one_was(self) -> None:
        """0:  a ── b ── c ─▶ d       a is as large as b, c and d together"""
        graph = sized(graph_of("b-d c-d", names="abcd"), {"a": 1536, "b": 512, "c": 512, "d": 512, "x_in": 0})
        assert placed(graph, *(Launch(name, 0) for name in "abcd")) == Arena(
            1536, {"a": 0, "b": 0, "c": 512, "d": 1024}
        )

    def test_streams_that_do_not_wait_lie_side_by_side(self) -> None:
        """
        0:  a ─▶ b ─▶ c
        1:  d ─▶ e ─▶ f            launched later
        """
        graph = sized(graph_of("a-b b-c d-e e-f"))
        launches = (*(Launch(name, 0) for name in "abc"), Launch("d", 1, (FORK,)), Launch("e", 1), Launch("f", 1))
        assert placed(graph, *launches).bytes == 4 * 512

    def test_a_stream_that_waits_uses_what_another_is_done_with(self) -> None:
        """
        0:  a ─▶ b ── c            d waits for c
                       ╲
        1:              d ─▶ e
        """
        graph = sized(graph_of("a-b d-e", names="abcde"))
        launches = (*(Launch(name, 0) for name in "abc"), Launch("d", 1, ("c",)), Launch("e", 1))
        assert placed(graph, *launches).bytes == 2 * 512

    def test_offsets_are_aligned_and_in_the_order_of_storages(self) -> None:
        """0:  a ─▶ c ◀─ b            1, 513 and 512 bytes"""
        graph = sized(graph_of("a-c b-c", names="abc"), {"a": 1, "b": 513, "c": 512, "x_in": 0})
        plan = placed(graph, *(Launch(name, 0) for name in "abc"))
        assert plan.bytes == 512 + 1024 + 512
        assert list(plan.offsets) == ["a", "b", "c"]

    def test_everything_else_is_passed_on_and_an_older_arena_is_replaced(self) -> None:
        launches = (Launch("a", 1, (FORK,)), Launch("b", 0, ("a",), releases=("a",)))
        before = Schedule("mine", 2, launches, ("a",), arena=Arena(4, {"z": 0}))
        after = place_storages(sized(graph_of("a-b")), before)
        assert after == replace(before, arena=Arena(1024, {"a": 0, "b": 512}))


class TestOracle:
    """Whether the tests below would see a mistake."""

    def test_a_shortened_lifetime_is_seen(self) -> None:
        """
        0:  a ─▶ b ─▶ c ─▶ d       d reads a, too, but the plan is for a graph in which it does not
             ╲────────────╱
        """
        graph = sized(graph_of("a-b b-c c-d a-d"))
        schedule = Schedule("drawn", 1, tuple(Launch(name, 0) for name in "abcd"))
        shortened = place_storages(replace(graph, ops={**graph.ops, "d": op("d", ["c"])}), schedule)
        assert clashes(graph, shortened) == {("a", "c"), ("c", "a")}
        assert clashes(graph, place_storages(graph, schedule)) == set()

    def test_a_foreign_reader_that_is_forgotten_is_seen(self) -> None:
        """
        0:  a ── b ── c
             ╲
        1:    d                    reads a, and nobody waits for it
        """
        graph = sized(graph_of("a-d", names="abcd"))
        schedule = Schedule("drawn", 2, (Launch("a", 0), Launch("d", 1, ("a",)), Launch("b", 0), Launch("c", 0)))
        shortened = place_storages(replace(graph, ops={**graph.ops, "d": op("d")}), schedule)
        assert clashes(graph, shortened)
        assert not clashes(graph, place_storages(graph, schedule))


@st.composite
def plans(draw: st.DrawFn, max_ops: int = 7) -> tuple[OpGraph, Schedule]:
    """Graphs with every kind of access, sizes of few kinds or any, and schedules, of which some lack waits."""
    graph = draw(conflict_graphs(max_ops))
    bytes_of = st.sampled_from([0, 1, 512, 2048]) | st.integers(0, 5000)
    graph = sized(graph, {name: draw(bytes_of) for name in graph.storages})
    return graph, draw(assignments(graph).map(lambda drawn: synchronize(graph, drawn)) | schedules(graph))


@given(plan=plans(), kinds=st.sampled_from([0, arena.MAX_SIZES]))
@settings(max_examples=300, deadline=None)
def test_what_may_be_in_use_at_the_same_time_shares_no_byte(plan: tuple[OpGraph, Schedule], kinds: int) -> None:
    graph, bare = plan
    with patch.object(arena, "MAX_SIZES", kinds):
        schedule = place_storages(graph, bare)
    offsets = schedule.arena.offsets
    assert list(offsets) == list(accesses(graph))
    assert all(offset >= 0 and offset % ALIGNMENT == 0 for offset in offsets.values())
    assert all(offset + graph.storages[name].bytes <= schedule.arena.bytes for name, offset in offsets.items())
    assert clashes(graph, schedule) == set()


def packed(order: Iterable[str], sizes: Mapping[str, int], conflicts: set[tuple[str, str]]) -> int:
    """The arena that results when one storage after the other is put at the lowest offset that it can have, bytes."""
    offsets: dict[str, int] = {}
    for name in order:
        others = [(offsets[other], offsets[other] + sizes[other]) for other in offsets if (name, other) in conflicts]
        ends = sorted({0, *(end for _, end in others)})
        offsets[name] = next(
            low for low in ends if all(end <= low or low + sizes[name] <= start for start, end in others)
        )
    return max((offset + sizes[name] for name, offset in offsets.items()), default=0)


@given(plans(max_ops=6) | st.randoms(use_true_random=False).map(lambda choose: built(anything(choose, 6), 2)))
@settings(max_examples=200, deadline=None)
def test_small_arenas_are_at_most_a_third_larger_than_the_best(plan: tuple[OpGraph, Schedule]) -> None:
    """Some order of first fit leads to the best arena: the one in which its own offsets rise."""
    graph, schedule = plan
    conflicts = unordered(graph, schedule)
    sizes = {name: -(-graph.storages[name].bytes // ALIGNMENT) * ALIGNMENT for name in accesses(graph)}
    best = min(packed(order, sizes, conflicts) for order in permutations(sizes))
    assert best <= place_storages(graph, schedule).arena.bytes <= best * 4 / 3


@given(plan=plans(max_ops=12), block=st.integers(1, 5), chunk=st.integers(1, 3))
@settings(max_examples=200, deadline=None)
def test_blocks_and_chunks_change_nothing(plan: tuple[OpGraph, Schedule], block: int, chunk: int) -> None:
    """One order is tried, with sets of all or block by block; and several, whose slots are in chunks."""
    graph, schedule = plan
    best = place_storages(graph, schedule)
    with patch.multiple(arena, CHUNK=chunk):
        assert place_storages(graph, schedule) == best
    with patch.multiple(arena, RULES=arena.RULES[:1], ROUNDS=0):
        whole = place_storages(graph, schedule)
    with patch.multiple(arena, MANY=0, BLOCK=block, CHUNK=chunk):
        assert place_storages(graph, schedule) == whole


def built(network: Network, streams: int = 1) -> tuple[OpGraph, Schedule]:
    """A network whose ops take turns on so many streams."""
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


def residual(choose: random.Random) -> Network:
    """Blocks of convolutions beside a shortcut, smaller from stage to stage."""
    reads: list[list[int]] = [[]]
    sizes = [1024]
    for stage in range(4):
        for _ in range(choose.randint(2, 4)):
            start = len(reads) - 1
            for width in (1, 1, 1, 1, 4):
                reads.append([len(reads) - 1])
                sizes.append(width * 1024 >> stage)
            reads.append([len(reads) - 1, start])
            sizes.append(4096 >> stage)
    return reads, sizes


def dense(choose: random.Random) -> Network:
    """Layers that read all the earlier ones of their block, joined to one storage."""
    reads: list[list[int]] = [[]]
    sizes = [64]
    for _ in range(3):
        features, growth = [len(reads) - 1], choose.randint(8, 32)
        for _ in range(8):
            joined = sum(sizes[feature] for feature in features)
            for some, size in ((list(features), joined), ([len(reads)], 4 * growth), ([len(reads) + 1], growth)):
                reads.append(some)
                sizes.append(size)
            features.append(len(reads) - 1)
        reads.append(features)
        sizes.append(64)
    return reads, sizes


def attention(choose: random.Random) -> Network:
    """Layers of a transformer: queries, keys and values, scores, and a wide perceptron."""
    width, scores = choose.randint(16, 64), choose.randint(100, 300)
    layer = [  # what it reads, counted back, and its size
        *(((1,), width), ((1,), width), ((2,), width), ((3,), width), ((3, 2), scores), ((1,), scores)),
        *(((1, 3), width), ((1,), width), ((1, 9), width), ((1,), width), ((1,), 4 * width), ((1,), 4 * width)),
        *(((1,), width), ((1, 5), width)),
    ]
    reads: list[list[int]] = [[]]
    sizes = [width]
    for _ in range(6):
        for back, size in layer:
            reads.append([len(reads) - step for step in back])
            sizes.append(size)
    return reads, sizes


def training(choose: random.Random) -> Network:
    """Forward, then backward: each layer's result is kept until its gradient is known."""
    layers = 60
    reads: list[list[int]] = [[], *([at] for at in range(layers - 1))]
    sizes = [choose.choice([8, 16, 64, 200, 777]) for _ in range(layers)]
    for at in reversed(range(1, layers)):
        gradient = len(reads) - (2 if at < layers - 1 else 1)
        reads += [[at, gradient], [at - 1, gradient]]
        sizes += [sizes[at - 1], choose.choice([1, 3, 64])]
    return reads, sizes


def chain(choose: random.Random) -> Network:
    """One op after the other, of any sizes."""
    return [[at - 1] if at else [] for at in range(100)], [choose.randint(1, 2000) for _ in range(100)]


def anything(choose: random.Random, ops: int = 300) -> Network:
    """Ops that read one to three of the twenty before them, of sizes over three orders of magnitude."""
    reads = [
        [choose.randrange(max(0, at - 20), at) for _ in range(choose.randint(1, 3))] if at else [] for at in range(ops)
    ]
    return reads, [int(2 ** choose.uniform(0, 10)) for _ in reads]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("network", "waste"),
    [(residual, 1.0), (dense, 1.0), (attention, 1.0), (training, 1.02), (chain, 1.1), (anything, 1.25)],
)
def test_on_one_stream_little_is_wasted(network: Callable[[random.Random], Network], waste: float, seed: int) -> None:
    drawn = network(random.Random(seed))
    assert place_storages(*built(drawn)).arena.bytes <= waste * most_alive(drawn)


@pytest.mark.parametrize("streams", [2, 8])
@pytest.mark.parametrize(
    ("sizes", "waste"), [((4,), 1.0), ((6, 2), 1.0), ((9, 4, 2, 1), 1.0), ((1, 8, 3), 1.1), ((9, 2, 5), 1.15)]
)
def test_chains_take_the_sum_of_what_each_needs(streams: int, sizes: Sequence[int], waste: float) -> None:
    """
    0:  a ─▶ b ─▶ c ─▶ a ─▶ …      no stream waits for another: the two largest neighbours of each are alive at once
    1:  a ─▶ b ─▶ c ─▶ a ─▶ …
    """
    length = 20 * streams
    reads = [[at - streams] if at >= streams else [] for at in range(length)]
    chains = (reads, [sizes[at // streams % len(sizes)] for at in range(length)])
    need = streams * ALIGNMENT * max(map(sum, zip(sizes, (*sizes[1:], sizes[0]), strict=True)))
    assert need <= place_storages(*built(chains, streams)).arena.bytes <= waste * need


def test_many_storages_are_placed_as_safely() -> None:
    """More than ``MANY`` of more than ``MAX_SIZES`` sizes, in several blocks and chunks, streams that seldom wait."""
    choose = random.Random(0)
    reads = [[choose.randrange(max(0, at - 40), at)] if at % 3 else [] for at in range(300)]
    graph, schedule = built((reads, [choose.randint(1, 3000) for _ in reads]), 3)
    with patch.multiple(arena, MANY=100, MAX_SIZES=50):
        whole = place_storages(graph, schedule)
        with patch.multiple(arena, BLOCK=128, CHUNK=2):
            assert place_storages(graph, schedule) == whole
    assert clashes(graph, whole) == set()
