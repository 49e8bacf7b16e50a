"""Cutting a program that one CUDA graph cannot hold into parts that a graph can hold, and parts that run eagerly.

    a ──▶ b ──▶ ITEM ──▶ c ──▶ d        captured  a b e f
    │                    ▲              eager     ITEM
    └──▶ e ──▶ f ────────╯              captured  c d

Parts run one after another, so a hazard between two parts is respected if the earlier op is in the earlier part. Parts
are made greedily: all ops of one kind that are ready, and those of that kind that become ready, then those of another
kind. The next kind is that of the op with the most changes of kind on a path after it. With two kinds, captured and
eager, this gives the fewest parts: a path with n changes needs n + 1 parts, and each part shortens all longest paths by
one change, unless some of them begin with one kind and some with the other, which needs one more.

A graph holds ops of one device. Where copies between devices are all that runs eagerly, parts are the turns of devices
(``turns.py``). Else the host may have to wait. It launches a part and continues with the next, so devices run at the
same time:

    cuda:0   a ──▶ b ──────────────────────▶ f         captured on cuda:0  a      first: cuda:1 waits for it
             │                               ▲         eager               COPY
             ╰──▶ COPY                      COPY       captured on cuda:1  d e
    cuda:1          ╰──▶ d ──▶ e ────────────╯         captured on cuda:0  b      before the copy, which would delay it
                                                       eager               COPY
                                                       captured on cuda:0  f

A device runs its parts one after another, and copies to it and from it in between. So copies to devices for which
nothing else is ready come first, then ops that other devices wait for, then the others, and last ops that may make the
host wait. This may give more parts than the fewest.

So may long copies between the host and a device. Such a copy runs at the same time as the part that was launched before
it, unless it depends on that part. So ops that the copy depends on are a part of their own, which comes first, and
other ops are launched before the copy.

    x ──▶ UPLOAD ──▶ c ─╮               captured  a b
    y ──▶ a ──▶ b ──────┴▶ d            beside    UPLOAD      while a and b run
                                        captured  c d

    a ──▶ b ──▶ DOWNLOAD                captured  a b
          ╰───▶ c ──▶ d                 captured  c d
                                        beside    DOWNLOAD    while c and d run

A captured part needs launches of its own: its replay, one that copies inputs and results of other parts in, one for
each storage that other parts read or that is returned, and one that copies back what it wrote to its inputs. A part
with no more ops than that runs eagerly. Over several devices, results of other parts are read where these leave them.

Ops on the host that compute from literals alone are in each part that needs their results: a graph takes no tensor in
the host's memory as an input, but may hold one that is the same in every run.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import groupby
from types import MappingProxyType
from typing import NamedTuple

from autostream.ir import Op, OpGraph, Role, Storage
from autostream.scheduling.turns import turns


@dataclass(frozen=True, slots=True)
class Part:
    """Ops that run together.

    Attributes:
        ops: those that compute from literals alone, then all others; each in program order.
        device: the device of the CUDA graph that holds them; ``""`` where they run eagerly.
        beside: whether they are copies between the host and a device that do not depend on the part before.
    """

    ops: tuple[str, ...]
    device: str
    beside: bool = False

    @property
    def captured(self) -> bool:
        """Whether they are in a CUDA graph."""
        return self.device != ""


def cut(graph: OpGraph, duration_us: Mapping[str, float] = MappingProxyType({})) -> tuple[Part, ...]:
    """Cut a program at the ops that a CUDA graph cannot hold, and into those of each device.

    Takes O(V log V + E + P S) steps for V ops, E dependencies, P parts and S storages; where devices take turns, the
    square of the number of turns besides.

    Args:
        graph: the ops; those with a reason in ``uncapturable`` are in no captured part.
        duration_us: of ops on several devices, by name, µs; by default all take as long.

    Returns:
        Parts in the order in which they run. Each op is in one of them; one on the host that computes from literals
        alone is in every part that needs it. Neighbours differ in device, or one of them runs eagerly, except around a
        long copy. Empty where no part is worth a graph.

    Example:
        >>> from autostream.ir import Op
        >>> ops = [Op(name, "f", (name,), frozenset(), frozenset({name})) for name in ("a", "b", "c")]
        >>> whole = OpGraph({op.name: op for op in ops}, (), {}, (), "cuda:0")
        >>> cut(whole)
        (Part(ops=('a', 'b', 'c'), device='cuda:0', beside=False),)
    """
    eager, several = _eager(graph), any(op.crosses == "peer" for op in graph.ops.values())
    literals = [op for op in _literals(graph) if op not in eager]
    others = [at for at, op in enumerate(graph.ops) if op not in set(literals)]
    parts = [
        (priority, part if _is_worth_a_graph(graph, part, several) else replace(part, device=""))
        for priority, part in (
            _turns(graph, others, duration_us)
            if _take_turns(graph, others, eager)
            else _parts_by_kind(graph, others, _kinds(graph, others, eager))
        )
    ]
    if not any(part.captured for _, part in parts):
        return ()
    return tuple(
        replace(part, ops=(*_needed(graph, literals, part.ops), *part.ops))
        for part in _with_copies_beside(graph, literals, _merged(graph, parts))
    )


def _literals(graph: OpGraph) -> list[str]:
    """Ops on the host that a graph can hold: they compute from literals alone."""
    return [op.name for op in graph.ops.values() if _is_on_host(op, graph) and not op.uncapturable]


def _is_on_host(op: Op, graph: OpGraph) -> bool:
    return op.device == "cpu" != graph.device


def _eager(graph: OpGraph) -> frozenset[str]:
    """Ops that must run eagerly: those that no graph can hold, and those that share memory on the host with them."""
    literals = set(_literals(graph))
    written = {name for op in literals for name in graph.ops[op].writes}
    shared = {name for name in written if name in graph.storages and graph.storages[name].escapes}
    # A storage that is changed between its uses does not have the same value in every part.
    used: set[str] = set()
    for op in graph.ops.values():
        if op.name in literals:
            shared |= op.writes & used
        else:
            used |= written & (op.reads | op.writes)
    eager: set[str] = set()
    for op in graph.ops.values():
        if op.uncapturable or not shared.isdisjoint(op.reads | op.writes):
            eager.add(op.name)
            if _is_on_host(op, graph):
                shared |= op.writes
    return frozenset(eager)


def _needed(graph: OpGraph, literals: Sequence[str], ops: Iterable[str]) -> list[str]:
    """The ops that compute from literals and whose results these ops use, directly or not."""
    used = {name for op in ops for name in graph.ops[op].reads | graph.ops[op].writes}
    needed: set[str] = set()
    while new := [op for op in literals if op not in needed and not used.isdisjoint(graph.ops[op].writes)]:
        needed.update(new)
        used = {name for op in new for name in graph.ops[op].reads | graph.ops[op].writes}
    return [op for op in literals if op in needed]


class _Priority(IntEnum):
    """Which of several kinds of ops that are ready comes first."""

    PEER_COPY = 0
    """A copy from another device, if nothing else is ready for its destination."""
    BEFORE_COPY = 1
    """Ops that a long copy between the host and a device depends on."""
    BEFORE_PEER = 2
    """Ops that ops of other devices depend on."""
    OTHER = 3
    UPLOAD = 4
    """A long copy from the host."""
    MAY_WAIT = 5
    """Ops that may make the host wait, if the program has several devices or long copies."""


class _Kind(NamedTuple):
    """What all ops of a part have in common.

    Attributes:
        priority: which kind comes first.
        device: the device of the graph that holds them, or the destination of copies; ``""`` for other ops that run
            eagerly.
    """

    priority: _Priority
    device: str


def _kinds(graph: OpGraph, positions: Sequence[int], eager: Container[str]) -> dict[int, _Kind]:
    """The kind of each op at these positions."""
    ops, kinds = list(graph.ops.values()), dict[int, _Kind]()
    several = len({ops[at].device for at in positions if ops[at].name not in eager}) > 1
    eager_kind = _Kind(_Priority.MAY_WAIT if several or any(map(_is_long, ops)) else _Priority.OTHER, "")
    devices: dict[int, frozenset[str]] = {}  # of an op and of those that depend on it
    for at in reversed(positions):
        op = ops[at]
        after = frozenset[str]().union(*(devices[later] for later in graph.successors[at] if later in devices))
        if op.name not in eager:
            priority = _Priority.BEFORE_PEER if after - {op.device} else _Priority.OTHER
            kinds[at] = _Kind(_Priority.BEFORE_COPY if _HOST in after else priority, op.device)
        elif op.crosses == "peer":
            kinds[at] = _Kind(_Priority.PEER_COPY, op.device)
        else:
            kinds[at] = _Kind(_Priority.UPLOAD, "") if op.crosses == "upload" and _is_long(op) else eager_kind
        devices[at] = after | ({_HOST} if _is_long(op) else {kinds[at].device} - {""})
    return kinds


LONG_BYTES = 2**20
"""The least size of a long copy between the host and a device: it takes about 20 µs, more than to launch a part."""

_HOST = "host"


def _is_long(op: Op) -> bool:
    return op.crosses in ("upload", "download") and op.bytes_written >= LONG_BYTES


def _parts_by_kind(
    graph: OpGraph, positions: Sequence[int], kinds: Mapping[int, _Kind]
) -> list[tuple[_Priority, Part]]:
    """Parts of one kind each with its priority, in the order in which they run."""
    names = list(graph.ops)
    missing = {at: sum(before in kinds for before in graph.predecessors[at]) for at in positions}
    changes = _changes(graph, positions, kinds)
    ready = defaultdict[_Kind, list[tuple[int, int]]](list)  # by the changes to come, then in program order

    def add(at: int) -> None:
        heapq.heappush(ready[kinds[at]], (-changes[at], at))

    for at in positions:
        if not missing[at]:
            add(at)
    parts: list[tuple[_Priority, Part]] = []
    while ready:
        kind = _next_kind(ready)
        taken = []
        while ready[kind]:
            _, at = heapq.heappop(ready[kind])
            taken.append(at)
            for later in graph.successors[at]:
                if later in missing:
                    missing[later] -= 1
                    if not missing[later]:
                        add(later)
        del ready[kind]
        device = "" if kind.priority is _Priority.PEER_COPY else kind.device
        parts.append((kind.priority, Part(tuple(names[at] for at in sorted(taken)), device)))
    return parts


def _take_turns(graph: OpGraph, positions: Sequence[int], eager: Container[str]) -> bool:
    """Whether copies between devices are all that runs eagerly, and all by which ops of one wait for another's."""
    ops = [*graph.ops.values()]
    copies = {at for at in positions if ops[at].crosses == "peer"}
    return (
        bool(copies)
        and all((ops[at].name in eager) == (at in copies) for at in positions)
        and all(
            ops[before].device == ops[at].device or not copies.isdisjoint((before, at))
            for at in positions
            for before in graph.predecessors[at]
            if ops[before].device != "cpu"
        )
    )


def _turns(
    graph: OpGraph, positions: Sequence[int], duration_us: Mapping[str, float]
) -> Iterator[tuple[_Priority, Part]]:
    """A part for each turn of a device, and of copies between devices."""
    ops = [*graph.ops.values()]
    for turn in turns(graph, positions, duration_us):
        first, names = ops[turn[0]], tuple(ops[at].name for at in turn)
        yield _Priority.OTHER, Part(names, "" if first.crosses else first.device)


def _next_kind(ready: Mapping[_Kind, Sequence[tuple[int, int]]]) -> _Kind:
    """The kind of the next part."""
    busy = {kind.device for kind in ready if kind.priority is not _Priority.PEER_COPY}

    def order(kind: _Kind) -> tuple[_Priority, int, bool, str]:
        (most_changes, _) = ready[kind][0]
        return kind.priority, most_changes, kind.device == "", kind.device

    return min((k for k in ready if k.priority is not _Priority.PEER_COPY or k.device not in busy), key=order)


def _changes(graph: OpGraph, positions: Sequence[int], kinds: Mapping[int, _Kind]) -> dict[int, int]:
    """The number of changes of kind after each op, on the path with the most."""
    changes: dict[int, int] = {}
    for at in reversed(positions):
        after = (later for later in graph.successors[at] if later in changes)
        changes[at] = max((changes[later] + (kinds[later] != kinds[at]) for later in after), default=0)
    return changes


def _is_worth_a_graph(graph: OpGraph, part: Part, several: bool) -> bool:
    """Whether a part has more launches than its replay needs; over several devices, values stay where they are."""
    ops, of_others = set(part.ops), {Role.INPUT} if several else {Role.INPUT, Role.INTERMEDIATE}
    allocated = {storage for op in part.ops for storage in graph.ops[op].allocates}
    used = [storage for name, storage in graph.storages.items() if not ops.isdisjoint(graph.users[name])]
    entering = [s for s in used if s.name not in allocated and s.role in of_others and s.bytes]

    def leaves(storage: Storage) -> bool:
        others = (user for user in graph.users[storage.name] if user not in ops)
        return storage.escapes or any(not several or graph.ops[user].crosses for user in others)

    leaving = [s for s in used if s.name in allocated and s.bytes and leaves(s)]
    written = {storage for op in part.ops for storage in graph.ops[op].writes}
    returned = any(_names(storage) & written for storage in entering)
    return len(part.ops) > 1 + bool(entering) + len(leaving) + returned


def _names(storage: Storage) -> set[str]:
    return {storage.name, *storage.parts}


def _merged(graph: OpGraph, parts: Iterable[tuple[_Priority, Part]]) -> list[Part]:
    """The same parts, with neighbours of one device merged.

    Captured parts that a long copy depends on stay apart from others: the copy starts when its part has ended.
    """
    position = {name: at for at, name in enumerate(graph.ops)}
    groups = groupby(parts, key=lambda each: (each[1].device, each[1].captured and each[0] is _Priority.BEFORE_COPY))
    return [
        Part(tuple(sorted((op for _, part in group for op in part.ops), key=position.__getitem__)), device)
        for (device, _), group in groups
    ]


def _with_copies_beside(graph: OpGraph, literals: Sequence[str], parts: Sequence[Part]) -> Iterable[Part]:
    """The same parts, with long copies that do not depend on the part before theirs in parts of their own."""
    part_of, names = {op: at for at, part in enumerate(parts) for op in part.ops}, list(graph.ops)
    before = {name: [names[each] for each in graph.predecessors[at]] for at, name in enumerate(names)}

    def runs_beside(op: str, at: int) -> bool:
        independent = all(part_of.get(earlier, at) < at - 1 for earlier in before[op])
        return _is_long(graph.ops[op]) and independent and not _needed(graph, literals, (op,))

    for at, part in enumerate(parts):
        beside = [op for op in part.ops if at and not part.captured and runs_beside(op, at)]
        if beside:
            yield Part(tuple(beside), "", beside=True)
        if others := tuple(op for op in part.ops if op not in beside):
            yield replace(part, ops=others)
