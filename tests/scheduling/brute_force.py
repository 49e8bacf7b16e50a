"""What a correct schedule is, by brute force, and random graphs and schedules, to test the fast code against."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import networkx as nx
import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from autostream.ir import (
    FORK,
    JOIN,
    Arena,
    Assignment,
    Dependency,
    Hazard,
    Launch,
    Op,
    OpGraph,
    Role,
    Schedule,
    Storage,
)
from autostream.scheduling.verify import ALIGNMENT

Pair = tuple[str, str]
Matrix = NDArray[np.bool_]


def conflicts(graph: OpGraph) -> list[Dependency]:
    """Every pair of ops, neighbours or not, that must keep its program order."""
    ops = [replace(op, reads=in_parts(graph, op.reads), writes=in_parts(graph, op.writes)) for op in graph.ops.values()]
    return [
        Dependency(before.name, after.name, hazard, resource)
        for at, after in enumerate(ops)
        for before in ops[:at]
        for hazard, resources in (
            (Hazard.RAW, before.writes & after.reads),
            (Hazard.WAR, before.reads & after.writes),
            (Hazard.WAW, before.writes & after.writes),
            (Hazard.ORDER, before.orders & after.orders),
        )
        for resource in sorted(resources)
    ]


def in_parts(graph: OpGraph, names: Iterable[str]) -> frozenset[str]:
    """These names, with each storage that has parts replaced by its parts."""
    storages = graph.storages
    return frozenset(part for name in names for part in (name in storages and storages[name].parts) or (name,))


def stream_edges(launches: Sequence[Launch]) -> set[Pair]:
    """Each point and the next one of the same stream, fork and join among them."""
    last = {0: FORK}
    edges = set()
    for launch in (*launches, Launch(JOIN, 0)):
        if launch.stream in last:
            edges.add((last[launch.stream], launch.op))
        last[launch.stream] = launch.op
    return edges


def wait_edges(schedule: Schedule) -> set[Pair]:
    waits = {(producer, launch.op) for launch in schedule.launches for producer in launch.waits}
    return waits | {(producer, JOIN) for producer in schedule.join_waits}


def required_edges(graph: OpGraph) -> set[Pair]:
    """Every pair of points that any schedule must order."""
    pairs = {(conflict.before, conflict.after) for conflict in conflicts(graph)}
    return pairs | {(FORK, op) for op in graph.ops} | {(op, JOIN) for op in graph.ops} | {(FORK, JOIN)}


def closure(edges: Iterable[Pair]) -> set[Pair]:
    return set(nx.transitive_closure_dag(nx.DiGraph(list(edges))).edges)


def happens_before(schedule: Schedule) -> set[Pair]:
    return closure(stream_edges(schedule.launches) | wait_edges(schedule))


def is_releasable(storage: Storage) -> bool:
    return storage.role is Role.INTERMEDIATE and not storage.escapes


def is_placeable(storage: Storage) -> bool:
    return is_releasable(storage) and storage.placeable


class Oracle:
    """Finds what is wrong with schedules of one graph, in which each op is launched once on an existing stream.

    It shares no code with the verifier: happens-before is one matrix of booleans, and everything is compared with
    everything. Points are numbered: the fork, the ops in program order, the join.
    """

    def __init__(self, graph: OpGraph) -> None:
        self._graph = graph
        self._number = {point: at for at, point in enumerate((FORK, *graph.ops, JOIN))}
        accessed = {op.name: in_parts(graph, op.reads | op.writes | op.allocates) for op in graph.ops.values()}
        parts = {name: in_parts(graph, [name]) for name in graph.storages}
        self._users = {name: [op for op in graph.ops if not accessed[op].isdisjoint(parts[name])] for name in parts}
        self._required = np.zeros((len(self._number), len(self._number)), bool)
        for before, after in required_edges(graph):
            self._required[self._number[before], self._number[after]] = True

    def fault(self, plan: Schedule) -> str:
        """The first of ``"wait"``, ``"order"``, ``"release"`` and ``"arena"`` that is wrong, or ``""``."""
        if not _waits_are_legal(plan):
            return "wait"
        before = self._before(plan)
        if (self._required & ~before).any():
            return "order"
        if not self._releases_are_safe(plan, before):
            return "release"
        return "" if self._arena_is_safe(plan, before) else "arena"

    def is_safe_release(self, plan: Schedule) -> bool:
        """Whether the only releases of a schedule, right or not, are safe."""
        return self._releases_are_safe(plan, self._before(plan))

    def is_safe_arena(self, plan: Schedule) -> bool:
        """Whether the arena of a schedule, right or not, is safe."""
        return self._arena_is_safe(plan, self._before(plan))

    def _before(self, plan: Schedule) -> Matrix:
        """Whether one point is another, or happens before it: ``[earlier, later]``."""
        sources: dict[str, list[str]] = {}
        for before, after in stream_edges(plan.launches) | wait_edges(plan):
            sources.setdefault(after, []).append(before)
        past = np.eye(len(self._number), dtype=bool)
        for point in (*(launch.op for launch in plan.launches), JOIN):
            for source in sources.get(point, ()):
                past[self._number[point]] |= past[self._number[source]]
        return past.T

    def _numbers(self, points: Iterable[str]) -> list[int]:
        return [self._number[point] for point in points]

    def _releases_are_safe(self, plan: Schedule, before: Matrix) -> bool:
        """Whether the allocating stream, with its launches so far, comes after all users of what is released."""
        allocators = {storage: op.name for op in self._graph.ops.values() for storage in op.allocates}
        released = [storage for launch in plan.launches for storage in launch.releases]
        if len(set(released)) < len(released) or not plan.arena.offsets.keys().isdisjoint(released):
            return False
        launched: set[str] = set()
        on_stream: dict[int, list[int]] = {}
        for launch in plan.launches:
            launched.add(launch.op)
            on_stream.setdefault(launch.stream, []).append(self._number[launch.op])
            for storage in launch.releases:
                if storage not in allocators or not is_releasable(self._graph.storages[storage]):
                    return False
                users, ends = self._users[storage], on_stream.get(plan.stream_of[allocators[storage]], [])
                if not launched.issuperset(users) or not before[np.ix_(self._numbers(users), ends)].any(1).all():
                    return False
        return True

    def _arena_is_safe(self, plan: Schedule, before: Matrix) -> bool:
        """Whether storages may be where they are, and of any two with a byte in common one is over before the other."""
        storages, offsets = self._graph.storages, plan.arena.offsets
        for name, at in offsets.items():
            within = at >= 0 and at + storages[name].bytes <= plan.arena.bytes
            if at % ALIGNMENT or not within or not is_placeable(storages[name]):
                return False
        starts = np.array(list(offsets.values()), dtype=np.int64)
        ends = starts + np.array([storages[name].bytes for name in offsets], dtype=np.int64)
        shared = np.triu(np.maximum.outer(starts, starts) < np.minimum.outer(ends, ends), 1)
        happens_before = before & ~np.eye(len(before), dtype=bool)
        users = [self._numbers(self._users[name]) for name in offsets]
        return all(
            happens_before[np.ix_(users[one], users[other])].all()
            or happens_before[np.ix_(users[other], users[one])].all()
            for one, other in zip(*np.nonzero(shared), strict=True)
        )


def _waits_are_legal(plan: Schedule) -> bool:
    """Whether each wait is for an earlier launch, on another stream."""
    stream: dict[str, int] = {}
    for point in (Launch(FORK, 0), *plan.launches, Launch(JOIN, 0, plan.join_waits)):
        if any(stream.get(producer, point.stream) == point.stream for producer in point.waits):
            return False
        stream[point.op] = point.stream
    return True


@st.composite
def conflict_graphs(draw: st.DrawFn, max_ops: int = 7) -> OpGraph:
    """Ops ``n0``, ``n1``, … with every kind of hazard, and the conflicting pairs as dependencies, redundant ones too.

    Each may allocate a storage of its own name, read or write earlier storages, two inputs or parts of them, and use
    ``rng``; any storage may escape, or have parts.
    """
    storages = {name: Storage(name, Role.INPUT, 8, (name,)) for name in ("x", "y")}
    ops: dict[str, Op] = {}
    for at in range(draw(st.integers(0, max_ops))):
        name = f"n{at}"
        names = [name for storage in storages.values() for name in (storage.name, *storage.parts)]
        known = st.sets(st.sampled_from(sorted(names)), max_size=2)
        reads, writes, orders = draw(known), draw(known) if draw(st.booleans()) else set(), draw(st.integers(0, 5)) == 0
        allocates = {name} if draw(st.integers(0, 3)) else set()
        if allocates:
            parts = (f"{name}[0]", f"{name}[1]") if draw(st.booleans()) else ()
            storages[name] = Storage(name, Role.INTERMEDIATE, 8, (name,), draw(st.integers(0, 4)) == 0, parts)
        ops[name] = Op(
            name,
            "aten.relu.default",
            (name,),
            reads=frozenset(reads),
            writes=frozenset(writes | allocates),
            allocates=frozenset(allocates),
            orders=frozenset({"rng"}) if orders else frozenset(),
        )
    graph = OpGraph(ops, (), storages, (), "cuda:0")
    return replace(graph, dependencies=tuple(conflicts(graph)))


@st.composite
def assignments(draw: st.DrawFn, graph: OpGraph, max_streams: int = 3) -> Assignment:
    """Any streams, all but one perhaps unused, and any topological launch order."""
    streams = draw(st.integers(2, max_streams))
    order: list[str] = []
    while len(order) < len(graph.ops):
        ready = [op for op in graph.ops if op not in order and set(graph.digraph.predecessors(op)) <= set(order)]
        order.append(draw(st.sampled_from(ready)))
    return Assignment("random", streams, tuple(order), {op: draw(st.integers(0, streams - 1)) for op in order})


@st.composite
def schedules(draw: st.DrawFn, graph: OpGraph, max_streams: int = 3) -> Schedule:
    """Any streams in any order with any waits for earlier launches of other streams: right, redundant or missing."""
    streams = draw(st.integers(2, max_streams))
    order = draw(st.one_of(st.permutations(list(graph.ops)), st.just(list(graph.ops))))
    stream = {op: draw(st.integers(0, streams - 1)) for op in order}

    def waits(here: int, earlier: Iterable[str]) -> tuple[str, ...]:
        others = [op for op in (FORK, *earlier) if stream.get(op, 0) != here]
        return tuple(op for op in others if draw(st.integers(0, 2)))

    launches = tuple(Launch(op, stream[op], waits(stream[op], order[:at])) for at, op in enumerate(order))
    return Schedule("random", streams, launches, waits(0, order))


@st.composite
def placeable(draw: st.DrawFn, graph: OpGraph) -> OpGraph:
    """The same graph with other sizes, in which most storages are placeable.

    Some are allocated by no op but before the fork, so their first accesses may be in no order.
    """
    sizes = st.sampled_from([0, 8, ALIGNMENT, ALIGNMENT + 8, 3 * ALIGNMENT])
    storages = {
        name: replace(storage, bytes=draw(sizes), placeable=draw(st.integers(0, 7)) > 0)
        for name, storage in graph.storages.items()
    }
    early = {name for name in storages if not draw(st.integers(0, 3))}
    ops = {
        op.name: replace(op, writes=op.writes - (early & op.allocates), allocates=op.allocates - early)
        for op in graph.ops.values()
    }
    changed = replace(graph, ops=ops, storages=storages)
    return replace(changed, dependencies=tuple(conflicts(changed)))


@st.composite
def arenas(draw: st.DrawFn, graph: OpGraph) -> Arena:
    """Some storages at random offsets, which may overlap; a few are misaligned or beyond the end."""
    offsets = {}
    for name, storage in graph.storages.items():
        if draw(st.booleans()) and (is_placeable(storage) or not draw(st.integers(0, 15))):
            offsets[name] = draw(st.integers(0, 4)) * ALIGNMENT + (0 if draw(st.integers(0, 31)) else ALIGNMENT // 2)
    return Arena(draw(st.sampled_from([8 * ALIGNMENT, 8 * ALIGNMENT, 5 * ALIGNMENT])), offsets)
