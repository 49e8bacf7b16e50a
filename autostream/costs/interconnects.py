"""What joins devices, and how long bytes take from one to the next.

A message takes ``start + hop + bytes / bandwidth``. Start and hop are those of NCCL's cost model.
"""

from __future__ import annotations

from dataclasses import dataclass

from autostream.errors import OptionError
from autostream.ir import DeviceProfile


@dataclass(frozen=True, slots=True)
class Interconnect:
    """What devices, or processes, communicate over.

    Attributes:
        name: for reports.
        bandwidth: of each device in one direction, bytes per µs.
        start_us: time that any communication takes, µs.
        hop_us: time that a message takes from one device to the next besides the transfer, µs.
    """

    name: str
    bandwidth: float
    start_us: float
    hop_us: float

    def transfer_us(self, size: int) -> float:
        """The time of a message of so many bytes to the next device, µs.

        Example:
            >>> Interconnect("nvlink", 400e3, 6.0, 4.0).transfer_us(4_000_000)
            20.0
        """
        return self.start_us + self.hop_us + size / self.bandwidth


_START_US = 6.6
"""NCCL's own constant for rings of small messages (``baseLatencies`` of ``ncclTunerConstantsDefaults``)."""

_HOP_US = {"nvlink": 0.6, "infiniband": 2.7}
"""NCCL's own latencies of a hop in a ring (``hwLatencies``)."""

NAMES = tuple(_HOP_US)

_INFINIBAND = 50_000 * 0.85
"""Bytes per µs. NDR InfiniBand has 400 Gb/s in one direction (datasheet of ConnectX-7); large messages reach 85 %."""

LOOPBACK = Interconnect("loopback", 1e3, 100.0, 50.0)
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
        >>> interconnect_of(profile_named("h200"), "infiniband")
        Interconnect(name='infiniband', bandwidth=42500.0, start_us=6.6, hop_us=2.7)
    """
    if name not in _HOP_US:
        raise OptionError(f"interconnect={name!r} is not allowed: use {' or '.join(NAMES)}")
    bandwidth = profile.peer_bandwidth if name == "nvlink" else _INFINIBAND
    return Interconnect(name, bandwidth, _START_US, _HOP_US[name])
