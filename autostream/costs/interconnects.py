"""How long bytes take from one device to another, by what joins them.

A transfer takes ``latency + bytes / bandwidth``. Latencies are those of NCCL's sends of small messages.
"""

from __future__ import annotations

from dataclasses import dataclass

from autostream.errors import OptionError
from autostream.ir import DeviceProfile

_INFINIBAND = 50_000 * 0.85
"""Bytes per µs. NDR InfiniBand has 400 Gb/s in one direction (datasheet of ConnectX-7); large messages reach 85 %."""

_LATENCY_US = {"nvlink": 10.0, "infiniband": 15.0}

NAMES = tuple(_LATENCY_US)


@dataclass(frozen=True, slots=True)
class Interconnect:
    """What joins two devices.

    Attributes:
        name: ``"nvlink"`` or ``"infiniband"``.
        bandwidth: in one direction, bytes per µs.
        latency_us: time of an empty message, µs.
    """

    name: str
    bandwidth: float
    latency_us: float

    def transfer_us(self, size: int) -> float:
        """The time of a transfer of so many bytes, µs.

        Example:
            >>> Interconnect("nvlink", 400e3, 10.0).transfer_us(4_000_000)
            20.0
        """
        return self.latency_us + size / self.bandwidth


def interconnect_of(profile: DeviceProfile, name: str) -> Interconnect:
    """The interconnect of devices of a kind.

    Args:
        profile: the device.
        name: ``"nvlink"`` for devices of one machine, joined by NVLink or, where the device has none, by PCIe;
            ``"infiniband"`` for devices of several machines, 400 Gb/s each.

    Raises:
        OptionError: there is no such name.
    """
    if name not in _LATENCY_US:
        raise OptionError(f"interconnect={name!r} is not allowed: use {' or '.join(NAMES)}")
    bandwidth = profile.peer_bandwidth if name == "nvlink" else _INFINIBAND
    return Interconnect(name, bandwidth, _LATENCY_US[name])
