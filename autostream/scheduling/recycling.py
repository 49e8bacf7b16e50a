"""Waits that cost no time and save memory: a stream may reuse what others are done with, once it has waited for them.

    stream 0:  a ── b ─────────── e ── f           e allocates; by the simulation c ended long ago,
    stream 1:       c ── d ──────                  so if e waits for c, it can be given c's memory

Memory goes from one stream to another only where an event orders them, and waits are placed for data alone, as few as
will do. Where the simulation says that another stream has been done with enough memory for longer than an edge takes, a
wait for that holds nobody up. Nor does it where that is so by the time at which a launch would have to start at the
latest (:mod:`~autostream.scheduling.slack`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import replace

from autostream.ir import FORK, Launch, OpGraph, Schedule, Timeline
from autostream.scheduling.footprint import Footprint
from autostream.scheduling.slack import delayed

_NEVER = -1


def wait_for_memory(
    graph: OpGraph, schedule: Schedule, timeline: Timeline, edge_us: float, least_bytes: int, slack: float = 0.0
) -> Schedule:
    """Let streams wait for others that are done with memory already, by a simulation.

    Takes O(V·(K² + K·log V)) steps for V ops on K streams.

    Args:
        graph: the ops with their accesses, and the storages.
        schedule: the launches with their waits.
        timeline: when each of them starts and ends.
        edge_us: what an edge between streams takes, µs: what ended that long ago is waited for.
        least_bytes: what must have become free on a stream since it was last waited for, to make a wait worth it; above
            0.
        slack: the share of its slack by which each launch may start later, 0 to 1: the later, the more memory is free,
            and the sooner the run is held up where the simulation is wrong.

    Returns:
        The schedule with waits added, launched in the order of these later starts; waits of launches that follow from
        others are gone, but for the fork's. Memory is still to be placed and released.

    Example:
        >>> from autostream.ir import Op, Role, Slice, Storage
        >>> reads = {"a": "x", "c": "a", "d": "c", "b": "a", "e": "b"}
        >>> ops = {n: Op(n, "f", (n,), frozenset({r}), frozenset({n}), frozenset({n})) for n, r in reads.items()}
        >>> graph = OpGraph(ops, (), {n: Storage(n, Role.INTERMEDIATE, 512, (n,)) for n in ops}, (), "cuda:0")
        >>> launches = tuple(Launch(n, int(n in "cd"), ("a",) if n == "c" else ()) for n in "acdbe")
        >>> times = {"a": (0, 1), "b": (1, 9), "c": (2, 3), "d": (3, 4), "e": (9, 10)}
        >>> timeline = Timeline(tuple(Slice(n, int(n in "cd"), *map(float, t)) for n, t in times.items()))
        >>> found = wait_for_memory(graph, Schedule("mine", 2, launches), timeline, edge_us=1.0, least_bytes=512)
        >>> {launch.op: launch.waits for launch in found.launches if launch.waits}
        {'c': ('a',), 'e': ('d',)}
    """
    later = delayed(schedule, timeline, edge_us, slack)
    start, end = later.starts, later.ends
    freed = Footprint(graph).freed(later)
    done = [_Stream() for _ in range(schedule.streams)]
    clock_of = {FORK: [_NEVER] * schedule.streams}
    clocks = [[_NEVER] * schedule.streams for _ in range(schedule.streams)]
    stream_of = schedule.stream_of
    launches: list[Launch] = []

    def follows(op: str, clock: Sequence[int]) -> bool:
        """Whether whoever has seen this much has seen the end of the op."""
        return clock[stream_of[op]] >= clock_of[op][stream_of[op]]

    def needed(waits: Iterable[str], known: Sequence[int]) -> tuple[str, ...]:
        """The waits that do not follow from what is known, or from another wait."""
        unknown = [op for op in waits if not follows(op, known)]
        return tuple(op for op in unknown if not any(follows(op, clock_of[other]) for other in unknown if other != op))

    for launch in sorted(schedule.launches, key=lambda launch: start[launch.op]):
        clock = [max(seen) for seen in zip(clocks[launch.stream], *(clock_of[op] for op in launch.waits), strict=True)]
        added: dict[int, str] = {}
        for stream, other in enumerate(done):
            if stream == launch.stream:
                continue
            at = other.over_by(start[launch.op] - edge_us)
            if at >= 0 and other.freed_between(clock[stream], at) >= least_bytes:
                added[stream] = other.ops[at]
                clock = [max(seen) for seen in zip(clock, clock_of[other.ops[at]], strict=True)]
        wanted = dict.fromkeys([*(op for op in launch.waits if op != FORK), *added.values()])
        fork = [FORK] if FORK in launch.waits else []
        launches.append(replace(launch, waits=(*fork, *needed(wanted, clocks[launch.stream]))))
        own = done[launch.stream]
        clock[launch.stream] = len(own.ops)
        own.launched(launch.op, end[launch.op], freed[launch.op])
        clocks[launch.stream] = clock_of[launch.op] = clock
    return replace(schedule, launches=tuple(launches), join_waits=needed(schedule.join_waits, clocks[0]))


class _Stream:
    """What was launched on a stream so far; places count its own launches."""

    def __init__(self) -> None:
        self.ops: list[str] = []
        self._ends: list[float] = []
        self._freed = [0]

    def launched(self, op: str, end_us: float, freed: int) -> None:
        self.ops.append(op)
        self._ends.append(end_us)
        self._freed.append(self._freed[-1] + freed)

    def over_by(self, moment_us: float) -> int:
        """The place of the last op that has ended by then, or -1; streams keep their order, so those before have."""
        return bisect_right(self._ends, moment_us) - 1

    def freed_between(self, known: int, at: int) -> int:
        """Bytes that became free behind the op at place ``known``, up to the one at ``at``."""
        return self._freed[at + 1] - self._freed[known + 1] if at > known else 0
