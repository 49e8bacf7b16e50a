"""Estimates the cost of an op from its FLOPs and bytes: a roofline model with lower roofs for small kernels.

    duration = start + max( flops / peak,  bytes / bandwidth )        each roof × the share of multiprocessors filled

The model is that of Williams, Waterman, Patterson: "Roofline: an insightful visual performance model for multicore
architectures", Communications of the ACM 52(4), 2009. Lower roofs follow from Little's law: reaching the bandwidth of a
memory with some latency takes enough bytes in flight, and a kernel of few threads has too few. Reads from the
last-level cache are faster, to the degree that the whole program fits into it (``locality.py``).

Constants were fitted to the kernels of 26 models (fused by TorchInductor, float16, batch 1 to 32) on an H200. The sum
of the estimates differs from the time of a model on one stream by 15 % on average.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from autostream.costs.collectives import collective_us, share_of_collective
from autostream.costs.interconnects import LOOPBACK, Interconnect, MeasuredInterconnect, interconnect_of
from autostream.costs.locality import missed_share
from autostream.costs.occupancy import Kernel, busy_share
from autostream.errors import CostError
from autostream.ir import Costs, DeviceProfile, Op, OpCost, OpGraph

_FLOPS = 0.7
_BANDWIDTH = 0.8
"""Kernels that fill the device reach these shares of the profile's rates, which are those of the largest kernels."""

_CACHED = 1.5
"""The bandwidth of the cache, as a multiple of that of memory."""

_DENSE_START_US = 1.5
"""Time that a tiled product or convolution takes on a GPU besides its arithmetic."""

_COPY_START_US = 2.0
"""Time that a copy between two devices, or between host and device, takes besides the transfer."""

_LOOKUPS = frozenset({"embedding", "gather", "index", "index_select", "take"})
"""Ops that read only those elements of a table that they return."""

WAIT = "_c10d_functional.wait_tensor.default"

_DENSE_FLOPS = 64
"""An op with more FLOPs per result than this is a matrix product or a convolution, computed tile by tile."""


class _Grain(NamedTuple):
    """The amounts of work that keep one multiprocessor busy; one of them is enough."""

    results: int
    dense_results: int
    bytes_read: int
    dense_bytes_read: int


# CUDA: 2048 resident threads with 4 elements each, as ATen's vectorized kernels have; a 64 × 128 output tile; 700 ns of
# latency times 1/132 of 4.8 TB/s is about 32 KiB in flight (a product with few results is split along what it reads).
_CUDA_GRAIN = _Grain(8192, 8192, 32 * 1024, 64 * 1024)
# CPU: at::internal::GRAIN_SIZE elements go to one thread.
_CPU_GRAIN = _Grain(32768, 4096, 32768 * 4, 32768 * 4)


def price(graph: OpGraph, profile: DeviceProfile, interconnect: Interconnect | None = None) -> Costs:
    """Estimate the cost of every op of a graph.

    CPU ops in the graph of a GPU, and waits for collectives, cost 0: they take no time of the device.

    Args:
        graph: the ops.
        profile: the device; a dtype that it does not list counts as float32.
        interconnect: what processes communicate over; by default, what the device has.

    Returns:
        Op name to cost, in program order; durations in µs.

    Raises:
        CostError: the profile lists neither an op's dtype nor float32.

    Example:
        >>> from autostream.ir import Op, OpGraph
        >>> h200 = DeviceProfile("H200", 132, 4.1e6, {"float32": 50e6}, 2.0, 1.0, 1.75, 1.5, 1.5, "table")
        >>> relu = Op("relu", "aten.relu.default", ("relu",), frozenset(), frozenset(), elements=64, bytes_read=128)
        >>> price(OpGraph({"relu": relu}, (), {}, (), "cuda:0"), h200)["relu"].duration_us
        2.0
    """
    on_gpu = graph.device != "cpu"
    bandwidth = profile.bandwidth * _BANDWIDTH
    if on_gpu and profile.cache_bytes:
        bandwidth *= 1 + (_CACHED - 1) * (1 - missed_share(graph, profile))
    start_us = _DENSE_START_US if on_gpu else 0.0
    link = interconnect or (interconnect_of(profile) if on_gpu else LOOPBACK)
    return {op.name: _estimate(op, profile, graph.device, bandwidth, start_us, link) for op in graph.ops.values()}


def cost_of(
    op: Op, profile: DeviceProfile, duration_us: float, source: str, share_filled: float | None = None
) -> OpCost:
    """The cost of an op whose duration is known: the shares of the device that it uses are derived from its size.

    Args:
        op: the op.
        profile: the device.
        duration_us: time alone on the device, µs.
        source: where the duration is from, ``"measured"`` or ``"roofline"``.
        share_filled: the share of the multiprocessors that it fills, if known; by default, estimated from its size.

    Returns:
        The cost. Its share of multiprocessors is at least the share of the peak rate that the op reaches.
    """
    filled = fill(op, profile) if share_filled is None else share_filled
    return OpCost(
        duration_us=duration_us,
        sm_share=max(filled, _share(op.flops, duration_us * _peak(op, profile))),
        bandwidth_share=_share(traffic(op), duration_us * profile.bandwidth),
        source=source,
    )


def fill(op: Op, profile: DeviceProfile) -> float:
    """An estimate of the share of the multiprocessors that an op keeps busy, above 0 and at most 1."""
    blocks = _blocks(op)
    if op.device == "cpu":
        return min(1.0, blocks / profile.multiprocessors)
    return busy_share(Kernel(blocks, resident=_RESIDENT), profile.multiprocessors)


_RESIDENT = 4
"""Thread blocks of a typical kernel that are resident on one multiprocessor."""


def _blocks(op: Op) -> int:
    """The number of multiprocessors that an op has enough work for."""
    grain = _CPU_GRAIN if op.device == "cpu" else _CUDA_GRAIN
    results, bytes_read = (
        (grain.dense_results, grain.dense_bytes_read) if _is_dense(op) else (grain.results, grain.bytes_read)
    )
    return math.ceil(max(op.elements / results, _bytes_read(op) / bytes_read, 1))


def _is_dense(op: Op) -> bool:
    return op.flops > _DENSE_FLOPS * op.elements


def traffic(op: Op) -> int:
    """Bytes that an op reads and writes."""
    return _bytes_read(op) + op.bytes_written


def _estimate(
    op: Op, profile: DeviceProfile, device: str, bandwidth: float, dense_start_us: float, link: Interconnect
) -> OpCost:
    if op.group:
        source = "measured" if "all_reduce" in op.target and isinstance(link, MeasuredInterconnect) else "roofline"
        return cost_of(op, profile, collective_us(op, link), source, share_of_collective(profile))
    if (op.device == "cpu" and device != "cpu") or op.target == WAIT:
        return OpCost(0.0, 1 / profile.multiprocessors, 0.0, "roofline")
    if op.crosses:  # a copy engine does it, and the multiprocessors stay free
        bandwidth = profile.peer_bandwidth if op.crosses == "peer" else profile.link_bandwidth
        copying_us = max(_COPY_START_US + op.bytes_written / bandwidth, profile.kernel_us)
        return cost_of(op, profile, copying_us, "roofline", share_filled=1 / profile.multiprocessors)
    share = min(1.0, _blocks(op) / profile.multiprocessors)
    computing_us = op.flops / (_peak(op, profile) * _FLOPS * share)
    moving_us = traffic(op) / (bandwidth * share)
    start_us = dense_start_us if _is_dense(op) else 0.0
    return cost_of(op, profile, max(start_us + max(computing_us, moving_us), profile.kernel_us), "roofline")


def _share(used: float, available: float) -> float:
    return min(1.0, used / available) if available > 0 else 0.0


def _peak(op: Op, profile: DeviceProfile) -> float:
    peak = profile.flops.get(op.dtype) or profile.flops.get("float32")
    if peak is None:
        raise CostError(f"the profile of {profile.name} has no throughput of float32: measure it again")
    return peak


def _bytes_read(op: Op) -> int:
    lookup = not _LOOKUPS.isdisjoint(op.target.split("."))
    return min(op.bytes_read, op.bytes_written) if lookup else op.bytes_read
