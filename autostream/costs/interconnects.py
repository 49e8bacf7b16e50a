"""What joins devices, and how long bytes take from one to the next.

A message takes ``start + hops · hop + bytes / bandwidth`` by each protocol, and the fastest is used, as NCCL does.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from typing import NamedTuple

from autostream.errors import OptionError
from autostream.ir import DeviceProfile


class Protocol(NamedTuple):
    """A way to send a message.

    Attributes:
        start_us: time that any message takes, µs.
        bandwidth: of each device in one direction, bytes per µs.
    """

    start_us: float
    bandwidth: float


@dataclass(frozen=True, slots=True)
class Interconnect:
    """What devices, or processes, communicate over.

    Attributes:
        name: for reports.
        hop_us: time that a message takes from one device to the next besides the transfer, µs.
        protocols: of which the fastest for its size sends a message.
    """

    name: str
    hop_us: float
    protocols: tuple[Protocol, ...]

    def message_us(self, hops: int, sent_bytes: float) -> float:
        """The time of a message over so many hops, of which each device sends so many bytes, µs.

        Example:
            >>> link = Interconnect("mine", 1.0, (Protocol(6.0, 1e3), Protocol(24.0, 400e3)))
            >>> link.message_us(1, 1000), link.message_us(1, 4_000_000)
            (8.0, 35.0)
        """
        return self.hop_us * hops + min(start_us + sent_bytes / bandwidth for start_us, bandwidth in self.protocols)

    def transfer_us(self, size: int) -> float:
        """The time of a message of so many bytes to the next device, µs."""
        return self.message_us(1, size)


@dataclass(frozen=True, slots=True)
class MeasuredInterconnect(Interconnect):
    """What joins the processes of a group, by the times of its all-reduces.

    Another collective counts as an all-reduce of which each process sends as much, though it may take fewer hops.

    Attributes:
        times: bytes that a device sends, and how long that takes, µs, both ascending.
    """

    times: tuple[tuple[float, float], ...] = ()

    def message_us(self, hops: int, sent_bytes: float) -> float:
        """The time of a message over any number of hops, µs.

        It is on the line between the two measured ones next to it. Less takes as long as the smallest of these, and
        more as many times as long as the largest as it has bytes.

        Example:
            >>> link = MeasuredInterconnect("mine", 0.0, (), times=((10.0, 5.0), (20.0, 15.0)))
            >>> [link.message_us(2, sent_bytes) for sent_bytes in (1.0, 15.0, 40.0)]
            [5.0, 10.0, 30.0]
        """
        at = bisect_right(self.times, (sent_bytes, inf))
        if at == 0:
            return self.times[0][1]
        less, less_us = self.times[at - 1]
        if at == len(self.times):
            return less_us * sent_bytes / less
        more, more_us = self.times[at]
        return less_us + (sent_bytes - less) / (more - less) * (more_us - less_us)


def measured_interconnect(times_us: Mapping[int, float], processes: int) -> MeasuredInterconnect:
    """What joins the processes of a group.

    Args:
        times_us: bytes of an all-reduce, to its time. One that took longer than a larger one counts for that, too.
        processes: of the group.

    Example:
        >>> from autostream.costs.collectives import all_reduce_us
        >>> link = measured_interconnect({1024: 10.0, 2048: 30.0, 4096: 25.0}, 4)
        >>> all_reduce_us(1536, 4, link), all_reduce_us(8192, 4, link)
        (20.0, 60.0)
    """
    sizes = sorted(times_us)
    sent = [2 * (processes - 1) / processes * size for size in sizes]
    longest = accumulate((times_us[size] for size in sizes), max)
    return MeasuredInterconnect("measured", 0.0, (), tuple(zip(sent, longest, strict=True)))


_START_US = 6.6
"""NCCL's own constant for rings of small messages (``baseLatencies`` of ``ncclTunerConstantsDefaults``)."""

_SMALL_BANDWIDTH = 87_700.0
"""Bytes per µs of NCCL's protocol for small messages (LL) on Hopper, in one machine (``llMaxBws`` of the same)."""

_LARGE_START_US, _LARGE_SHARE = 24.0, 0.75
"""Large messages over NVLink, fitted to the kernels of all-reduces in the CUDA graph of a training step: 32.5, 52.5 and
119.5 µs for 2.1, 8.4 and 27.3 MB, on two H100s by the NCCL of torch 2.11. The share is that of the peer bandwidth."""

_HOP_US = {"nvlink": 0.6, "infiniband": 2.7}
"""NCCL's own latencies of a hop in a ring (``hwLatencies``)."""

NAMES = tuple(_HOP_US)

_INFINIBAND = 50_000 * 0.85
"""Bytes per µs. NDR InfiniBand has 400 Gb/s in one direction (datasheet of ConnectX-7); large messages reach 85 %."""

LOOPBACK = Interconnect("loopback", 50.0, (Protocol(100.0, 1e3),))
"""Gloo between processes of one machine, roughly: 1 GB/s, and a TCP round trip with two threads to wake for each hop.
An assumption, not a measurement."""


def interconnect_of(profile: DeviceProfile, name: str = NAMES[0]) -> Interconnect:
    """The interconnect of devices of a kind.

    Args:
        profile: the device.
        name: ``"nvlink"`` for devices of one machine, joined by NVLink or, where the device has none, by PCIe;
            ``"infiniband"`` for devices of several machines, 400 Gb/s each.

    Raises:
        OptionError: there is no such name.

    Example:
        >>> from autostream.costs.device import profile_named
        >>> interconnect_of(profile_named("h200"), "infiniband").protocols
        (Protocol(start_us=6.6, bandwidth=42500.0),)
        >>> interconnect_of(profile_named("l4")).name
        'pcie'
    """
    if name not in _HOP_US:
        raise OptionError(f"interconnect={name!r} is not allowed: use {' or '.join(NAMES)}")
    peer = profile.peer_bandwidth
    protocols = {
        "nvlink": (
            Protocol(_START_US, min(peer, _SMALL_BANDWIDTH)),
            Protocol(_LARGE_START_US, _LARGE_SHARE * peer),
        ),
        "infiniband": (Protocol(_START_US, _INFINIBAND),),
    }
    has_nvlink = peer > profile.link_bandwidth
    return Interconnect(name if has_nvlink or name != "nvlink" else "pcie", _HOP_US[name], protocols[name])
