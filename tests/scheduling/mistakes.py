"""Correct schedules with one change each; most changes are mistakes."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, permutations

from autostream.ir import Arena, Launch, OpGraph, Schedule
from autostream.scheduling.verify import ALIGNMENT
from tests.scheduling.brute_force import Pair, happens_before


def without_a_wait(plan: Schedule) -> Iterator[Schedule]:
    """Each schedule that lacks one wait, without releases, so that nothing else is wrong."""
    bare = replace(plan, launches=tuple(replace(launch, releases=()) for launch in plan.launches))
    for index, launch in enumerate(bare.launches):
        for wait in launch.waits:
            yield _with(bare, index, replace(launch, waits=tuple(other for other in launch.waits if other != wait)))
    for wait in bare.join_waits:
        yield replace(bare, join_waits=tuple(other for other in bare.join_waits if other != wait))


def with_a_release_too_early(graph: OpGraph, plan: Schedule) -> Iterator[Schedule]:
    """Each schedule that releases one storage after its last user in launch order, which is on another stream."""
    for index, launch in enumerate(plan.launches):
        for storage in launch.releases:
            allocator = next(op for op in graph.ops.values() if storage in op.allocates)
            users = _users(graph, storage)
            last = max(at for at, other in enumerate(plan.launches) if other.op in users)
            stream = plan.stream_of[allocator.name]
            if last < index and any(plan.stream_of[user] != stream for user in users):
                yield with_a_release_at(plan, storage, last)


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


def with_two_storages_too_close(graph: OpGraph, plan: Schedule) -> Iterator[tuple[str, str, Schedule]]:
    """Two storages in use at the same time, and a schedule in which they overlap in the arena.

    They move to new bytes, and the second starts in the last ones of the first.
    """
    before = happens_before(plan)
    for first, second in permutations(_placed(graph, plan), 2):
        if not _late(graph, first, second, before) or not _late(graph, second, first, before):
            continue
        last = (graph.storages[first].bytes - 1) // ALIGNMENT * ALIGNMENT
        yield first, second, _moved_away(graph, plan, {first: 0, second: last})


def with_a_lifetime_shortened(graph: OpGraph, plan: Schedule) -> Iterator[tuple[str, str, Schedule]]:
    """Two storages, the first over before the second except for one reader, and a schedule with both at one offset.

    That reader does not use the second one, and may find the first one overwritten.
    """
    before = happens_before(plan)
    for first, second in permutations(_placed(graph, plan), 2):
        late = _late(graph, first, second, before)
        if len(late) != 1 or late & _users(graph, second) or not _late(graph, second, first, before):
            continue
        if _names(graph, first) & graph.ops[min(late)].reads:
            yield first, second, _moved_away(graph, plan, {first: 0, second: 0})


def _late(graph: OpGraph, first: str, second: str, before: set[Pair]) -> set[str]:
    """The users of one storage that are not over before all users of another begin."""
    later = _users(graph, second)
    return {user for user in _users(graph, first) if any((user, other) not in before for other in later)}


def _placed(graph: OpGraph, plan: Schedule) -> list[str]:
    """The storages with bytes in the arena that some op uses."""
    return [name for name in plan.arena.offsets if graph.storages[name].bytes and _users(graph, name)]


def _moved_away(graph: OpGraph, plan: Schedule, moved: dict[str, int]) -> Schedule:
    """The schedule with some storages at these offsets from the end of the arena."""
    start = -(-plan.arena.bytes // ALIGNMENT) * ALIGNMENT
    offsets = {name: start + offset for name, offset in moved.items()}
    end = max(offset + graph.storages[name].bytes for name, offset in offsets.items())
    return replace(plan, arena=Arena(end, {**plan.arena.offsets, **offsets}))


def _users(graph: OpGraph, storage: str) -> set[str]:
    """The ops that access a storage or a part of it."""
    names = _names(graph, storage)
    return {op.name for op in graph.ops.values() if names & (op.reads | op.writes | op.allocates)}


def _names(graph: OpGraph, storage: str) -> set[str]:
    return {storage, *graph.storages[storage].parts}


def _with(plan: Schedule, index: int, launch: Launch) -> Schedule:
    return replace(plan, launches=(*plan.launches[:index], launch, *plan.launches[index + 1 :]))
