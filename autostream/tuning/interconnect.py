"""What joins the processes that tune a program together.

    times of all-reduces of as many processes, in the cache of the first or measured now ──▶ measured
    none, as nothing is measured, or there are groups of fewer processes ──▶ assumed, by their machines and devices

The times are kept, like those of ops: the next run chooses the same buckets, which its other caches know.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from autostream.analysis.process_groups import group_named, processes_in, ranks_of
from autostream.costs.cache import load, save
from autostream.costs.device import profile_of
from autostream.costs.interconnects import Interconnect, interconnect_of, measured_interconnect
from autostream.costs.measured import METHOD
from autostream.costs.measured_collectives import LONGEST_US, SIZES, time_all_reduce
from autostream.costs.records import Context, Measurements, Record, context_of
from autostream.errors import CostError
from autostream.ir import Decision, DeviceProfile
from autostream.options import environment
from autostream.store import Notes, key_of
from autostream.tuning.agreement import Peers

Link = Callable[[DeviceProfile], Interconnect | None]
"""What joins processes, given the profile of their devices; ``None`` for what devices of one machine have."""


def link_of(groups: Iterable[str], device: str, peers: Peers, *, measure: bool) -> tuple[Link, Notes]:
    """What joins the processes of a program. All of them have to call this.

    Args:
        groups: the names of its process groups.
        device: of this process.
        peers: the processes.
        measure: whether to measure their all-reduces, the first time. They are not where there are groups of fewer
            processes: these may be joined by something else.

    Returns:
        The link, and why it could not be measured, or the times not be kept.

    Raises:
        GroupError: a process is gone.
    """
    communicating = {ranks_of(group) for group in groups if processes_in(group) > 1}
    measure = measure and communicating == {ranks_of(peers.group)}
    told = peers.each("the machines of its processes", lambda: (platform.node(), measure))
    machines = [machine for machine, _ in told]
    record: Record = {}
    notes: Notes = ()
    if peers.group and all(measures for _, measures in told):
        try:
            record, notes = _all_reduces(device, machines, peers)
        except CostError as error:
            reason = f"times of collectives are estimates, for measuring failed: {error}"
            notes = (Decision("", "not measured", reason),)
    times_us = {int(name.removesuffix("_us")): us for name, us in record.items()}
    measured = measured_interconnect(times_us, processes_in(peers.group)) if times_us else None
    return lambda profile: measured or link_between(machines, device, profile), notes


def link_between(machines: Sequence[str], device: str, profile: DeviceProfile) -> Interconnect | None:
    """What is assumed to join the devices of processes; ``None`` for what devices of one machine have.

    Args:
        machines: the name of the machine that each process runs on.
        device: of each process.
        profile: of the device.

    Example:
        >>> from autostream.costs.device import profile_named
        >>> link_between(["first", "second"], "cuda:0", profile_named("h200")).name
        'infiniband'
    """
    if device == "cpu" or len(set(machines)) == 1:
        return None
    return interconnect_of(profile, "infiniband")


def _all_reduces(device: str, machines: Sequence[str], peers: Peers) -> tuple[Record, Notes]:
    """The µs of all-reduces by size, of the slowest process.

    Raises:
        CostError: they cannot be measured.
    """

    def known() -> tuple[str, Record, Notes]:
        key = _key(peers.group, machines)
        saved, notes = load(_context(device))
        return key, saved.records.get(key, {}), notes

    what = "the times of its all-reduces"
    key, record, notes = peers.first(what, known, tuple[str, Record, Notes], failing=CostError)
    if record:
        return record, notes
    room = peers.together(what, partial(_room, device), failing=CostError)
    group = group_named(peers.group)
    for size in SIZES:
        timed = partial(time_all_reduce, group, room[: size // 2])
        us = max(peers.each(what, timed, failing=CostError))
        record = {**record, f"{size}_us": us}
        if us > LONGEST_US:
            break

    def kept() -> Notes:
        return save(Measurements(_context(device), records={key: record}))

    return record, (*notes, *peers.first(what, kept, Notes, failing=CostError))


def _room(device: str) -> torch.Tensor:
    return torch.zeros(SIZES[-1] // 2, dtype=torch.bfloat16, device=device)


def _context(device: str) -> Context:
    return context_of(device, profile_of(device), METHOD)


def _key(group: str, machines: Sequence[str]) -> str:
    """Of a group's record: what its times depend on besides the device and versions."""
    library = torch.cuda.nccl.version() if dist.is_nccl_available() else ()  # type: ignore[no-untyped-call]
    variables = [item for item in environment().items() if item[0].startswith("NCCL_")]
    on_each = sorted(Counter(machines).values())
    return key_of("all_reduce", dist.get_backend(group_named(group)), library, on_each, variables, SIZES)
