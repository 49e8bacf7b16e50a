"""All processes of a group agree on their collectives before any of them is launched, or each of them raises an error.

    schedule ──▶ its collectives, in order ──▶ digest ──▶ the group's store ──▶ equal on all ranks?
                                                                                     │ no
                                                                                     └─▶ the first difference, in words

Otherwise processes whose graphs differ would wait for each other for ever. The store is that of the process group, so
this takes no collective.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from datetime import timedelta

from autostream.analysis.process_groups import group_named
from autostream.errors import GroupError, first_line
from autostream.ir import OpGraph, Schedule
from autostream.scheduling.communication import first_difference, sequence

LIMIT_S = 300.0
"""How long a process waits for what the others would launch: some compile longer than others."""


def agree_on(graph: OpGraph, schedule: Schedule) -> None:
    """Check that the processes of each group would launch the same collectives in the same order, over all groups.

    Raises:
        GroupError: another process would launch others, or has not answered in time.
    """
    said = [str(each) for each in sequence(graph, schedule)]
    for group in sorted({graph.ops[name].group for name in graph.collectives}):
        agree(group, said)


def agree(group: str, said: Sequence[str]) -> None:
    """Check that all processes of a group say the same, line by line. Each has to call this as often as the others.

    Args:
        group: its name; one that is not known here has no other processes.
        said: what this process would do.

    Raises:
        GroupError: a process says something else, or nothing in time.
    """
    known = group_named(group)
    if known is None or known.size() == 1:
        return
    rank, end = known.rank(), time.monotonic() + LIMIT_S
    text = "\n".join(said)
    digest = hashlib.sha256(text.encode()).hexdigest()
    try:
        store = known.get_group_store()
        turn = f"autostream/{store.add(f'autostream/{rank}', 1)}"
        store.set(f"{turn}/{rank}/lines", text)
        store.set(f"{turn}/{rank}", digest)
    except Exception as error:
        raise GroupError(f"the store of process group {group!r} does not answer: {first_line(error)}") from error
    for other in range(known.size()):
        if other == rank:
            continue
        try:
            store.wait([f"{turn}/{other}"], timedelta(seconds=max(0.001, end - time.monotonic())))
            differs = store.get(f"{turn}/{other}").decode() != digest
            lines = store.get(f"{turn}/{other}/lines").decode().split("\n") if differs else said
        except Exception as error:
            raise GroupError(
                f"rank {other} of process group {group!r} has not compiled its step within {LIMIT_S:g} s, or is gone, "
                f"while rank {rank} has: all have to compile the same steps in the same order"
            ) from error
        if differs:
            raise GroupError(
                f"rank {other} of process group {group!r} would not launch the collectives of rank {rank}: "
                f"{first_difference(said, lines, f'rank {rank}', f'rank {other}')}"
            )
