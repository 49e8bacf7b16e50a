"""What is in memory at a time, as simulated: what ops take, what they give back, and the most there is at once.

This is what a schedule would need if memory could be handed on the moment that its last user ends. No placement needs
less; one that is proven needs more where streams do not wait for each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from autostream.ir import OpGraph, Role, Timeline


@dataclass(frozen=True)
class Footprint:
    """The memory of a graph whatever its schedule, in bytes.

    Attributes:
        graph: the ops with their accesses, and the storages.
    """

    graph: OpGraph

    @cached_property
    def users(self) -> Mapping[str, Sequence[str]]:
        """By intermediate storage, the ops that touch it or a part of it, in program order."""
        role = {name: storage.role for name, storage in self.graph.storages.items()}
        users = self.graph.users.items()
        return {name: ops for name, ops in users if ops and role[name] is Role.INTERMEDIATE}

    @cached_property
    def allocated(self) -> frozenset[str]:
        """The storages that ops allocate; others are there before the first."""
        return frozenset(name for op in self.graph.ops.values() for name in op.allocates)

    @cached_property
    def prelude_bytes(self) -> int:
        """What is taken before the first op, and there until the end whatever the schedule."""
        return sum(
            storage.bytes
            for storage in self.graph.storages.values()
            if storage.role is Role.INTERMEDIATE and storage.name not in self.allocated and not storage.placeable
        )

    @cached_property
    def taken(self) -> Mapping[str, int]:
        """What each op allocates."""
        storages = self.graph.storages
        return {
            op.name: sum(storages[name].bytes for name in op.allocates if name in storages)
            for op in self.graph.ops.values()
        }

    def freed(self, timeline: Timeline) -> Mapping[str, int]:
        """What nobody uses after each op, by the ops that are the last to end; outputs are never freed."""
        end = timeline.ends
        freed = dict.fromkeys(self.graph.ops, 0)
        for name, users in self.users.items():
            storage = self.graph.storages[name]
            if not storage.escapes and (name in self.allocated or storage.placeable):
                freed[max(users, key=end.__getitem__)] += storage.bytes
        return freed

    def live_bytes(self, timeline: Timeline) -> int:
        """The most that is in use at a time.

        Example:
            ``b`` reads what ``a`` made; then it is gone, and ``c`` takes as much.

            >>> from autostream.ir import Op, Slice, Storage
            >>> reads = {"a": "x", "b": "a", "c": "b"}
            >>> ops = {n: Op(n, "f", (n,), frozenset({r}), frozenset({n}), frozenset({n})) for n, r in reads.items()}
            >>> storages = {n: Storage(n, Role.INTERMEDIATE, 512, (n,)) for n in ops}
            >>> footprint = Footprint(OpGraph(ops, (), storages, (), "cuda:0"))
            >>> footprint.live_bytes(Timeline(tuple(Slice(n, 0, at, at + 1.0) for at, n in enumerate("abc"))))
            1024
        """
        # At one moment, what is freed goes first.
        return max(accumulate((size for _, size in self._changes(timeline)), initial=self.prelude_bytes))

    def in_use(self, timeline: Timeline) -> tuple[tuple[float, int], ...]:
        """What is in use from each moment on at which that changes, µs and bytes; from 0 on, what the prelude takes.

        Example:
            >>> from autostream.ir import Op, Slice, Storage
            >>> op = Op("a", "f", ("a",), frozenset(), frozenset("a"), frozenset("a"))
            >>> graph = OpGraph({"a": op}, (), {"a": Storage("a", Role.INTERMEDIATE, 512, ("a",))}, (), "cuda:0")
            >>> Footprint(graph).in_use(Timeline((Slice("a", 0, 1.0, 3.0),)))
            ((0.0, 0), (1.0, 512), (3.0, 0))
        """
        used = {0.0: self.prelude_bytes}
        live = self.prelude_bytes
        for at_us, size in self._changes(timeline):
            used[at_us] = live = live + size
        return tuple(used.items())

    def _changes(self, timeline: Timeline) -> list[tuple[float, int]]:
        """What ops take and give back, in bytes, by the clock; outputs are never given back."""
        start, end = timeline.starts, timeline.ends
        changes: list[tuple[float, int]] = []
        for name, users in self.users.items():
            storage = self.graph.storages[name]
            if name not in self.allocated and not storage.placeable:
                continue  # the prelude's, which is there all the time
            changes.append((min(start[op] for op in users), storage.bytes))
            if not storage.escapes:
                changes.append((max(end[op] for op in users), -storage.bytes))
        return sorted(changes)
