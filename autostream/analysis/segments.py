"""Cuts a program at calls of submodules into segments, between which stages of a pipeline may end.

ops           embed ─ norm ─ attention ─ add ─ head
cut points            ╿      ╿                 ╿          where the call of a submodule begins
segments      ╰───╯   ╰──╯   ╰─────────────╯   ╰──╯
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from autostream.ir import Costs, DeviceProfile, Op, OpGraph, Program, Role
from autostream.scheduling.partition import Segment

TRAINED = 4
"""Training holds a weight, its gradient, and two states as large as it: those of Adam."""


def ops_of(program: Program, graph: OpGraph, calls: Mapping[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """The number of the first op of each submodule's call, and of the first op behind it.

    Args:
        program: the traced call.
        graph: its ops.
        calls: the positions of the first and last node of each submodule's call.
    """
    nodes = {node.name: at for at, node in enumerate(program.module.graph.nodes)}
    launched = [nodes[name] for name in graph.ops]
    return {name: (bisect_left(launched, first), bisect_right(launched, last)) for name, (first, last) in calls.items()}


def cut_points(graph: OpGraph, calls: Mapping[str, tuple[int, int]]) -> dict[int, str]:
    """The submodules whose call may begin a stage, by the number of the first op that belongs to it.

    A stage gets tensors from another process, as leaves of autograd's graph: nothing may write to them.

    Args:
        graph: the ops.
        calls: of :func:`ops_of`; of submodules that begin with the same op, the first counts.
    """
    found: dict[int, str] = {}
    for name, (first, end) in calls.items():
        if first < end:
            found.setdefault(first, name)
    lives = _lives(graph)
    return {
        at: name
        for at, name in sorted(found.items())
        if at and not any(life.made < at <= life.written for life in lives)
    }


def segments_of(
    graph: OpGraph,
    costs: Costs,
    profile: DeviceProfile,
    cuts: Mapping[int, str],
    saved: Sequence[Mapping[str, int]],
    trained: Mapping[str, int],
) -> tuple[Segment, ...]:
    """The segments between cut points.

    Args:
        graph: the ops.
        costs: of each op.
        profile: the device; between two ops there is an edge within a stream.
        cuts: of :func:`cut_points`.
        saved: for each segment, the bytes of each activation that it keeps for the backward.
        trained: the bytes that training holds for each weight and buffer, by storage.
    """
    ops, lives = [*graph.ops.values()], _lives(graph)
    ends = [*cuts, len(ops)]
    returned = sum(each.bytes for each in graph.storages.values() if each.escapes and each.role is Role.INTERMEDIATE)
    segments = []
    for first, end, kept in zip([0, *cuts], ends, saved, strict=True):
        inside = ops[first:end]
        read = {name for op in inside for name in (op.reads | op.writes) if name in trained}
        segments.append(
            Segment(
                name=cuts.get(first, ""),
                forward_us=sum(costs[op.name].duration_us + profile.same_stream_edge_us for op in inside),
                crossing_bytes=sum(life.bytes for life in lives if life.made < first <= life.read),
                weights={name: trained[name] for name in sorted(read)},
                saved=kept,
                output_bytes=returned if end == len(ops) else 0,
            )
        )
    return tuple(segments)


class Crossing(NamedTuple):
    """A value that one stage computes and a later one reads.

    Attributes:
        op: the op that computes it.
        made: the number of the stage that does.
        read: that of the last stage that reads it; the model's outputs are read in the last one.
        trained: whether it depends on weights that are trained, so that a gradient comes back for it.
        kept: whether its own stage multiplies it by such weights, and keeps it for their gradients.
    """

    op: str
    made: int
    read: int
    trained: bool
    kept: bool


def crossings(graph: OpGraph, begins: Sequence[int], trained: Collection[str]) -> list[Crossing]:
    """The values that cross from a stage to a later one.

    Args:
        graph: the ops.
        begins: the number of the first op of each stage but the first.
        trained: the storages of the weights that are trained.
    """
    names, ops = [*graph.ops], [*graph.ops.values()]
    depending = set(trained)
    for op in ops:  # a detached value counts, too: that it has no gradient is not known here
        if not depending.isdisjoint(op.reads) and op.dtype.startswith(_DIFFERENTIABLE):
            depending |= op.writes
    found = []
    for life in _lives(graph):
        made, read = (min(bisect_right(begins, at), len(begins)) for at in (life.made, life.read))
        if made < read:
            op, end = ops[life.made], [*begins, len(ops)][made]
            readers = (other for other in ops[life.made + 1 : end] if not life.names.isdisjoint(other.reads))
            kept = any(not other.reads.isdisjoint(trained) for other in readers)
            found.append(Crossing(names[life.made], made, read, not depending.isdisjoint(op.writes), kept))
    return found


_DIFFERENTIABLE = ("float", "bfloat", "complex")


class _Life(NamedTuple):
    """The numbers of the ops that make a value, last write it, and last read it; its bytes, and names."""

    made: int
    written: int
    read: int
    bytes: int
    names: frozenset[str]


def _lives(graph: OpGraph) -> list[_Life]:
    """Of all values that ops compute; an output is read behind the last op."""
    number = {name: at for at, name in enumerate(graph.ops)}
    lives = []
    for storage in graph.storages.values():
        users = [number[name] for name in graph.users[storage.name]]
        if storage.role is Role.INTERMEDIATE and users:
            names = frozenset({storage.name, *storage.parts})
            writers = [number[name] for name in graph.users[storage.name] if names & graph.ops[name].writes]
            last = len(number) if storage.escapes else users[-1]
            lives.append(_Life(users[0], max(writers, default=users[0]), last, storage.bytes, names))
    return lives


def trained_bytes(program: Program, graph: OpGraph, trained: Collection[str]) -> dict[str, int]:
    """The bytes that training holds for each weight and buffer, by storage.

    Args:
        program: the traced call.
        graph: its ops.
        trained: the names of the parameters that are trained.
    """
    held = {
        placeholder.storage: TRAINED if placeholder.target in trained else 1
        for placeholder in program.placeholders
        if placeholder.role is not Role.INPUT
    }
    return {name: times * graph.storages[name].bytes for name, times in held.items() if name in graph.storages}


def resized(graph: OpGraph, factor: float) -> OpGraph:
    """The ops for a microbatch of another size: its work and values grow with it, weights do not.

    Args:
        graph: the ops.
        factor: the new size, by that which was traced.
    """
    fixed = {storage.name: storage.bytes for storage in graph.storages.values() if storage.role is Role.PARAMETER}

    def sized(op: Op) -> Op:
        weights = min(op.bytes_read, sum(fixed.get(name, 0) for name in op.reads))
        return replace(
            op,
            flops=round(op.flops * factor),
            bytes_read=round(weights + (op.bytes_read - weights) * factor),
            bytes_written=round(op.bytes_written * factor),
            elements=max(1, round(op.elements * factor)),
        )

    grows = Role.INPUT, Role.INTERMEDIATE
    storages = {
        name: replace(each, bytes=round(each.bytes * factor)) if each.role in grows else each
        for name, each in graph.storages.items()
    }
    return replace(graph, ops={name: sized(op) for name, op in graph.ops.items()}, storages=storages)
