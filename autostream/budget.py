"""The memory that a schedule may take: what exceeds it, and why."""

from __future__ import annotations

from autostream.ir import Candidate, Decision
from autostream.reporting.layout import size


def excess(candidate: Candidate, sequential: Candidate, budget: int | float) -> str:
    """Why a candidate takes more memory than it may, or ``""`` where it does not.

    Args:
        candidate: a complete schedule.
        sequential: the one on one stream.
        budget: an int is bytes, a float is a ratio to what one stream takes.

    Example:
        >>> from autostream.ir import Schedule
        >>> alone = Candidate(Schedule("sequential", 1, ()), True, 9.0, memory_bytes=9_900_000)
        >>> wide = Candidate(Schedule("search", 2, ()), True, 5.0, memory_bytes=13_100_000)
        >>> excess(wide, alone, 1.1)
        'needs 13.1 MB, the budget is 10.9 MB: 1.1 × the 9.9 MB of one stream (memory_budget)'
        >>> excess(wide, alone, 20_000_000)
        ''
    """
    one, ratio = sequential.memory_bytes, isinstance(budget, float)
    most = budget * one if ratio else budget  # not a number where both no limit and no memory
    if not candidate.memory_bytes > most:
        return ""
    how = f": {budget:g} × the {size(one)} of one stream" if ratio else ""
    return f"needs {size(candidate.memory_bytes)}, the budget is {size(most)}{how} (memory_budget)"


def exemption(sequential: Candidate, budget: int | float) -> tuple[Decision, ...]:
    """What is to be said of the sequential schedule where it exceeds the budget: it is a candidate all the same.

    Example:
        >>> from autostream.ir import Schedule
        >>> alone = Candidate(Schedule("sequential", 1, ()), True, 9.0, memory_bytes=9_900_000)
        >>> exemption(alone, 5_000_000)[0].reason
        'one stream needs 9.9 MB, the budget is 5.0 MB (memory_budget): it is tried all the same'
    """
    reason = excess(sequential, sequential, budget)
    return (Decision("", "over budget", f"one stream {reason}: it is tried all the same"),) if reason else ()
