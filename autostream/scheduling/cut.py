"""Where to cut a program that a CUDA graph cannot hold whole: into parts that one can hold, and the ops between them.

    a ──▶ b ──▶ ITEM ──▶ c ──▶ d        captured  a b e f
    │                    ▲              plain     ITEM
    └──▶ e ──▶ f ────────╯              captured  c d

Parts come one after another, so each hazard within one is its own business, and each between two is respected if the
earlier op is in the earlier part. They are found greedily: all ops of one kind that may run now, and those of that kind
that may then, before any of another. The kind is that of the op with the most changes of kind still to come after it.
Of two kinds, captured and plain, that makes the fewest parts that there can be: a path with so many changes needs so
many parts, and each part takes one off all that are longest, unless both kinds begin one, when one part more is needed.

A graph holds ops of one device. The host launches a part and goes on to the next, so devices work at the same time:

    cuda:0   a ──▶ b ──────────────────────▶ f         captured on cuda:0  a      sends: cuda:1 waits for it
             │                               ▲         plain               COPY
             ╰──▶ COPY                      COPY       captured on cuda:1  d e
    cuda:1          ╰──▶ d ──▶ e ────────────╯         captured on cuda:0  b      before the copy, which would stall it
                                                       plain               COPY
                                                       captured on cuda:0  f

A device runs all that it is given one after another, copies to it and from it as well. So first come copies to devices
that nothing else is ready for, then what other devices wait for, then what they need not, and last what may make the
host wait. Parts may then be more than the fewest.

So they may where tensors of some size are copied between the host and a device. Such a copy runs beside what has been
launched before it, as far as it needs nothing of that: so that is launched first, and what the copy does need is a part
of its own, before all else.

    x ──▶ UPLOAD ──▶ c ─╮               captured  a b
    y ──▶ a ──▶ b ──────┴▶ d            beside    UPLOAD      while a and b run
                                        captured  c d

    a ──▶ b ──▶ DOWNLOAD                captured  a b
          ╰───▶ c ──▶ d                 captured  c d
                                        beside    DOWNLOAD    while c and d run

Captured, a part has launches of its own: its replay, one that copies in what other parts computed and inputs, one for
each block of memory that leaves it, and one that copies back what it wrote there. Of ops that are no more than these,
nothing is saved by a graph: they run plainly.

What is computed from literals alone, in the host's memory, is in each part that needs it: a graph is given nothing from
there, but may keep what is the same in every run.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import groupby
from typing import NamedTuple

from autostream.ir import Op, OpGraph, Role, Storage


@dataclass(frozen=True, slots=True)
class Part:
    """Ops that run as one.

    Attributes:
        ops: what is computed from literals, then all others; each in program order.
        device: which device's CUDA graph holds them; ``""`` where they run as they are.
        beside: whether they are copies between the host and a device that need nothing of the part before.
    """

    ops: tuple[str, ...]
    device: str
    beside: bool = False

    @property
    def captured(self) -> bool:
        """Whether in a CUDA graph."""
        return self.device != ""


def cut(graph: OpGraph) -> tuple[Part, ...]:
    """Cut a program at the ops that a CUDA graph cannot hold, and into those of each device.

    Takes time n log n in the number of ops, and linear in those of dependencies and of parts times storages.

    Args:
        graph: its ops; those that have a reason in ``uncapturable`` are in no captured part.

    Returns:
        Parts in the order in which they run. Neighbours are of two devices, or one of them is plain, unless it is for
        the sake of a copy. Each op is in one of them; in as many as need it, if it is in the host's memory and computed
        from literals. Nothing where no part is worth a graph.

    Example:
        >>> from autostream.ir import Op
        >>> ops = [Op(name, "f", (name,), frozenset(), frozenset({name})) for name in ("a", "b", "c")]
        >>> whole = OpGraph({op.name: op for op in ops}, (), {}, (), "cuda:0")
        >>> cut(whole)
        (Part(ops=('a', 'b', 'c'), device='cuda:0', beside=False),)
    """
    plain = _plain(graph)
    literals = [op for op in _literals(graph) if op not in plain]
    places = [at for at, op in enumerate(graph.ops) if op not in set(literals)]
    turns = _in_turn(graph, places, _kinds(graph, places, plain))
    weighed = [(turn, part if _is_worth_a_graph(graph, part) else replace(part, device="")) for turn, part in turns]
    if not any(part.captured for _, part in weighed):
        return ()
    return tuple(
        replace(part, ops=(*_needed(graph, literals, part.ops), *part.ops))
        for part in _with_copies_beside(graph, literals, _merged(graph, weighed))
    )


def _literals(graph: OpGraph) -> list[str]:
    """Ops on the host that a graph does not mind: they compute from literals alone."""
    return [op.name for op in graph.ops.values() if _is_on_host(op, graph) and not op.uncapturable]


def _is_on_host(op: Op, graph: OpGraph) -> bool:
    return op.device == "cpu" != graph.device


def _plain(graph: OpGraph) -> frozenset[str]:
    """Ops that no captured part may have: those that no graph holds, and those that use the host's memory with them."""
    literals = set(_literals(graph))
    written = {name for op in literals for name in graph.ops[op].writes}
    shared = {name for name in written if name in graph.storages and graph.storages[name].escapes}
    # What is changed in place between its uses is not the same for all.
    used: set[str] = set()
    for op in graph.ops.values():
        if op.name in literals:
            shared |= op.writes & used
        else:
            used |= written & (op.reads | op.writes)
    plain: set[str] = set()
    for op in graph.ops.values():
        if op.uncapturable or not shared.isdisjoint(op.reads | op.writes):
            plain.add(op.name)
            if _is_on_host(op, graph):
                shared |= op.writes
    return frozenset(plain)


def _needed(graph: OpGraph, literals: Sequence[str], ops: Iterable[str]) -> list[str]:
    """Those literals that some ops use, and what these are made of."""
    used = {name for op in ops for name in graph.ops[op].reads | graph.ops[op].writes}
    found: set[str] = set()
    while new := [op for op in literals if op not in found and not used.isdisjoint(graph.ops[op].writes)]:
        found.update(new)
        used = {name for op in new for name in graph.ops[op].reads | graph.ops[op].writes}
    return [op for op in literals if op in found]


class _Turn(IntEnum):
    """What comes first where there is a choice."""

    COPY = 0
    """A copy from another device, if nothing else is ready for the device that it goes to."""
    FETCHED = 1
    """What a long copy to the host or from there waits for."""
    SENDS = 2
    """What other devices wait for."""
    STAYS = 3
    UPLOAD = 4
    """A long copy from the host."""
    WAITS = 5
    """What may make the host wait, if something else may be ready meanwhile: for another device, or beside a copy."""


class _Kind(NamedTuple):
    """What ops of a part have in common.

    Attributes:
        turn: when it is theirs.
        device: which one's graph holds them; of copies, where to; ``""`` of others that run as they are.
    """

    turn: _Turn
    device: str


def _kinds(graph: OpGraph, places: Sequence[int], plain: Container[str]) -> dict[int, _Kind]:
    """The kind of each op at these places."""
    ops, kinds = list(graph.ops.values()), dict[int, _Kind]()
    several = len({ops[at].device for at in places if ops[at].name not in plain}) > 1
    others = _Kind(_Turn.WAITS if several or any(map(_is_long, ops)) else _Turn.STAYS, "")
    to: dict[int, frozenset[str]] = {}  # the devices of an op and of those that come after it
    for at in reversed(places):
        op, after = ops[at], frozenset[str]().union(*(to[later] for later in graph.successors[at] if later in to))
        if op.name not in plain:
            turn = _Turn.SENDS if after - {op.device} else _Turn.STAYS
            kinds[at] = _Kind(_Turn.FETCHED if _HOST in after else turn, op.device)
        elif op.crosses == "peer":
            kinds[at] = _Kind(_Turn.COPY, op.device)
        else:
            kinds[at] = _Kind(_Turn.UPLOAD, "") if op.crosses == "upload" and _is_long(op) else others
        to[at] = after | ({_HOST} if _is_long(op) else {kinds[at].device} - {""})
    return kinds


LONG_BYTES = 2**20
"""Of a copy between the host and a device: it takes some 20 µs, more than the launch of one part more."""

_HOST = "host"


def _is_long(op: Op) -> bool:
    return op.crosses in ("upload", "download") and op.bytes_written >= LONG_BYTES


def _in_turn(graph: OpGraph, places: Sequence[int], kinds: Mapping[int, _Kind]) -> list[tuple[_Turn, Part]]:
    """Parts of one kind each, in the order in which they run."""
    names = list(graph.ops)
    missing = {at: sum(before in kinds for before in graph.predecessors[at]) for at in places}
    changes = _changes(graph, places, kinds)
    ready = defaultdict[_Kind, list[tuple[int, int]]](list)  # by the changes to come, then in program order

    def add(at: int) -> None:
        heapq.heappush(ready[kinds[at]], (-changes[at], at))

    for at in places:
        if not missing[at]:
            add(at)
    parts: list[tuple[_Turn, Part]] = []
    while ready:
        kind = _next(ready)
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
        device = "" if kind.turn is _Turn.COPY else kind.device
        parts.append((kind.turn, Part(tuple(names[at] for at in sorted(taken)), device)))
    return parts


def _next(ready: Mapping[_Kind, Sequence[tuple[int, int]]]) -> _Kind:
    """Whose turn it is."""
    busy = {kind.device for kind in ready if kind.turn is not _Turn.COPY}

    def order(kind: _Kind) -> tuple[_Turn, int, bool, str]:
        (most, _) = ready[kind][0]
        return kind.turn, most, kind.device == "", kind.device

    return min((kind for kind in ready if kind.turn is not _Turn.COPY or kind.device not in busy), key=order)


def _changes(graph: OpGraph, places: Sequence[int], kinds: Mapping[int, _Kind]) -> dict[int, int]:
    """How many changes of kind are still to come after an op, on the path with the most."""
    found: dict[int, int] = {}
    for at in reversed(places):
        after = (later for later in graph.successors[at] if later in found)
        found[at] = max((found[later] + (kinds[later] != kinds[at]) for later in after), default=0)
    return found


def _is_worth_a_graph(graph: OpGraph, part: Part) -> bool:
    """Whether a part has more launches than it needs to be replayed."""
    own = set(part.ops)
    made = {storage for op in part.ops for storage in graph.ops[op].allocates}
    used = [storage for name, storage in graph.storages.items() if not own.isdisjoint(graph.users[name])]
    entering = [s for s in used if s.name not in made and s.role in (Role.INPUT, Role.INTERMEDIATE) and s.bytes]
    leaving = [s for s in used if s.name in made and s.bytes and (s.escapes or not own.issuperset(graph.users[s.name]))]
    written = {storage for op in part.ops for storage in graph.ops[op].writes}
    returned = any(_names(storage) & written for storage in entering)
    return len(part.ops) > 1 + bool(entering) + len(leaving) + returned


def _names(storage: Storage) -> set[str]:
    return {storage.name, *storage.parts}


def _merged(graph: OpGraph, parts: Iterable[tuple[_Turn, Part]]) -> list[Part]:
    """The same with neighbours of a kind as one."""
    position = {name: at for at, name in enumerate(graph.ops)}
    runs = (([part for _, part in run], kind) for kind, run in groupby(parts, key=_apart))
    return [
        Part(tuple(sorted((op for part in run for op in part.ops), key=position.__getitem__)), device)
        for run, (device, _) in runs
    ]


def _apart(part: tuple[_Turn, Part]) -> tuple[str, bool]:
    """What neighbours differ in that are not made one: a copy begins when the part that it waits for has ended."""
    turn, found = part
    return found.device, found.captured and turn is _Turn.FETCHED


def _with_copies_beside(graph: OpGraph, literals: Sequence[str], parts: Sequence[Part]) -> Iterable[Part]:
    """The same parts, long copies that need nothing of the part before theirs apart."""
    home, names = {op: at for at, part in enumerate(parts) for op in part.ops}, list(graph.ops)
    before = {name: [names[each] for each in graph.predecessors[at]] for at, name in enumerate(names)}

    def runs_beside(op: str, at: int) -> bool:
        needs_none = all(home.get(earlier, at) < at - 1 for earlier in before[op])
        return _is_long(graph.ops[op]) and needs_none and not _needed(graph, literals, (op,))

    for at, part in enumerate(parts):
        beside = [op for op in part.ops if at and not part.captured and runs_beside(op, at)]
        if beside:
            yield Part(tuple(beside), "", beside=True)
        if others := tuple(op for op in part.ops if op not in beside):
            yield replace(part, ops=others)
