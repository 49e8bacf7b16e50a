"""The order in which devices of one process take turns, where copies from one to another are all that joins them.

    cuda:0   f0 ─ f1 ─ f2 ─ f3 ─ b0 ─── f4 ─ b1 ─── …      f, b: forward, backward of a microbatch by the first layers
               ╲    ╲    ╲      ╱           ╱
    cuda:1       m0 ─────── m1 ─────── m2 ─────── …        m: forward and backward by the last layers

Ops on one device with the same copies before them and the same copies after them are a *turn*. A path between two of
its ops has no copy, which would be before the one and not before the other, so it stays in the turn: no two turns wait
for each other. A step of several microbatches has two for each microbatch and device, its forward and its backward.

Turns are ordered by list scheduling: devices and copies are simulated, and next is always what can start first, of
several a copy, which others wait for, or what comes first in the program. So a microbatch's backward comes before the
forward of one after it that could start at the same time, as in 1F1B (Narayanan et al. 2019, "PipeDream: generalized
pipeline parallelism for DNN training"), but no device waits for it while it could compute.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import reduce
from itertools import chain
from operator import and_, or_
from typing import NamedTuple

from autostream.ir import Hazard, OpGraph, Role

Neighbours = Sequence[Collection[int]]


def turns(graph: OpGraph, positions: Sequence[int], duration_us: Mapping[str, float]) -> list[list[int]]:
    """Ops in turns, in the order in which the host launches them.

    Args:
        graph: the ops.
        positions: of those to order, in program order.
        duration_us: of ops, by name, µs; 1 where there is none.

    Returns:
        The positions of the ops of each turn, in program order. Each copy is a turn of its own; turns of one device
        between which nothing has to run are one.

    Example:
        Two microbatches, each copied to another device:

        >>> from autostream.ir import Dependency, Hazard, Op
        >>> def op(name, device="cuda:1", crosses=""):
        ...     return Op(name, "f", (name,), frozenset(), frozenset(), device=device, crosses=crosses)
        >>> ops = [op("a0", "cuda:0"), op("c0", crosses="peer"), op("b0"),
        ...        op("a1", "cuda:0"), op("c1", crosses="peer"), op("b1")]
        >>> edges = [Dependency(x + n, y + n, Hazard.RAW, x + n) for n in "01" for x, y in ("ac", "cb")]
        >>> graph = OpGraph({op.name: op for op in ops}, tuple(edges), {}, (), "cuda:0")
        >>> [[ops[at].name for at in turn] for turn in turns(graph, range(6), {})]
        [['a0'], ['c0'], ['a1'], ['c1'], ['b0'], ['b1']]
    """
    ops, found = [*graph.ops.values()], _turns(graph, positions)
    turn_of = {at: number for number, turn in enumerate(found) for at in turn}
    made = [
        _Turn(
            number,
            ops[turn[0]].device,
            bool(ops[turn[0]].crosses),
            sum(duration_us.get(ops[at].name, 1.0) for at in turn),
            frozenset(turn_of[b] for at in turn for b in graph.predecessors[at] if b in turn_of) - {number},
        )
        for number, turn in enumerate(found)
    ]
    joined = _joined(_launched(made))
    return [sorted(chain.from_iterable(found[turn.number] for turn in together)) for together in joined]


class _Turn(NamedTuple):
    """A turn.

    Attributes:
        number: of the turn, by its first op.
        device: that computes, or that a copy goes to.
        copies: whether it is a copy, which runs on streams of its own.
        duration_us: of its ops together, µs.
        before: the turns that it waits for.
    """

    number: int
    device: str
    copies: bool
    duration_us: float
    before: frozenset[int]


class _Launch(NamedTuple):
    """When a turn runs.

    Attributes:
        turn: the turn.
        start_us: when it starts, µs.
        end_us: when it ends.
    """

    turn: _Turn
    start_us: float
    end_us: float


def _launched(turns: Sequence[_Turn]) -> list[_Launch]:
    """The turns in the order in which they start."""
    after: list[list[int]] = [[] for _ in turns]
    for turn in turns:
        for other in turn.before:
            after[other].append(turn.number)
    missing, ready_us = [len(turn.before) for turn in turns], [0.0] * len(turns)
    ready = {turn.number for turn in turns if not turn.before}
    free_us: dict[str, float] = {}

    def start_us(number: int) -> float:
        turn = turns[number]
        return ready_us[number] if turn.copies else max(ready_us[number], free_us.get(turn.device, 0.0))

    launched = []
    while ready:
        turn = turns[min(ready, key=lambda number: (start_us(number), not turns[number].copies, number))]
        launch = _Launch(turn, start_us(turn.number), start_us(turn.number) + turn.duration_us)
        if not turn.copies:
            free_us[turn.device] = launch.end_us
        ready.remove(turn.number)
        launched.append(launch)
        for later in after[turn.number]:
            ready_us[later] = max(ready_us[later], launch.end_us)
            missing[later] -= 1
            if not missing[later]:
                ready.add(later)
    return launched


def _joined(launched: Sequence[_Launch]) -> list[list[_Turn]]:
    """Turns that run as one: of one device, where that delays no other turn."""
    end_us = {launch.turn.number: launch.end_us for launch in launched}
    joined: list[list[_Launch]] = []
    for launch in launched:
        into = _room_for(launch, joined, end_us)
        if into is None:
            joined.append([launch])
        else:
            into.append(launch)
    return [[launch.turn for launch in each] for each in joined]


def _room_for(launch: _Launch, joined: Sequence[list[_Launch]], end_us: Mapping[int, float]) -> list[_Launch] | None:
    """The last turns of the same device, if nothing launched since waits for them, and they would not wait longer."""
    if launch.turn.copies:
        return None
    since = set[int]()
    for last in reversed(joined):
        numbers = {each.turn.number for each in last}
        if last[0].turn.device == launch.turn.device and not last[0].turn.copies:
            others = launch.turn.before - numbers
            delays = any(end_us[other] > last[0].start_us for other in others)
            return None if delays or since & numbers else last
        if launch.turn.before & numbers:
            return None
        since = since.union(*(each.turn.before for each in last))
    return None


def _turns(graph: OpGraph, positions: Sequence[int]) -> list[list[int]]:
    """The turns, by their first ops. Sets of copies are bits of a number."""
    ops, inside = [*graph.ops.values()], set(positions)
    copies = [at for at in positions if ops[at].crosses]
    bit = {at: 1 << number for number, at in enumerate(copies)}

    def reached(bit: Mapping[int, int], order: Iterable[int], neighbours: Neighbours) -> dict[int, int]:
        found: dict[int, int] = {}
        for at in order:
            found[at] = reduce(or_, (found[n] | bit.get(n, 0) for n in neighbours[at] if n in inside), 0)
        return found

    needed = _needed(
        graph, copies, bit, reached(bit, positions, _sources(graph)), reached(bit, positions, graph.predecessors)
    )
    together = {at: bit[root] for at, root in needed.items()}
    before = reached(together, positions, graph.predecessors)
    after = reached(together, [*reversed(positions)], graph.successors)
    found: dict[tuple[int, str, int, int], list[int]] = {}
    for at in positions:
        found.setdefault((bit.get(at, 0), ops[at].device, before[at], after[at]), []).append(at)
    return [*found.values()]


def _needed(
    graph: OpGraph, copies: Sequence[int], bit: Mapping[int, int], sources: Mapping[int, int], before: Mapping[int, int]
) -> dict[int, int]:
    """For each copy the one that it may wait for, since whatever uses it needs both: of a skip connection, the last.

    Args:
        graph: the ops.
        copies: their positions.
        bit: of each copy.
        sources: the copies that the data of each op comes from.
        before: the copies before each op.
    """
    ops = [*graph.ops.values()]
    needs = {
        at: reduce(and_, (sources[user] for user in graph.successors[at] if sources.get(user, 0) & bit[at]), -1)
        for at in copies
    }

    def rank(at: int) -> tuple[int, int]:
        return needs[at].bit_count() if needs[at] >= 0 else 0, at

    found: dict[int, int] = {}
    for at in sorted(copies, key=rank):
        others = (
            other
            for other, root in found.items()
            if other == root
            and needs[at] > 0
            and needs[at] & bit[other]
            and ops[other].device == ops[at].device
            and not (before[at] & bit[other] or before[other] & bit[at])
        )
        found[at] = next(others, at)
    return found


def _sources(graph: OpGraph) -> list[set[int]]:
    """The ops whose results each op reads; of state, such as a random number generator, it reads none."""
    number = {name: at for at, name in enumerate(graph.ops)}
    found: list[set[int]] = [set() for _ in number]
    for each in graph.dependencies:
        storage = graph.storages.get(each.resource)
        state = storage is not None and storage.role is not Role.INTERMEDIATE
        if each.hazard is Hazard.RAW and not state:
            found[number[each.after]].add(number[each.before])
    return found
