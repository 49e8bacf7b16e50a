"""Vector clocks: what has happened when a launch of a schedule starts (Fidge and Mattern, 1988).

    stream 0:  a(0) ── d(3)          before d: a on stream 0, and of stream 1 all up to c
    stream 1:  b(1) ── c(2) ─▶ d

Streams run side by side, so *before* is happens-before: stream order and waits, closed transitively. A clock holds one
position per stream, for what a stream did up to there has happened when the launch there has.
"""

from __future__ import annotations

from collections.abc import Iterator

from autostream.ir import FORK, Schedule

NEVER = -1

Clock = tuple[int, ...]
"""For each stream, the position of a launch there, or ``NEVER``."""


def seen_before(schedule: Schedule) -> Iterator[Clock]:
    """For each launch, the last launches that it comes after. O(V K + W K) steps for V launches with W waits.

    Example:
        >>> from autostream.ir import Launch
        >>> launches = (Launch("a", 0), Launch("b", 1), Launch("c", 1), Launch("d", 0, ("c",)))
        >>> list(seen_before(Schedule("mine", 2, launches)))
        [(-1, -1), (-1, -1), (-1, 1), (0, 2)]
    """
    nothing = (NEVER,) * schedule.streams
    after: dict[str, Clock] = {FORK: nothing}
    end = [nothing] * schedule.streams
    for position, launch in enumerate(schedule.launches):
        here = launch.stream
        seen = tuple(map(max, end[here], *(after[op] for op in launch.waits))) if launch.waits else end[here]
        yield seen
        end[here] = after[launch.op] = at_the_end(seen, here, position)


def at_the_end(seen: Clock, stream: int, position: int) -> Clock:
    """What has happened when the launch at a position has, which is on this stream and had seen that much before.

    Example:
        >>> at_the_end((-1, 1), stream=0, position=2)
        (2, 1)
    """
    return (*seen[:stream], position, *seen[stream + 1 :])
