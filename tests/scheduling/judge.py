"""What is wrong with a schedule of any size, by brute force: happens-before as one matrix of booleans.

It says what ``brute_force.py`` says, which is plainer and takes minutes for a thousand ops, and it shares no code with
the verifier: no walk along the launches with checks on the way, no neighbours, no bit sets. Everything is compared with
everything.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from autostream.ir import FORK, JOIN, Launch, OpGraph, Schedule
from autostream.scheduling.verify import ALIGNMENT
from tests.scheduling.brute_force import in_parts, is_releasable, stream_edges, wait_edges

Matrix = NDArray[np.bool_]


class Judge:
    """Finds fault with schedules of one graph, in which each op is launched once on a stream that there is.

    Points are numbered: the fork, the ops in program order, the join.
    """

    def __init__(self, graph: OpGraph) -> None:
        self._graph = graph
        self._number = {point: at for at, point in enumerate((FORK, *graph.ops, JOIN))}
        touched = {op.name: in_parts(graph, op.reads | op.writes | op.allocates) for op in graph.ops.values()}
        parts = {name: in_parts(graph, [name]) for name in graph.storages}
        self._users = {name: [op for op in graph.ops if not touched[op].isdisjoint(parts[name])] for name in parts}
        self._required = self._conflicts()

    def fault(self, plan: Schedule) -> str:
        """``"wait"``, ``"order"``, ``"release"`` or ``"arena"``, the first that is not as it must be, or ``""``."""
        if not _waits_are_legal(plan):
            return "wait"
        before = self._before(plan)
        if (self._required & ~before).any():
            return "order"
        if not self._releases_are_safe(plan, before):
            return "release"
        return "" if self._arena_is_safe(plan, before) else "arena"

    def _conflicts(self) -> Matrix:
        """Whether one point must come before another: ``[earlier, later]``."""
        ops, size = self._graph.ops.values(), len(self._number)
        reads = [in_parts(self._graph, op.reads) for op in ops]
        writes = [in_parts(self._graph, op.writes) for op in ops]
        orders = [op.orders for op in ops]
        required = np.zeros((size, size), bool)
        required[1:-1, 1:-1] = np.triu(
            _meet(writes, reads) | _meet(reads, writes) | _meet(writes, writes) | _meet(orders, orders), 1
        )
        required[0, 1:] = required[:-1, -1] = True
        return required

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
        """Whether all users of what is released are over for the stream that allocated it, with what it has by then."""
        allocators = {storage: op.name for op in self._graph.ops.values() for storage in op.allocates}
        released = [storage for launch in plan.launches for storage in launch.releases]
        if len(set(released)) < len(released) or not plan.arena.offsets.keys().isdisjoint(released):
            return False
        launched: set[str] = set()
        behind: dict[int, list[int]] = {}
        for launch in plan.launches:
            launched.add(launch.op)
            behind.setdefault(launch.stream, []).append(self._number[launch.op])
            for storage in launch.releases:
                if storage not in allocators or not is_releasable(self._graph.storages[storage]):
                    return False
                users, ends = self._users[storage], behind.get(plan.stream_of[allocators[storage]], [])
                if not launched.issuperset(users) or not before[np.ix_(self._numbers(users), ends)].any(1).all():
                    return False
        return True

    def _arena_is_safe(self, plan: Schedule, before: Matrix) -> bool:
        """Whether storages lie where they may, and of any two with a byte in common one is over before the other."""
        storages, offsets = self._graph.storages, plan.arena.offsets
        for name, at in offsets.items():
            within = at >= 0 and at + storages[name].bytes <= plan.arena.bytes
            if at % ALIGNMENT or not within or not (is_releasable(storages[name]) and storages[name].placeable):
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


def _meet(rows: Sequence[frozenset[str]], columns: Sequence[frozenset[str]]) -> Matrix:
    """Whether names in a row and names in a column have one in common."""
    meet = [[not one.isdisjoint(other) for other in columns] for one in rows]
    return np.array(meet, dtype=bool).reshape(len(rows), len(columns))


def _waits_are_legal(plan: Schedule) -> bool:
    """Whether each wait is for something launched earlier, on another stream."""
    stream: dict[str, int] = {}
    for point in (Launch(FORK, 0), *plan.launches, Launch(JOIN, 0, plan.join_waits)):
        if any(stream.get(producer, point.stream) == point.stream for producer in point.waits):
            return False
        stream[point.op] = point.stream
    return True
