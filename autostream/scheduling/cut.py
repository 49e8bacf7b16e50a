"""Where to cut a program that a CUDA graph cannot hold whole: into parts that one can hold, and the ops between them.

    a ──▶ b ──▶ ITEM ──▶ c ──▶ d        captured  a b e f
    │                    ▲              plain     ITEM
    └──▶ e ──▶ f ────────╯              captured  c d

Parts come one after another, so each hazard within one is its own business, and each between two is respected if the
earlier op is in the earlier part. The fewest parts of alternating kind are found greedily: all ops of one kind that may
run now, and those of that kind that may then, before any of the other. Nothing is gained by leaving one for later.

Captured, a part has launches of its own: its replay, one that copies in what other parts computed and inputs, one for
each block of memory that leaves it, and one that copies back what it wrote there. Of ops that are no more than these,
nothing is saved by a graph: they run plainly.

What is computed from literals alone, in the host's memory, is in each part that needs it: a graph is given nothing from
there, but may keep what is the same in every run.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

from autostream.ir import OpGraph, Role, Storage


@dataclass(frozen=True, slots=True)
class Part:
    """Ops that run as one.

    Attributes:
        ops: what is computed from literals, then all others; each in program order.
        captured: whether in a CUDA graph.
    """

    ops: tuple[str, ...]
    captured: bool


def cut(graph: OpGraph) -> tuple[Part, ...]:
    """Cut a program at the ops that a CUDA graph cannot hold.

    Takes time n log n in the number of ops, and linear in those of dependencies and of parts times storages.

    Args:
        graph: its ops; those that have a reason in ``uncapturable`` are in no captured part.

    Returns:
        Parts in the order in which they run, no two of a kind side by side. Each op is in one of them; in as many as
        need it, if it is in the host's memory and computed from literals. Nothing where no part is worth a graph.

    Example:
        >>> from autostream.ir import Op
        >>> ops = [Op(name, "f", (name,), frozenset(), frozenset({name})) for name in ("a", "b", "c")]
        >>> whole = OpGraph({op.name: op for op in ops}, (), {}, (), "cuda:0")
        >>> cut(whole)
        (Part(ops=('a', 'b', 'c'), captured=True),)
    """
    plain = _plain(graph)
    literals = [op for op in _literals(graph) if op not in plain]
    places = [at for at, op in enumerate(graph.ops) if op not in set(literals)]
    kinds = [name not in plain for name in graph.ops]
    parts = min((_alternating(graph, places, kinds, first) for first in (True, False)), key=len)
    weighed = [Part(part.ops, part.captured and _is_worth_a_graph(graph, part)) for part in parts]
    if not any(part.captured for part in weighed):
        return ()
    return tuple(
        Part((*_needed(graph, literals, part.ops), *part.ops), part.captured) for part in _merged(graph, weighed)
    )


def _literals(graph: OpGraph) -> list[str]:
    """Ops on the host that a graph does not mind: they compute from literals alone."""
    return [op.name for op in graph.ops.values() if op.device != graph.device and not op.uncapturable]


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
            if op.device != graph.device:
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


def _alternating(graph: OpGraph, places: Sequence[int], kinds: Sequence[bool], first: bool) -> list[Part]:
    """Parts of alternating kind, the first of them of this kind."""
    names, among = list(graph.ops), set(places)
    missing = {at: len(among.intersection(graph.predecessors[at])) for at in places}
    ready: dict[bool, list[int]] = {True: [], False: []}
    for at in places:
        if not missing[at]:
            heapq.heappush(ready[kinds[at]], at)
    parts: list[Part] = []
    kind = first
    while ready[True] or ready[False]:
        taken = []
        while ready[kind]:
            at = heapq.heappop(ready[kind])
            taken.append(at)
            for later in among.intersection(graph.successors[at]):
                missing[later] -= 1
                if not missing[later]:
                    heapq.heappush(ready[kinds[later]], later)
        if taken:
            parts.append(Part(tuple(names[at] for at in sorted(taken)), kind))
        kind = not kind
    return parts


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


def _merged(graph: OpGraph, parts: Iterable[Part]) -> tuple[Part, ...]:
    """The same with neighbours of a kind as one."""
    position = {name: at for at, name in enumerate(graph.ops)}
    runs = ((kind, [op for part in run for op in part.ops]) for kind, run in groupby(parts, key=_CAPTURED))
    return tuple(Part(tuple(sorted(ops, key=position.__getitem__)), kind) for kind, ops in runs)


_CAPTURED = attrgetter("captured")
