"""Schedules with one change each, made of one that is right; most changes are mistakes."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, permutations

from autostream.ir import Arena, Launch, OpGraph, Schedule
from autostream.scheduling.verify import ALIGNMENT
from tests.scheduling.brute_force import Pair, happens_before


def without_a_wait(plan: Schedule) -> Iterator[Schedule]:
    """Each schedule that lacks one wait. Storages then live to the end, so that what is wrong is that alone."""
    bare = replace(plan, launches=tuple(replace(launch, releases=()) for launch in plan.launches))
    for index, launch in enumerate(bare.launches):
        for wait in launch.waits:
            yield _with(bare, index, replace(launch, waits=tuple(other for other in launch.waits if other != wait)))
    for wait in bare.join_waits:
        yield replace(bare, join_waits=tuple(other for other in bare.join_waits if other != wait))


def with_a_release_too_early(graph: OpGraph, plan: Schedule) -> Iterator[Schedule]:
    """Each schedule in which one storage goes behind the launch that uses it last, although another stream uses it."""
    for index, launch in enumerate(plan.launches):
        for storage in launch.releases:
            allocator = next(op for op in graph.ops.values() if storage in op.allocates)
            users = _users(graph, storage)
            last = max(at for at, other in enumerate(plan.launches) if other.op in users)
            home = plan.stream_of[allocator.name]
            if last < index and any(plan.stream_of[user] != home for user in users):
                kept = replace(launch, releases=tuple(name for name in launch.releases if name != storage))
                earlier = plan.launches[last]
                yield _with(_with(plan, index, kept), last, replace(earlier, releases=(*earlier.releases, storage)))


def with_a_release_advanced(graph: OpGraph, plan: Schedule) -> Iterator[Schedule]:
    """Each schedule in which one storage goes 1, 2, 4, … launches of its stream earlier, but not before it is there."""
    born = {storage: op.name for op in graph.ops.values() for storage in op.allocates}
    place = {launch.op: at for at, launch in enumerate(plan.launches)}
    for index, launch in enumerate(plan.launches):
        for storage in launch.releases:
            earlier = [at for at in range(place[born[storage]], index) if plan.launches[at].stream == launch.stream]
            for step in (1 << power for power in range(len(earlier).bit_length())):
                yield with_a_release_at(plan, storage, earlier[-step])


def with_a_release_at(plan: Schedule, storage: str, index: int) -> Schedule:
    """The schedule in which a storage goes behind this launch, and nowhere else."""
    for at, launch in enumerate(plan.launches):
        if storage in launch.releases:
            plan = _with(plan, at, replace(launch, releases=tuple(name for name in launch.releases if name != storage)))
    launch = plan.launches[index]
    return _with(plan, index, replace(launch, releases=(*launch.releases, storage)))


def with_neighbours_swapped(plan: Schedule) -> Iterator[Schedule]:
    """Each schedule in which two launches change places in the order of the host, with their waits and releases."""
    for index, (first, second) in enumerate(pairwise(plan.launches)):
        yield _with(_with(plan, index, second), index + 1, first)


def with_a_storage_moved(graph: OpGraph, plan: Schedule) -> Iterator[Schedule]:
    """Each schedule in which one storage in the arena begins where another one does."""
    for storage, other in permutations(_placed(graph, plan), 2):
        offset = plan.arena.offsets[other]
        if offset != plan.arena.offsets[storage]:
            size = max(plan.arena.bytes, offset + graph.storages[storage].bytes)
            # There are as many changes as pairs of storages: a copy of all places for each would take cubic time.
            yield replace(plan, arena=Arena(size, ChainMap({storage: offset}, plan.arena.offsets)))


def with_two_storages_too_close(graph: OpGraph, plan: Schedule) -> Iterator[tuple[str, str, Schedule]]:
    """Two storages in the arena of which neither is over before the other begins, and a schedule in which they overlap.

    They get new bytes, where nothing else is, and the second starts in the last ones of the first.
    """
    before = happens_before(plan)
    for first, second in permutations(_placed(graph, plan), 2):
        if not _late(graph, first, second, before) or not _late(graph, second, first, before):
            continue
        last = (graph.storages[first].bytes - 1) // ALIGNMENT * ALIGNMENT
        yield first, second, _moved_away(graph, plan, {first: 0, second: last})


def with_a_lifetime_shortened(graph: OpGraph, plan: Schedule) -> Iterator[tuple[str, str, Schedule]]:
    """Two storages in the arena, the first over before the second but for one op that reads it, both at one place.

    That op does not use the second one: it may find the first one overwritten when it runs.
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
    """The storages in the arena that have bytes there and are used."""
    return [name for name in plan.arena.offsets if graph.storages[name].bytes and _users(graph, name)]


def _moved_away(graph: OpGraph, plan: Schedule, places: dict[str, int]) -> Schedule:
    """Some storages at these places in a piece of their own, behind all the arena had so far."""
    start = -(-plan.arena.bytes // ALIGNMENT) * ALIGNMENT
    offsets = {name: start + place for name, place in places.items()}
    end = max(offset + graph.storages[name].bytes for name, offset in offsets.items())
    return replace(plan, arena=Arena(end, {**plan.arena.offsets, **offsets}))


def _users(graph: OpGraph, storage: str) -> set[str]:
    """The ops that touch a storage or a part of it."""
    names = _names(graph, storage)
    return {op.name for op in graph.ops.values() if names & (op.reads | op.writes | op.allocates)}


def _names(graph: OpGraph, storage: str) -> set[str]:
    return {storage, *graph.storages[storage].parts}


def _with(plan: Schedule, index: int, launch: Launch) -> Schedule:
    return replace(plan, launches=(*plan.launches[:index], launch, *plan.launches[index + 1 :]))
