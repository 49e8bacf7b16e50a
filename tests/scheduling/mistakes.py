"""Schedules with one mistake each, made of one that has none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autostream.ir import Launch, OpGraph, Schedule


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
            names = {storage, *graph.storages[storage].parts}
            users = {op.name for op in graph.ops.values() if names & (op.reads | op.writes | op.allocates)}
            last = max(at for at, other in enumerate(plan.launches) if other.op in users)
            home = plan.stream_of[allocator.name]
            if last < index and any(plan.stream_of[user] != home for user in users):
                kept = replace(launch, releases=tuple(name for name in launch.releases if name != storage))
                earlier = plan.launches[last]
                yield _with(_with(plan, index, kept), last, replace(earlier, releases=(*earlier.releases, storage)))


def _with(plan: Schedule, index: int, launch: Launch) -> Schedule:
    return replace(plan, launches=(*plan.launches[:index], launch, *plan.launches[index + 1 :]))
