"""The memory budget: how much a schedule may allocate, and what a report says of schedules that exceed it."""

from __future__ import annotations

import math

from autostream.ir import Candidate, Decision
from autostream.reporting.tables import size

SLACK_BYTES = 2 * 2**20
"""Bytes that a schedule may take beyond one stream at any ratio: the smallest block that PyTorch's
allocator requests from a GPU."""


def room_bytes(sequential: Candidate, budget: int | float, given_bytes: int) -> float:
    """The bytes that a schedule may allocate, or infinity.

    Args:
        sequential: the schedule on one stream, complete.
        budget: an int is the bytes that the schedule may allocate. A float is a ratio to what the model takes on one
            stream, weights and inputs included, since all of that has to fit on the device.
        given_bytes: the bytes of weights and inputs.

    Example:
        >>> from autostream.ir import Schedule
        >>> alone = Candidate(Schedule("sequential", 1, ()), True, 9.0, memory_bytes=9_900_000)
        >>> room_bytes(alone, 1.3, given_bytes=0), room_bytes(alone, 1.3, given_bytes=10_000_000)
        (12870000, 15870000)
        >>> room_bytes(alone, 1.1, given_bytes=0)  # 2 MiB more
        11997152
    """
    if not isinstance(budget, float) or math.isinf(budget):
        return budget
    one = sequential.memory_bytes + given_bytes
    return max(round(budget * one), one + SLACK_BYTES) - given_bytes


def excess(
    candidate: Candidate, sequential: Candidate, budget: int | float, given_bytes: int, *, at_least: bool = False
) -> str:
    """Why a candidate exceeds the memory budget, or ``""`` if it does not.

    Args:
        candidate: a schedule, with the memory that it needs.
        sequential: the schedule on one stream.
        budget: as for :func:`room_bytes`.
        given_bytes: the bytes of weights and inputs.
        at_least: whether the candidate's memory is a lower bound.

    Example:
        >>> from autostream.ir import Schedule
        >>> alone = Candidate(Schedule("sequential", 1, ()), True, 9.0, memory_bytes=9_900_000)
        >>> wide = Candidate(Schedule("search", 2, ()), True, 5.0, memory_bytes=13_100_000)
        >>> excess(wide, alone, 1.3, given_bytes=0)
        'needs 13.1 MB, the budget is 12.9 MB: 1.3 × the 9.9 MB of one stream (memory_budget)'
        >>> excess(wide, alone, 1.3, given_bytes=10_000_000)
        ''
        >>> excess(wide, alone, 12_000_000, given_bytes=10_000_000)
        'needs 13.1 MB, the budget is 12.0 MB (memory_budget)'
    """
    room = room_bytes(sequential, budget, given_bytes)
    if candidate.memory_bytes <= room:
        return ""
    needs = "needs at least" if at_least else "needs"
    if not isinstance(budget, float):
        return f"{needs} {size(candidate.memory_bytes)}, the budget is {size(budget)} (memory_budget)"
    one, most = sequential.memory_bytes + given_bytes, round(room) + given_bytes
    factor = f"{budget:g} ×" if most == round(budget * one) else f"{size(SLACK_BYTES)} more than"
    whole = f"{factor} the {size(one)} of one stream" + (", weights and inputs included" if given_bytes else "")
    return f"{needs} {size(candidate.memory_bytes + given_bytes)}, the budget is {size(most)}: {whole} (memory_budget)"


def exemption(sequential: Candidate, budget: int | float, given_bytes: int) -> tuple[Decision, ...]:
    """A note if the sequential schedule exceeds the budget; it is a candidate all the same.

    Example:
        >>> from autostream.ir import Schedule
        >>> alone = Candidate(Schedule("sequential", 1, ()), True, 9.0, memory_bytes=9_900_000)
        >>> exemption(alone, 5_000_000, given_bytes=0)[0].reason
        'one stream needs 9.9 MB, the budget is 5.0 MB (memory_budget): it is tried all the same'
    """
    reason = excess(sequential, sequential, budget, given_bytes)
    return (Decision("", "over budget", f"one stream {reason}: it is tried all the same"),) if reason else ()
