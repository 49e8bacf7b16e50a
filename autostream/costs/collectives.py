"""Estimates how long a collective takes, by the size of its message and the number of processes.

    duration = start + hops · hop + share · message / bandwidth

    n processes in a ring      hops       share of the message that crosses each link
    all-reduce                 2(n - 1)   2(n - 1)/n    a reduce-scatter, then an all-gather
    all-gather, reduce-scatter,
    all-to-all                 n - 1      (n - 1)/n
    broadcast, other           n - 1      1

In a group of one process no all-reduce runs, in place; what else it has is a copy, which takes the start.

The message is the larger of what a process gives and gets. The shares are those of the ring algorithms (Patarasuk &
Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations"; the "bus bandwidth" of nccl-tests).
"""

from __future__ import annotations

from autostream.costs.interconnects import Interconnect
from autostream.costs.occupancy import Kernel, busy_share
from autostream.ir import DeviceProfile, Op

_CHANNELS = 24
"""Thread blocks of a collective's kernel: NCCL has one for each channel, and keeps the other multiprocessors free. That
many were seen for all-reduces of 2 to 27 MB on two H100s."""


def collective_us(op: Op, interconnect: Interconnect) -> float:
    """How long a collective takes, µs.

    Example:
        One MiB over 4 processes: 6 hops, and 1.5 times the message over each link.

        >>> from autostream.costs.interconnects import Protocol
        >>> op = Op("r", "_c10d_functional.all_reduce.default", ("r",), frozenset(), frozenset(), bytes_read=1 << 20,
        ...         group="0", processes=4)
        >>> collective_us(op, Interconnect("mine", hop_us=0.5, protocols=(Protocol(start_us=5.0, bandwidth=1024.0),)))
        1544.0
    """
    message = max(op.bytes_read, op.bytes_written)
    if "all_reduce" in op.target:
        return all_reduce_us(message, op.processes, interconnect)
    others, share = op.processes - 1, 1.0
    if any(kind in op.target for kind in _DIVIDED):
        share = others / op.processes
    return interconnect.message_us(others, share * message if others else 0.0)


def all_reduce_us(size: int, processes: int, interconnect: Interconnect) -> float:
    """How long an all-reduce of so many bytes of each process takes, µs."""
    if processes == 1:
        return 0.0
    others = processes - 1
    return interconnect.message_us(2 * others, 2 * others / processes * size)


_DIVIDED = ("all_gather", "reduce_scatter", "all_to_all")


def share_of_collective(profile: DeviceProfile) -> float:
    """The share of the device that a collective keeps busy, as other kernels do: one block fills a multiprocessor."""
    return busy_share(Kernel(_CHANNELS, resident=1), profile.multiprocessors)
