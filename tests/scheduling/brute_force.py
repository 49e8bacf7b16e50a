"""What a correct schedule is, written down as slowly and plainly as possible, to judge the fast code by."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import combinations

import networkx as nx
from hypothesis import strategies as st

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
    """What an op names, with all parts in the place of a storage that has some."""
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
    """What must come before what, whatever the streams."""
    pairs = {(conflict.before, conflict.after) for conflict in conflicts(graph)}
    return pairs | {(FORK, op) for op in graph.ops} | {(op, JOIN) for op in graph.ops} | {(FORK, JOIN)}


def closure(edges: Iterable[Pair]) -> set[Pair]:
    return set(nx.transitive_closure_dag(nx.DiGraph(list(edges))).edges)


def happens_before(schedule: Schedule) -> set[Pair]:
    return closure(stream_edges(schedule.launches) | wait_edges(schedule))


def waits_are_legal(schedule: Schedule) -> bool:
    """Whether each wait is for something launched earlier, on another stream."""
    points = [Launch(FORK, 0), *schedule.launches, Launch(JOIN, 0, schedule.join_waits)]
    return all(
        any(earlier.op == producer and earlier.stream != point.stream for earlier in points[:at])
        for at, point in enumerate(points)
        for producer in point.waits
    )


def is_covered(graph: OpGraph, schedule: Schedule) -> bool:
    """Whether waits are legal and everything that must keep its order does."""
    return waits_are_legal(schedule) and required_edges(graph) <= happens_before(schedule)


def is_safe_release(graph: OpGraph, schedule: Schedule, storage: str, position: int) -> bool:
    """Whether whoever allocates next on the storage's own stream comes after all that ever touches the storage."""
    before = happens_before(schedule)
    launched = schedule.launches[: position + 1]
    home = next(schedule.stream_of[op.name] for op in graph.ops.values() if storage in op.allocates)
    behind = [launch.op for launch in launched if launch.stream == home]
    return all(
        op.name in {launch.op for launch in launched}
        and any(op.name == end or (op.name, end) in before for end in behind)
        for op in graph.ops.values()
        if not in_parts(graph, [storage]).isdisjoint(in_parts(graph, op.reads | op.writes))
    )


def is_releasable(storage: Storage) -> bool:
    return storage.role is Role.INTERMEDIATE and not storage.escapes


def is_placeable(storage: Storage) -> bool:
    return is_releasable(storage) and storage.placeable


def is_safe_arena(graph: OpGraph, schedule: Schedule) -> bool:
    """Whether each storage may be where it is, and any two with a byte in common are used one after the other."""
    arena, storages, before = schedule.arena, graph.storages, happens_before(schedule)
    blocks = {name: set(range(at, at + storages[name].bytes)) for name, at in arena.offsets.items()}
    users = {
        name: {op.name for op in graph.ops.values() if in_parts(graph, [name]) & in_parts(graph, op.reads | op.writes)}
        for name in blocks
    }
    return all(
        is_placeable(storages[name]) and at % ALIGNMENT == 0 and blocks[name] <= set(range(arena.bytes))
        for name, at in arena.offsets.items()
    ) and all(
        not blocks[a] & blocks[b]
        or all((x, y) in before for x in users[a] for y in users[b])
        or all((y, x) in before for x in users[a] for y in users[b])
        for a, b in combinations(blocks, 2)
    )


@st.composite
def conflict_graphs(draw: st.DrawFn, max_ops: int = 7) -> OpGraph:
    """Ops ``n0``, ``n1``, … with every kind of hazard, and the conflicting pairs as dependencies, redundant ones too.

    Each may allocate a storage of its own name, read, write or read and write what is there already, or parts of it,
    two inputs included, and use ``rng``; any storage may escape, or have parts.
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
    """The same graph with other sizes, in which most storages may lie in an arena, outputs and inputs perhaps too.

    Some are allocated by no op, as is what is taken before the fork: its first accesses may be in no order.
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
    """Some storages at any places, which overlap or not, now and then in the midst of a unit or behind the end."""
    offsets = {}
    for name, storage in graph.storages.items():
        if draw(st.booleans()) and (is_placeable(storage) or not draw(st.integers(0, 15))):
            offsets[name] = draw(st.integers(0, 4)) * ALIGNMENT + (0 if draw(st.integers(0, 31)) else ALIGNMENT // 2)
    return Arena(draw(st.sampled_from([8 * ALIGNMENT, 8 * ALIGNMENT, 5 * ALIGNMENT])), offsets)
