"""What an op should cost by its FLOPs and bytes: the roofline model, with roofs lowered for kernels too small to fill.

    duration = max( flops / peak,  bytes / bandwidth,  shortest kernel )        each roof × the share of SMs filled

Williams, Waterman, Patterson: "Roofline: an insightful visual performance model for multicore architectures",
Communications of the ACM 52(4), 2009. The lowered roofs follow Little's law: the bytes in flight that a memory of a
given bandwidth and latency needs must come from somewhere, and a kernel with few threads does not have them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from autostream.ir import Costs, DeviceProfile, Op, OpCost, OpGraph

_ATTAINABLE_FLOPS = 0.7
_ATTAINABLE_BANDWIDTH = 0.8
"""Shares of the datasheet's peak that large, well-written kernels reach."""

_LOOKUPS = frozenset({"embedding", "gather", "index", "index_select", "take"})
"""Ops that read of a table only what they return."""

_DENSE_FLOPS = 64
"""An op with more FLOPs per result than this multiplies matrices: it works tile by tile."""


class _Grain(NamedTuple):
    """How much work keeps one multiprocessor busy: the first of these that an op has enough of makes it fill one."""

    results: int
    dense_results: int
    bytes_read: int


# CUDA: 2048 resident threads with 4 elements each, as ATen's vectorized kernels have; a 64 × 64 output tile; 700 ns of
# latency times 1/132 of 4.8 TB/s is about 32 KiB in flight (a product with few results is split along what it reads).
_CUDA_GRAIN = _Grain(8192, 4096, 32 * 1024)
# CPU: at::internal::GRAIN_SIZE elements go to one thread.
_CPU_GRAIN = _Grain(32768, 4096, 32768 * 4)


def price(graph: OpGraph, profile: DeviceProfile) -> Costs:
    """Estimate every op of a graph.

    Ops of the host in a graph of a GPU cost 0: they take none of the device's time.

    Args:
        graph: the ops.
        profile: the device; a dtype that it does not list counts as float32.

    Returns:
        Op name to cost, in program order; durations in µs.

    Example:
        >>> from autostream.ir import Op, OpGraph
        >>> h200 = DeviceProfile("H200", 132, 4.8e6, {"float32": 67e6}, 2.0, 1.0, 1.75, 1.5, 1.5, "table")
        >>> relu = Op("relu", "aten.relu.default", ("relu",), frozenset(), frozenset(), elements=64, bytes_read=128)
        >>> price(OpGraph({"relu": relu}, (), {}, (), "cuda:0"), h200)["relu"].duration_us
        2.0
    """
    return {op.name: _estimate(op, profile, graph.device) for op in graph.ops.values()}


def cost_of(
    op: Op, profile: DeviceProfile, duration_us: float, source: str, share_filled: float | None = None
) -> OpCost:
    """The cost of an op whose duration is known: which shares of the device it must be using in that time.

    Args:
        op: the op.
        profile: the device.
        duration_us: time alone on the device, µs.
        source: where the duration is from, ``"measured"`` or ``"roofline"``.
        share_filled: the share of the multiprocessors that it is known to fill; by default, what its size can.

    Returns:
        The share of multiprocessors is what it fills, or what its arithmetic rate proves that it fills.
    """
    filled = fill(op, profile) if share_filled is None else share_filled
    return OpCost(
        duration_us=duration_us,
        sm_share=max(filled, _share(op.flops, duration_us * _peak(op, profile))),
        bandwidth_share=_share(traffic(op), duration_us * profile.bandwidth),
        source=source,
    )


def fill(op: Op, profile: DeviceProfile) -> float:
    """The share of the multiprocessors that an op can keep busy, above 0 and at most 1."""
    grain = _CPU_GRAIN if op.device == "cpu" else _CUDA_GRAIN
    dense = op.flops > _DENSE_FLOPS * op.elements
    by_results = op.elements / (grain.dense_results if dense else grain.results)
    busy = math.ceil(max(by_results, _bytes_read(op) / grain.bytes_read, 1))
    return min(1.0, busy / profile.multiprocessors)


def traffic(op: Op) -> int:
    """Bytes that an op moves between memory and the device's cores."""
    return _bytes_read(op) + op.bytes_written


def _estimate(op: Op, profile: DeviceProfile, device: str) -> OpCost:
    if op.device == "cpu" and device != "cpu":
        return OpCost(0.0, 1 / profile.multiprocessors, 0.0, "roofline")
    share = fill(op, profile)
    computing = op.flops / (_peak(op, profile) * _ATTAINABLE_FLOPS * share)
    moving = traffic(op) / (profile.bandwidth * _ATTAINABLE_BANDWIDTH * share)
    return cost_of(op, profile, max(computing, moving, profile.kernel_us), "roofline")


def _share(used: float, available: float) -> float:
    return min(1.0, used / available) if available > 0 else 0.0


def _peak(op: Op, profile: DeviceProfile) -> float:
    return profile.flops.get(op.dtype, profile.flops["float32"])


def _bytes_read(op: Op) -> int:
    lookup = not _LOOKUPS.isdisjoint(op.target.split("."))
    return min(op.bytes_read, op.bytes_written) if lookup else op.bytes_read
