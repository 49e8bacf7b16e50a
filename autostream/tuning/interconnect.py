"""What joins the processes that tune a program together.

    times of all-reduces of as many processes, in the cache of the first or measured now ──▶ measured
    none, as nothing is measured, or there are groups of fewer processes ──▶ assumed, by their machines and devices

The times are kept, like those of ops: the next run chooses the same buckets, which its other caches know.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist

from autostream.analysis.process_groups import group_named, processes_in, ranks_of
from autostream.costs.cache import load, save
from autostream.costs.device import profile_of
from autostream.costs.interconnects import Interconnect, interconnect_of, measured_interconnect
from autostream.costs.measured import METHOD
from autostream.costs.measured_collectives import SIZES, all_reduce_times_us
from autostream.costs.records import Measurements, Record, context_of
from autostream.errors import CostError
from autostream.ir import Decision, DeviceProfile
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
        measure: whether to measure their all-reduces, which takes less than a second the first time. They are not
            where there are groups of fewer processes: these may be joined by something else.

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
        record, notes = _all_reduces(device, len(set(machines)), peers)
    times_us = {int(name.removesuffix("_us")): us for name, us in record.items()}
    return partial(_link, machines, device, times_us, processes_in(peers.group)), notes


def _link(
    machines: Sequence[str], device: str, times_us: Mapping[int, float], processes: int, profile: DeviceProfile
) -> Interconnect | None:
    assumed = link_between(machines, device, profile)
    if not times_us:
        return assumed
    return measured_interconnect(times_us, processes, (assumed or interconnect_of(profile)).hop_us)


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


def _all_reduces(device: str, machines: int, peers: Peers) -> tuple[Record, Notes]:
    """The µs of all-reduces by size, of the slowest process; none if they cannot be measured."""
    context = context_of(device, profile_of(device), METHOD)

    def known() -> tuple[str, Record, Notes]:
        key = _key(peers.group, machines)
        saved, notes = load(context)
        return key, saved.records.get(key, {}), notes

    key, record, notes = peers.first("what is known of its all-reduces", known, tuple[str, Record, Notes])
    if record:
        return record, notes
    try:
        room = peers.together("memory for all-reduces", partial(_room, device), failing=CostError)
        of_all = peers.each("its all-reduces", partial(all_reduce_times_us, peers.group, room), failing=CostError)
    except CostError as error:
        reason = f"times of collectives are estimates, for measuring failed: {error}"
        return {}, (*notes, Decision("", "not measured", reason))
    record = {f"{size}_us": max(times) for size, *times in zip(SIZES, *of_all, strict=True)}
    kept = partial(save, Measurements(context, records={key: record}))
    return record, (*notes, *peers.first("the times of its all-reduces", kept, Notes))


def _room(device: str) -> torch.Tensor:
    return torch.zeros(SIZES[-1] // 2, dtype=torch.bfloat16, device=device)


def _key(group: str, machines: int) -> str:
    """Of a group's record: what its times depend on besides the device and versions."""
    library = torch.cuda.nccl.version() if dist.is_nccl_available() else ()  # type: ignore[no-untyped-call]
    variables = sorted((name, value) for name, value in os.environ.items() if name.startswith("NCCL_"))
    return key_of("all_reduce", dist.get_backend(group_named(group)), library, processes_in(group), machines, variables)
