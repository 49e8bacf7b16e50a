"""Process groups of ``torch.distributed`` by name, as ops of a graph have them.

Private to PyTorch (seen in 2.11 and 2.13): ``_resolve_process_group``, the time limit of a group, and the number of
collectives that it has launched. A name that the first does not know has no group here.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout


def group_named(name: str) -> Any:
    """The process group with a name, or ``None`` if this process is in none.

    Example:
        >>> group_named("nobody's") is None
        True
    """
    resolve: Any = getattr(dist.distributed_c10d, "_resolve_process_group", None)
    try:
        return resolve(name)
    except (RuntimeError, TypeError, ValueError):
        return None


def processes_in(name: str) -> int:
    """How many processes a group has: 1 if this process does not know it.

    Example:
        >>> processes_in("nobody's")
        1
    """
    group = group_named(name)
    return 1 if group is None else int(group.size())


def limit_s_of(name: str) -> float:
    """How long a process waits for the others of a group in a collective, in seconds: the default, if it is not known.

    Example:
        >>> limit_s_of("nobody's")
        1800.0
    """
    group = group_named(name)
    try:
        limit = group._get_backend(group._device_types[0]).options._timeout
    except (AttributeError, IndexError, RuntimeError):
        limit = default_pg_timeout
    return float(limit.total_seconds())


def ranks_of(name: str) -> frozenset[int]:
    """The ranks of a group's processes among all: none if this process does not know it.

    Example:
        >>> ranks_of("nobody's")
        frozenset()
    """
    group = group_named(name)
    return frozenset() if group is None else frozenset(dist.get_process_group_ranks(group))


def gone_from(name: str) -> list[int]:
    """The ranks in a group of gloo of processes that have ended: those whose connection to this one is closed.

    To be asked when a collective has failed: an unread message remains at each of the others.

    Example:
        >>> gone_from("nobody's")
        []
    """
    group = group_named(name)
    if group is None or dist.get_backend(group) != "gloo":  # others have no connections that could be asked
        return []
    gone, sent = [], []
    for rank in set(range(group.size())) - {group.rank()}:
        try:
            sent.append(dist.isend(torch.zeros(1), group=group, group_dst=rank, tag=_ARE_YOU_THERE))
        except RuntimeError:
            gone.append(rank)
    return gone


_ARE_YOU_THERE = 0x6F6E65
"""A tag that nobody receives."""


def launched_in(name: str) -> int:
    """How many collectives this process has launched in a group, captured ones too; -1 if that is not known.

    Example:
        >>> launched_in("nobody's")
        -1
    """
    try:
        return int(group_named(name)._get_sequence_number_for_group())
    except (AttributeError, RuntimeError):
        return -1
