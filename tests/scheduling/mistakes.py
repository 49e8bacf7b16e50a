"""Correct schedules with one change each; most changes are mistakes."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, permutations

from autostream.ir import Arena, Launch, OpGraph, Schedule


def without_a_wait(plan: Schedule) -> Iterator[Schedule]:
    """Each schedule that lacks one wait, without releases, so that nothing else is wrong."""
    bare = replace(plan, launches=tuple(replace(launch, releases=()) for launch in plan.launches))
    for index, launch in enumerate(bare.launches):
        for wait in launch.waits:
            yield _with(bare, index, replace(launch, waits=tuple(other for other in launch.waits if other != wait)))
    for wait in bare.join_waits:
        yield replace(bare, join_waits=tuple(other for other in bare.join_waits if other != wait))


def with_a_release_advanced(graph: OpGraph, plan: Schedule) -> Iterator[Schedule]:
    """Each schedule that releases one storage 1, 2, 4, … launches of its stream earlier, after it is allocated."""
    allocator = {storage: op.name for op in graph.ops.values() for storage in op.allocates}
    position = {launch.op: at for at, launch in enumerate(plan.launches)}
    for index, launch in enumerate(plan.launches):
        for storage in launch.releases:
            earlier = [
                at for at in range(position[allocator[storage]], index) if plan.launches[at].stream == launch.stream
            ]
            for step in (1 << power for power in range(len(earlier).bit_length())):
                yield with_a_release_at(plan, storage, earlier[-step])


def with_a_release_at(plan: Schedule, storage: str, index: int) -> Schedule:
    """The schedule that releases a storage after this launch, and nowhere else."""
    for at, launch in enumerate(plan.launches):
        if storage in launch.releases:
            plan = _with(plan, at, replace(launch, releases=tuple(name for name in launch.releases if name != storage)))
    launch = plan.launches[index]
    return _with(plan, index, replace(launch, releases=(*launch.releases, storage)))


def with_neighbours_swapped(plan: Schedule) -> Iterator[Schedule]:
    """Each schedule with two neighbouring launches swapped, with their waits and releases."""
    for index, (first, second) in enumerate(pairwise(plan.launches)):
        yield _with(_with(plan, index, second), index + 1, first)


def with_a_storage_moved(graph: OpGraph, plan: Schedule) -> Iterator[Schedule]:
    """Each schedule in which one storage in the arena has the offset of another."""
    for storage, other in permutations(_placed(graph, plan), 2):
        offset = plan.arena.offsets[other]
        if offset != plan.arena.offsets[storage]:
            size = max(plan.arena.bytes, offset + graph.storages[storage].bytes)
            # There are as many changes as pairs of storages: a copy of all offsets for each would take cubic time.
            yield replace(plan, arena=Arena(size, ChainMap({storage: offset}, plan.arena.offsets)))


def _placed(graph: OpGraph, plan: Schedule) -> list[str]:
    """The storages with bytes in the arena that some op uses."""
    return [name for name in plan.arena.offsets if graph.storages[name].bytes and _users(graph, name)]


def _users(graph: OpGraph, storage: str) -> set[str]:
    """The ops that access a storage or a part of it."""
    names = _names(graph, storage)
    return {op.name for op in graph.ops.values() if names & (op.reads | op.writes | op.allocates)}


def _names(graph: OpGraph, storage: str) -> set[str]:
    return {storage, *graph.storages[storage].parts}


def _with(plan: Schedule, index: int, launch: Launch) -> Schedule:
    return replace(plan, launches=(*plan.launches[:index], launch, *plan.launches[index + 1 :]))
