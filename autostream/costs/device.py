"""Profiles of devices for the cost model, from datasheets of known GPUs or from the properties of the device.

    profile_of("cuda:0")      a device of this machine
    profile_named("h200")     a GPU that may be elsewhere, to plan for it

Peak rates are those of a dense matrix product (no structured sparsity) on tensor cores, except for float32: PyTorch
does not use TF32 by default.
"""

from __future__ import annotations

import os
import platform
import re
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from autostream.errors import TargetError
from autostream.ir import DeviceProfile

_TERA = 1e6
"""Operations, or bytes, per µs in 1e12 per second."""

_ATTAINABLE_FLOPS = 0.75
_ATTAINABLE_BANDWIDTH = 0.85
"""Shares of a datasheet's peaks that large products and copies reach: 0.77 and 0.87 on an H200."""

_MEBI = 1 << 20

_GPU_EDGES: dict[str, Any] = {
    # Measured on an H200 (microbenchmarks.py) and assumed for other GPUs.
    "kernel_us": 0.1,
    "same_stream_edge_us": 0.9,
    "cross_stream_edge_us": 1.3,
    "fork_us": 0.15,
    "join_us": 0.15,
    "per_stream_us": 0.07,
    "dispatch_us": 0.18,
    "launch_us": 9.0,
    "replay_us": 1.5,
}

_CPU_EDGES: dict[str, Any] = {
    # An ATen call costs a few µs whatever its size; waking another thread costs about ten.
    "kernel_us": 3.0,
    "same_stream_edge_us": 1.0,
    "cross_stream_edge_us": 10.0,
    "fork_us": 10.0,
    "join_us": 10.0,
}


class _Peaks(NamedTuple):
    """Operations per unit of time by dtype; 0 if the hardware has no unit for it."""

    float64: float
    float32: float
    float16: float
    bfloat16: float
    float8: float
    int8: float

    def by_dtype(self, scale: float) -> dict[str, float]:
        """By dtype name, times ``scale``; dtypes without a unit of their own are computed in float32."""
        peaks = {"float64": self.float64, "float32": self.float32, "float16": self.float16, "int8": self.int8}
        peaks |= {"bfloat16": self.bfloat16 or self.float32}
        peaks |= dict.fromkeys(("float8_e4m3fn", "float8_e5m2"), self.float8 or self.float32)
        return {dtype: peak * scale for dtype, peak in peaks.items()}


class _Gpu(NamedTuple):
    """One row of the table: ``pattern`` matches driver names; ``tera_bytes`` is per second, ``peaks`` are in TFLOP/s.

    ``gigabytes`` is its memory. ``pcie`` is the generation of the link to the host, of 16 lanes. ``nvlink`` is the
    bandwidth to peers in GB/s in one direction, or 0 if they are reached over PCIe.
    """

    short: str
    pattern: str
    name: str
    multiprocessors: int
    gigabytes: int
    cache_mebibytes: int
    tera_bytes: float
    pcie: int
    nvlink: int
    peaks: _Peaks

    def profile(self) -> DeviceProfile:
        return DeviceProfile(
            name=self.name,
            multiprocessors=self.multiprocessors,
            bandwidth=self.tera_bytes * _TERA * _ATTAINABLE_BANDWIDTH,
            flops=self.peaks.by_dtype(_TERA * _ATTAINABLE_FLOPS),
            source="table",
            cache_bytes=self.cache_mebibytes * _MEBI,
            link_bandwidth=_link(self.pcie),
            peer_bandwidth=self.nvlink * 1e3 * _ATTAINABLE_BANDWIDTH or _link(self.pcie),
            memory_bytes=self.gigabytes * 10**9,
            **_GPU_EDGES,
        )


_HOPPER_SXM = _Peaks(67, 67, 989.5, 989.5, 1979, 1979)
_A100 = _Peaks(19.5, 19.5, 312, 312, 0, 624)

# The first match counts, so narrow patterns stand before wide ones. NVL boards are other chips: they are left out.
_TABLE = (
    # NVIDIA H200 Tensor Core GPU datasheet, H200 SXM
    _Gpu("h200", r"\bh200\b(?!.*nvl)", "NVIDIA H200", 132, 141, 60, 4.8, 5, 450, _HOPPER_SXM),
    # NVIDIA H100 Tensor Core GPU datasheet, H100 PCIe and H100 SXM
    _Gpu(
        "h100-pcie", r"\bh100\b.*pcie", "NVIDIA H100 PCIe", 114, 80, 50, 2.0, 5, 0, _Peaks(51, 51, 756, 756, 1513, 1513)
    ),
    _Gpu("h100", r"\bh100\b(?!.*nvl)", "NVIDIA H100 80GB HBM3", 132, 80, 50, 3.35, 5, 450, _HOPPER_SXM),
    # NVIDIA A100 Tensor Core GPU datasheet; the PCIe boards have 5 % less bandwidth at 80 GB
    _Gpu("a100-40gb", r"\ba100\b.*40gb", "NVIDIA A100-SXM4-40GB", 108, 40, 40, 1.555, 4, 300, _A100),
    _Gpu("a100-80gb", r"\ba100\b", "NVIDIA A100-SXM4-80GB", 108, 80, 40, 2.039, 4, 300, _A100),
    # NVIDIA L40S datasheet; float64 from the Ada architecture whitepaper (1/64 of float32)
    _Gpu("l40s", r"\bl40s\b", "NVIDIA L40S", 142, 48, 96, 0.864, 4, 0, _Peaks(1.43, 91.6, 362, 362, 733, 733)),
    # NVIDIA L4 datasheet (its tensor figures are with sparsity: halved here)
    _Gpu("l4", r"\bl4\b", "NVIDIA L4", 58, 24, 48, 0.3, 4, 0, _Peaks(0.47, 30.3, 121, 121, 242.5, 242.5)),
    # NVIDIA T4 datasheet; float64 from the Turing architecture whitepaper (1/32 of float32)
    _Gpu("t4", r"\bt4\b", "Tesla T4", 40, 16, 4, 0.32, 3, 0, _Peaks(0.25, 8.1, 65, 0, 0, 130)),
)

# Operations per multiprocessor and clock by compute capability: the throughput table of the CUDA C++ Programming Guide
# (a fused multiply-add counts as two) and, for tensor cores, the architecture whitepapers.
_PER_CLOCK = {
    (0, 0): _Peaks(4, 128, 128, 0, 0, 128),
    (7, 0): _Peaks(64, 128, 1024, 0, 0, 256),
    (7, 5): _Peaks(4, 128, 1024, 0, 0, 2048),
    (8, 0): _Peaks(128, 128, 2048, 2048, 0, 4096),
    (8, 6): _Peaks(4, 256, 1024, 1024, 0, 2048),
    (8, 9): _Peaks(4, 256, 1024, 1024, 2048, 2048),
    (9, 0): _Peaks(256, 256, 4096, 4096, 8192, 8192),
    (10, 0): _Peaks(128, 256, 8192, 8192, 16384, 16384),
    (12, 0): _Peaks(4, 256, 1024, 1024, 2048, 2048),
}

_CLOCK_KHZ = 1_500_000
"""If the driver does not tell; GPUs of the last ten years boost to between 1.3 and 2.6 GHz."""

_BANDWIDTH = 0.5 * _TERA
"""If the driver does not tell, bytes per µs."""


def profile_of(device: str) -> DeviceProfile:
    """The profile of a device of this machine, without measuring it.

    Args:
        device: ``"cpu"``, ``"cuda"`` or ``"cuda:1"``.

    Returns:
        The datasheet's numbers if both the name and the number of multiprocessors are those of a known GPU (a MIG slice
        has fewer), else numbers derived from the driver's properties; bandwidth in bytes per µs.

    Raises:
        TargetError: this machine has no such device.

    Example:
        >>> profile_of("cpu").source
        'properties'
    """
    if device == "cpu":
        return _cpu()
    if not re.fullmatch(r"cuda(:\d+)?", device):
        raise TargetError(f"there is no profile of device {device!r}: use 'cpu', 'cuda' or 'cuda:N'")
    try:
        properties = torch.cuda.get_device_properties(device)
    except (AssertionError, RuntimeError) as error:
        raise TargetError(
            f"device {device!r} is not on this machine ({error}): "
            f"to plan for a GPU that is not here, name it: {', '.join(known_names())}"
        ) from error
    gpu = _find(properties.name)
    if gpu is not None and gpu.multiprocessors == properties.multi_processor_count:
        return replace(gpu.profile(), name=properties.name)
    return _from_properties(properties)


def profile_named(name: str) -> DeviceProfile:
    """The profile of a kind of device, whether or not this machine has one.

    Args:
        name: one of :func:`known_names` or a name as the driver reports it; upper and lower case are the same.

    Raises:
        TargetError: the name is not in the table; the message lists those that are.

    Example:
        >>> profile_named("H200").multiprocessors
        132
        >>> profile_named("NVIDIA A100-SXM4-40GB").bandwidth
        1321750.0
    """
    if name.casefold() == "cpu":
        return _cpu()
    gpu = _find(name)
    if gpu is None:
        raise TargetError(f"there is no profile named {name!r}: use one of {', '.join(known_names())}")
    return gpu.profile()


def known_names() -> tuple[str, ...]:
    """The short names that :func:`profile_named` takes."""
    return (*(gpu.short for gpu in _TABLE), "cpu")


def _find(name: str) -> _Gpu | None:
    return next((gpu for gpu in _TABLE if re.search(gpu.pattern, name.casefold())), None)


def _from_properties(properties: Any) -> DeviceProfile:
    """The profile of a CUDA device that is not in the table; the fields of ``properties`` differ between versions."""
    clock_khz = getattr(properties, "clock_rate", 0) or _CLOCK_KHZ
    scale = properties.multi_processor_count * clock_khz * 1e3 / 1e6
    link = _link(5 if properties.major >= 9 else 4 if properties.major == 8 else 3)
    return DeviceProfile(
        name=properties.name,
        multiprocessors=properties.multi_processor_count,
        bandwidth=_bandwidth(properties) * _ATTAINABLE_BANDWIDTH,
        flops=_per_clock(properties.major, properties.minor).by_dtype(scale * _ATTAINABLE_FLOPS),
        source="properties",
        cache_bytes=getattr(properties, "L2_cache_size", 0),
        link_bandwidth=link,
        peer_bandwidth=link,
        memory_bytes=getattr(properties, "total_memory", 0),
        **_GPU_EDGES,
    )


def _link(pcie: int) -> float:
    """Bytes per µs in one direction over 16 lanes: 1 GB/s each in PCIe 3.0, twice as much in each generation since."""
    return float(16 << (pcie - 3)) * 1e3 * _ATTAINABLE_BANDWIDTH


def _bandwidth(properties: Any) -> float:
    """Bytes per µs; the DRAM of all GPUs transfers twice per memory clock."""
    clock_khz = getattr(properties, "memory_clock_rate", 0)
    bus_bits = getattr(properties, "memory_bus_width", 0)
    return 2 * clock_khz * 1e3 * (bus_bits / 8) / 1e6 or _BANDWIDTH


def _per_clock(major: int, minor: int) -> _Peaks:
    """Those of the newest known architecture that is not newer than this one."""
    return _PER_CLOCK[max(known for known in _PER_CLOCK if known <= (major, minor))]


def _cpu() -> DeviceProfile:
    """A rough profile of this machine's processor: that of AVX2 server cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # Two 8-lane multiply-adds per clock at 2.5 GHz are 80 GFLOP/s; half-precision types are widened to float32 first.
    per_core = _Peaks(float64=0.04, float32=0.08, float16=0.08, bfloat16=0.08, float8=0.08, int8=0.08)
    return DeviceProfile(
        name=platform.processor() or platform.machine() or "CPU",
        multiprocessors=cores,
        # 10 GB/s for one core; a socket's channels are saturated by about ten.
        bandwidth=min(cores, 10) * 0.01 * _TERA,
        flops=per_core.by_dtype(cores * _TERA),
        source="properties",
        **_CPU_EDGES,
    )
