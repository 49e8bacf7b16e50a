"""Collectives and their stream, which no other op is on; and the ops that follow them.

    stream 0   ─ backward ─ backward ─ backward ─ update ─
    stream 1        │   wait ─ update ──┼───────────┘
    stream 2        └─ all-reduce ─ all-reduce

A collective begins as soon as its inputs are there and those before it are over, and delays nothing but those who need
its result. (NCCL runs its kernels on a stream of its own anyway; the stream that issues one is joined to that.)

When a collective ends depends on other processes, and on what runs beside it, so it may be late. What follows it waits,
and so does all that comes later on the same stream: on two H200s, a backward of ResNet-50 waited 120 µs for updates
that were launched before it. So ops that follow collectives come last on each stream, unless there is no memory for
what they would release. In a group of one process none is late, but updates have time, and a backward has not: steps
of six encoder layers with 13 buckets took 1,246 µs on an H200, and 1,272 if updates came like any other op.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import zip_longest

from autostream.ir import Costs, OpGraph, Timeline


def placed_apart(graph: OpGraph, streams: int, pinned: Set[str]) -> tuple[frozenset[str], frozenset[str]]:
    """Collectives, and the ops that follow them; none if there is one stream, on which all run in order."""
    if streams == 1:
        return frozenset(), frozenset()
    return graph.collectives - pinned, followers(graph)


def followers(graph: OpGraph) -> frozenset[str]:
    """The ops that need a collective and that none needs: updates of parameters, as a rule.

    Example:
        The reduction of a product's result is used by an update; another product is not:

        >>> from autostream.ir import Dependency, Hazard, Op
        >>> none = frozenset()
        >>> ops = {name: Op(name, "f", (name,), none, none) for name in ("mm", "update", "other")}
        >>> ops["sum"] = Op("sum", "f", ("sum",), none, none, group="0", processes=2)
        >>> needed = [Dependency(*pair, Hazard.RAW, "x") for pair in (("mm", "sum"), ("sum", "update"))]
        >>> sorted(followers(OpGraph(ops, tuple(needed), {}, (), "cuda:0")))
        ['update']
    """
    names, needing, needed = list(graph.ops), set[int](), set[int]()
    communicating = {at for at, name in enumerate(names) if name in graph.collectives}
    for at in range(len(names)):
        if any(before in needing or before in communicating for before in graph.predecessors[at]):
            needing.add(at)
    for at in reversed(range(len(names))):
        if any(after in needed or after in communicating for after in graph.successors[at]):
            needed.add(at)
    return frozenset(names[at] for at in needing - needed - communicating)


def followers_last(order: Sequence[str], following: Set[str]) -> list[str]:
    """A launch order in which ops that follow collectives come after all others.

    Example:
        >>> followers_last(["sum", "update", "mm"], {"update"})
        ['sum', 'mm', 'update']
    """
    return sorted(order, key=following.__contains__)


def hold_back(order: Iterable[str], stream: Mapping[str, int], following: Set[str]) -> bool:
    """Whether an op that follows a collective is launched before one that does not, on the same stream.

    Example:
        >>> hold_back(["sum", "update", "mm"], {"sum": 1, "update": 0, "mm": 0}, {"update"})
        True
    """
    waiting = set()
    for name in order:
        if name in following:
            waiting.add(stream[name])
        elif stream[name] in waiting:
            return True
    return False


def set_apart(stream: Mapping[str, int], communicating: Set[str]) -> dict[str, int]:
    """The streams of ops, numbered without gaps, with these ops on the next one after all others.

    Example:
        >>> set_apart({"a": 0, "reduce": 0, "b": 2}, {"reduce"})
        {'a': 0, 'reduce': 2, 'b': 1}
    """
    used = sorted({0, *(at for name, at in stream.items() if name not in communicating)})
    number = {at: place for place, at in enumerate(used)}
    return {name: len(used) if name in communicating else number[at] for name, at in stream.items()}


def exposed_us(timeline: Timeline, graph: OpGraph) -> float:
    """How long collectives run and nothing else does, µs: what hiding them better could save.

    Example:
        The reduction runs from 1 to 5, and beside it from 0 to 3 a product:

        >>> from autostream.ir import Op, Slice
        >>> none = frozenset()
        >>> ops = {name: Op(name, "f", (name,), none, none, group=group) for name, group in (("mm", ""), ("sum", "0"))}
        >>> timeline = Timeline((Slice("mm", 0, 0.0, 3.0), Slice("sum", 1, 1.0, 5.0)))
        >>> exposed_us(timeline, OpGraph(ops, (), {}, (), "cuda:0"))
        2.0
    """
    computing, communicating = (
        [(slice.start_us, slice.end_us) for slice in timeline.slices if (slice.op in graph.collectives) == kind]
        for kind in (False, True)
    )
    return uncovered_us(communicating, computing)


def with_collectives(costs: Costs, graph: OpGraph, times: float) -> Costs:
    """The costs, with collectives that take so many times as long."""
    return {
        name: replace(cost, duration_us=cost.duration_us * times) if name in graph.collectives else cost
        for name, cost in costs.items()
    }


def uncovered_us(intervals: Iterable[tuple[float, float]], others: Iterable[tuple[float, float]]) -> float:
    """How long any of some intervals lasts and none of some others, µs; each is a start and an end.

    Example:
        >>> uncovered_us([(1.0, 5.0), (2.0, 6.0)], [(0.0, 3.0), (4.0, 4.5)])
        2.5
    """
    uncovered = covered_to = 0.0
    others = sorted(others)
    for start, end in sorted(intervals):
        at = max(start, covered_to)
        for begin, over in others:
            if over > at and begin < end:
                uncovered += max(0.0, begin - at)
                at = over
        uncovered += max(0.0, end - at)
        covered_to = max(covered_to, end)
    return uncovered


@dataclass(frozen=True, slots=True)
class Collective:
    """What all processes of a group have to agree on.

    Attributes:
        op: what is called, and how, e.g. ``"all_reduce_(reduce_op=sum)"``.
        dtype: of its tensors.
        bytes: of the larger of what it takes and returns; ``None`` if these need not be the same everywhere.
        group: the name of its process group; ``""`` for a group that not all of these processes are in.
        sends: how many bytes for each process of the group, if ``bytes`` is ``None`` and they are known.
        receives: how many from each.
    """

    op: str
    dtype: str
    bytes: int | None
    group: str
    sends: tuple[int, ...] = ()
    receives: tuple[int, ...] = ()

    def __str__(self) -> str:
        """In words, the same on all processes that agree."""
        size = "" if self.bytes is None else f"{self.bytes:,} bytes of "
        return (
            f"{self.op} of {size}{self.dtype} in {f'process group {self.group!r}' if self.group else 'another group'}"
        )


def sequence(graph: OpGraph, order: Iterable[str], shared: Set[str]) -> tuple[Collective, ...]:
    """The collectives among ops, in the order in which they are launched.

    If the processes of each group launch the same in the same order, over all groups, none waits for ever: the first
    that some process has not launched is launched as soon as earlier ones are over, and these all have launched.

    Args:
        graph: the ops.
        order: their names, in launch order.
        shared: the names of the groups that all processes that compare theirs are in. Other groups may have other
            processes here than there, as the columns of a mesh do for the processes of a row.

    Example:
        >>> from autostream.ir import Op
        >>> none = frozenset()
        >>> ops = {"r": Op("r", "_c10d_functional.all_reduce.default", ("r",), none, none, bytes_read=8, group="0",
        ...                terms="reduce_op=sum")}
        >>> (found,) = sequence(OpGraph(ops, (), {}, (), "cuda:0"), ["r"], {"0"})
        >>> print(found)
        all_reduce(reduce_op=sum) of 8 bytes of float16 in process group '0'
    """
    found = []
    for op in map(graph.ops.__getitem__, order):
        if op.group:
            called = op.target.removeprefix("_c10d_functional.").removesuffix(".default")
            size = None if "all_to_all" in called else max(op.bytes_read, op.bytes_written)
            group = op.group if op.group in shared else ""
            called += f"({op.terms})" * bool(op.terms)
            found.append(Collective(called, op.dtype, size, group, op.sends, op.receives))
    return tuple(found)


def first_mismatch(sequences: Sequence[Sequence[tuple[Sequence[int], Sequence[int]]]]) -> str:
    """Where a process first sends more or less than another takes from it, in words; ``""`` if none does.

    Args:
        sequences: for each process of a group, by rank, what each of its collectives sends to all and takes from all,
            in bytes; nothing if that is the same everywhere, or not known.

    Example:
        >>> first_mismatch([[((4, 12), (4, 4))], [((4, 4), (8, 4))]])
        'number 1 sends 12 bytes from rank 0 to rank 1, which takes 8'
    """
    for at, exchange in enumerate(zip(*sequences, strict=True), 1):
        for source, (sends, _) in enumerate(exchange):
            for sink, sent in enumerate(sends):
                received = exchange[sink][1]
                if received and received[source] != sent:
                    taken = f"which takes {received[source]:,}"
                    return f"number {at} sends {sent:,} bytes from rank {source} to rank {sink}, {taken}"
    return ""


def first_difference(own: Sequence[object], other: Sequence[object], name: str, other_name: str) -> str:
    """Where two sequences differ first, in words; ``""`` if they do not.

    Example:
        >>> first_difference(["sum", "gather"], ["sum"], "rank 0", "rank 1")
        'number 2 is gather on rank 0 and nothing on rank 1'
    """
    for at, (one, another) in enumerate(zip_longest(own, other, fillvalue="nothing"), 1):
        if str(one) != str(another):
            return f"number {at} is {one} on {name} and {another} on {other_name}"
    return ""
