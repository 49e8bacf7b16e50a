"""Estimates how long a collective takes, by the size of its message and the number of processes.

    duration = start + hops · hop + share · message / bandwidth

    n processes in a ring      hops       share of the message that crosses each link
    all-reduce                 2(n - 1)   2(n - 1)/n    a reduce-scatter, then an all-gather
    all-gather, reduce-scatter,
    all-to-all                 n - 1      (n - 1)/n
    broadcast, other           n - 1      1

The message is the larger of what a process gives and gets. The shares are those of the ring algorithms (Patarasuk &
Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations"; the "bus bandwidth" of nccl-tests).
"""

from __future__ import annotations

from dataclasses import dataclass

from autostream.ir import DeviceProfile, Op


@dataclass(frozen=True, slots=True)
class Interconnect:
    """What processes communicate over.

    Attributes:
        name: for reports.
        bandwidth: of each process in one direction, bytes per µs.
        start_us: time that any collective takes, µs.
        hop_us: time that each step of a ring takes besides the transfer, µs.
    """

    name: str
    bandwidth: float
    start_us: float
    hop_us: float


_ATTAINABLE = 0.85
"""The share of a link's rate that large messages reach."""

_START_US = 6.6
"""NCCL's own constant for rings of small messages (``baseLatencies`` of ``ncclTunerConstantsDefaults``)."""

NVLINK = Interconnect("NVLink", 450e3 * _ATTAINABLE, _START_US, 0.6)
"""The fourth generation: 450 GB/s in one direction (NVIDIA H100 and H200 datasheets: 900 GB/s in both); the latency of
a hop is NCCL's (``hwLatencies``, NVLink, ring)."""

INFINIBAND_400 = Interconnect("400 Gb/s InfiniBand", 50e3 * _ATTAINABLE, _START_US, 2.7)
"""One NDR port for each GPU: 400 Gb/s (NVIDIA ConnectX-7 datasheet); the latency of a hop is NCCL's (``hwLatencies``,
network, ring)."""

LOOPBACK = Interconnect("loopback", 1e3, 100.0, 50.0)
"""Gloo between processes of one machine, roughly: 1 GB/s, and a TCP round trip with two threads to wake for each hop.
An assumption, not a measurement."""

_CHANNELS = 16
"""Thread blocks of a collective's kernel: NCCL has one for each channel, and keeps the other multiprocessors free."""


def interconnect_of(profile: DeviceProfile, device: str) -> Interconnect:
    """What processes communicate over by default: the links between devices of this kind, or the loopback of a CPU.

    Example:
        >>> from autostream.costs.device import profile_named
        >>> interconnect_of(profile_named("h200"), "cuda:0").bandwidth == NVLINK.bandwidth
        True
    """
    if device == "cpu":
        return LOOPBACK
    return Interconnect(f"links of {profile.name}", profile.peer_bandwidth, _START_US, NVLINK.hop_us)


def collective_us(op: Op, interconnect: Interconnect) -> float:
    """How long a collective takes, µs; nothing crosses a link in a group of one.

    Example:
        One MiB over 4 processes: 6 hops, and 1.5 times the message over each link.

        >>> op = Op("r", "_c10d_functional.all_reduce.default", ("r",), frozenset(), frozenset(), bytes_read=1 << 20,
        ...         group="0", processes=4)
        >>> collective_us(op, Interconnect("mine", bandwidth=1024.0, start_us=5.0, hop_us=0.5))
        1544.0
    """
    message, others, share = max(op.bytes_read, op.bytes_written), op.processes - 1, 1.0
    if any(kind in op.target for kind in _DIVIDED):
        share = others / op.processes
    passes = 2 if "all_reduce" in op.target else 1
    sent = passes * share * message if others else 0.0
    return interconnect.start_us + passes * others * interconnect.hop_us + sent / interconnect.bandwidth


_DIVIDED = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def multiprocessors_of_collective(profile: DeviceProfile) -> float:
    """The share of the multiprocessors that a collective keeps busy."""
    return min(1.0, _CHANNELS / profile.multiprocessors)
