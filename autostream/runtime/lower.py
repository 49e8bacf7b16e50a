"""Lowering: from a schedule to an fx graph with stream and event nodes. No other code writes such nodes.

The nodes run in this order::

    arena = reserve(device, bytes)   lane 0, if storages lie in one; their memory is place(arena, …)
    placeholders, prelude            lane 0
    lanes = fork(device, streams)
    forked = record(lanes, 0)        if an op waits for the fork
    for each launch:
        use(lanes, stream)           if the lane changes
        wait(lanes, stream, x_done)  for each wait
        the op and its views
        op_done = record(...)        if anything waits for it, one event for all
        release(...)                 what the schedule releases here
    use(lanes, 0), waits             the join
    joined = record(lanes, 0)        the closing fence: side streams whose storages live until here wait for the join
    release(...)                     storages that could not be released earlier
    output
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from autostream.errors import ScheduleError
from autostream.ir import FORK, JOIN, Arena, OpGraph, Program, Role, Schedule, Storage
from autostream.runtime import arena, streams
from autostream.utils.storages import storage_of


def lower(program: Program, graph: OpGraph, schedule: Schedule) -> fx.GraphModule:
    """Write a schedule as an fx graph.

    A schedule over one stream has no stream nodes. Takes linear time. Parameters and submodules are shared with
    ``program.module``, which stays as it is.

    Args:
        program: the traced model.
        graph: its ops and storages.
        schedule: of these ops. It is not checked for races: :func:`~autostream.scheduling.verify.verify` does that.

    Returns:
        A module that takes ``program.placeholders`` in order and returns the tuple of ``program.outputs``. Its nodes
        keep the names and the metadata of the program's.

    Raises:
        ScheduleError: an op, a wait or the output uses a value that is not launched yet or already released.
    """
    writer = _Writer(program, graph, schedule.arena)
    if schedule.streams == 1:
        for launch in schedule.launches:
            writer.copy_op(launch.op)
    else:
        _write_streams(writer, graph, schedule)
    writer.copy_output()
    return fx.GraphModule(program.module, writer.graph, class_name="Lowered")


def storages_of(node: fx.Node) -> list[int | None]:
    """The storage of each result of a node, by its fake values; ``None`` for numbers, ``None`` and sparse tensors.

    Example:
        >>> x, y = torch.empty(2), torch.empty(2)
        >>> node = fx.Graph().placeholder("results")
        >>> node.meta["val"] = (x, x[1:], 3, y)
        >>> storages_of(node) == [storage_of(x), storage_of(x), None, storage_of(y)]
        True
    """
    leaves = tree_leaves(node.meta.get("val"))
    return [storage_of(leaf) if isinstance(leaf, Tensor) and leaf.layout is torch.strided else None for leaf in leaves]


def _write_streams(writer: _Writer, graph: OpGraph, schedule: Schedule) -> None:
    awaited = {op for launch in schedule.launches for op in launch.waits} | set(schedule.join_waits)
    writer.fork(graph.device, schedule.streams)
    if FORK in awaited:
        writer.record(FORK, "forked")
    for launch in schedule.launches:
        writer.use(launch.stream)
        writer.wait(launch.op, launch.waits, launch.stream)
        writer.copy_op(launch.op)
        if launch.op in awaited:
            writer.record(launch.op, f"{launch.op}_done")
        writer.release(launch.releases, f"after {launch.op!r}")
    writer.use(0)
    writer.wait("the join", schedule.join_waits, 0)
    _write_closing_fence(writer, graph, schedule)


def _write_closing_fence(writer: _Writer, graph: OpGraph, schedule: Schedule) -> None:
    """Release all remaining storages, after the streams that allocated them have waited for all work."""
    unreleased, unscheduled = _unreleased(graph, schedule), writer.unscheduled()
    allocated_on = {
        storage: launch.stream for launch in schedule.launches for storage in graph.ops[launch.op].allocates
    }
    # The prelude allocates on the caller's stream, which has just joined the others.
    if sides := sorted({allocated_on.get(storage, 0) for storage in (*unreleased, *unscheduled)} - {0}):
        writer.record(JOIN, "joined")
    for side in sides:
        writer.wait("the closing fence", [JOIN], side)
    writer.release(unreleased, "at the end")
    writer.keep_alive(node for nodes in unscheduled.values() for node in nodes)
    writer.release_arena()


def _unreleased(graph: OpGraph, schedule: Schedule) -> list[str]:
    """The storages that a schedule could release, and does not."""
    released = {storage for launch in schedule.launches for storage in launch.releases}
    return [storage.name for storage in _releasable(graph, schedule.arena) if storage.name not in released]


def _releasable(graph: OpGraph, plan: Arena) -> Iterator[Storage]:
    """The intermediate storages with a memory block of their own, which is freed with the last value that holds it."""
    for name, storage in graph.storages.items():
        if storage.role is Role.INTERMEDIATE and not storage.escapes and name not in plan.offsets:
            yield storage


class _Writer:
    """Copies nodes of a program to a new graph, and writes stream nodes between them.

    Attributes:
        graph: the nodes written so far.
    """

    def __init__(self, program: Program, graph: OpGraph, plan: Arena) -> None:
        self.graph = fx.Graph()
        self._program = program
        self._offsets = plan.offsets
        self._ops = graph.ops
        self._storages = graph.storages
        self._originals: dict[str, fx.Node] = {node.name: node for node in program.module.graph.nodes}
        self._output = program.module.graph.output_node().name
        self._copies: dict[str, fx.Node] = {}
        self._released: dict[str, str] = {}
        self._held: dict[str, set[str]] = defaultdict(set)
        for storage in _releasable(graph, plan):
            for holder in storage.holders:
                self._held[holder].add(storage.name)
        self._events: dict[str, fx.Node] = {}
        self._lane = 0
        for node in self._originals.values():
            if node.op == "placeholder":
                self._copy(node.name, node.name)
        if plan.offsets:
            self._arena = self._call(arena.reserve, graph.device, plan.bytes, name="arena")
            self._arena.meta["val"] = torch.empty(plan.bytes, dtype=torch.uint8, device="meta")
        attributes = [node.name for node in self._originals.values() if node.op == "get_attr"]
        for name in dict.fromkeys([*attributes, *graph.prelude]):
            if name not in self._copies:
                self._copy(name, name)

    def fork(self, device: str, count: int) -> None:
        self._lanes = self._call(streams.fork, device, count, name="lanes")

    def use(self, lane: int) -> None:
        if lane != self._lane:
            self._call(streams.use, self._lanes, lane)
        self._lane = lane

    def record(self, point: str, name: str) -> None:
        self._events[point] = self._call(streams.record, self._lanes, self._lane, name=name)

    def wait(self, waiter: str, points: Iterable[str], lane: int) -> None:
        for point in points:
            if point not in self._events:
                raise ScheduleError(
                    f"{self._description(waiter)} waits for {point!r}, which is not launched before it; "
                    "a wait names an op that is launched earlier"
                )
            self._call(streams.wait, self._lanes, lane, self._events[point])

    def release(self, storages: Sequence[str], when: str) -> None:
        for storage in storages:
            for holder in self._storages[storage].holders:
                self._held[holder].discard(storage)
        holders = dict.fromkeys(holder for storage in storages for holder in self._holders(storage))
        if holders:
            self._call(streams.release, *(self._copies.pop(holder) for holder in holders))
        self._released |= dict.fromkeys(holders, when)

    def unscheduled(self) -> Mapping[str, Sequence[str]]:
        """Storages that, by the schemas, an output may alias, but by the fake values does not; and their holders.

        So the schedule cannot release them, and the output does not keep them alive. ``broadcast_tensors(a, b)``, which
        returns both in one list, has such storages.
        """
        outputs = {block for name in self._program.outputs for block in storages_of(self._originals[name])}
        holders_of: dict[str, Sequence[str]] = {}
        for storage in self._storages.values():
            if storage.role is not Role.INTERMEDIATE or not storage.escapes:
                continue
            name, _, index = storage.name.partition(".")
            block = storages_of(self._originals[name])[int(index or 0)]
            if block is not None and block not in outputs:
                holders = (holder for holder in storage.holders if block in storages_of(self._originals[holder]))
                holders_of[storage.name] = list(holders)
        return holders_of

    def keep_alive(self, nodes: Iterable[str]) -> None:
        """Keep values alive until here."""
        if copies := [self._copies[name] for name in dict.fromkeys(nodes) if name in self._copies]:
            self._call(streams.release, *copies)

    def release_arena(self) -> None:
        if self._offsets:
            self._call(streams.release, self._arena)

    def copy_op(self, op: str) -> None:
        for name in self._ops[op].nodes:
            self._copy(name, op)

    def copy_output(self) -> None:
        self._copy(self._output, "the output")

    def _copy(self, name: str, user: str) -> None:
        if name in self._offsets:
            self._place(name)
            return
        self._copies[name] = self.graph.node_copy(self._originals[name], lambda node: self._value(node.name, user))

    def _place(self, name: str) -> None:
        """Write a tensor in the arena instead of the op that would allocate it."""
        original = self._originals[name]
        value = original.meta["val"]
        shape = (tuple(value.shape), value.stride(), value.dtype)
        node = self._call(arena.place, self._arena, self._offsets[name], *shape, name=name)
        node.meta = dict(original.meta)
        self._copies[name] = node

    def _call(self, function: Any, *args: Any, name: str | None = None) -> fx.Node:
        return self.graph.create_node("call_function", function, args, name=name)

    def _value(self, name: str, user: str) -> fx.Node:
        if name in self._copies:
            return self._copies[name]
        fate = f"is released {self._released[name]}" if name in self._released else "is not launched yet"
        raise ScheduleError(
            f"{self._description(user)} uses {name!r}, which {fate}; a launch comes after all that it uses, "
            "and a release after the last use of the storage"
        )

    def _description(self, user: str) -> str:
        if user not in self._ops:
            return user
        source = self._ops[user].source
        return f"{user!r} ({source})" if source else repr(user)

    def _holders(self, storage: str) -> Iterator[str]:
        """The values to drop in order to release a storage.

        Tensors, if there are any: a list of results would keep the other results alive as well. The result of an op
        like ``contiguous`` may be a view of its argument or a new tensor: it is kept until both may be released.
        """
        live = [holder for holder in self._storages[storage].holders if holder in self._copies]
        tensors = [holder for holder in live if not isinstance(self._originals[holder].meta.get("val"), (list, tuple))]
        yield from (holder for holder in tensors if not self._held[holder]) if tensors else live
