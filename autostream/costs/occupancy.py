"""Estimates the share of a GPU's multiprocessors that the kernels of a captured graph keep busy.

    active = blocks of the grid / multiprocessors                          at most 1: one block keeps most of one busy
    waves  = blocks of the grid / blocks that all multiprocessors hold     at most 1
    share  = √active × (0.7 + 0.3 × waves)

A multiprocessor is nearly as busy with one block of an efficient kernel as with all blocks that fit on it, so what
matters is how many multiprocessors have a block. A kernel on a quarter of them uses more than a quarter of what they
share (caches, memory bandwidth). The formula was fitted on an H200 to 1,008 pairs of concurrent kernels, whose slowdown
(between 1 and 2) it predicts with a mean error of 0.14 (by occupancy alone: 0.20), and to 436 schedules of 26 models:
see ``docs/cost-model.md``.

Grids are read from the graph's nodes through the CUDA driver. The driver's occupancy calculator tells how many blocks
fit on a multiprocessor; it knows the registers and shared memory even of closed-source kernels.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from functools import cache
from math import sqrt
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch


class Kernel(NamedTuple):
    """One launch in a CUDA graph.

    Attributes:
        blocks: thread blocks of its grid.
        resident: how many of them fit on one multiprocessor at a time.
    """

    blocks: int
    resident: int


def busy_share(kernel: Kernel, multiprocessors: int) -> float:
    """The share of a GPU that a kernel keeps busy, above 0 and at most 1.

    Args:
        kernel: the launch.
        multiprocessors: how many the GPU has.

    Example:
        >>> busy_share(Kernel(blocks=132, resident=1), 132)
        1.0
        >>> round(busy_share(Kernel(blocks=33, resident=1), 132), 4)
        0.3875
    """
    blocks = max(kernel.blocks, 1)
    active, waves = min(1.0, blocks / multiprocessors), min(1.0, blocks / (max(kernel.resident, 1) * multiprocessors))
    return sqrt(active) * (0.7 + 0.3 * waves)


def kernels_of(graph: torch.cuda.CUDAGraph) -> tuple[Kernel, ...]:
    """The kernels of a graph that was captured with ``keep_graph=True``; none if the driver does not tell.

    Uses public functions of the driver, and ``raw_cuda_graph``, which PyTorch has since 2.9.
    """
    driver = _driver()
    try:
        return tuple(_kernels(driver, graph.raw_cuda_graph())) if driver else ()
    except (AttributeError, RuntimeError, _DriverError):
        # Another version of the driver or of PyTorch: the caller estimates the share from the op's size.
        return ()


_KERNEL = 0
"""``CU_GRAPH_NODE_TYPE_KERNEL``"""


class _Parameters(ctypes.Structure):
    """``CUDA_KERNEL_NODE_PARAMS_v2``"""

    _fields_ = [
        ("function", ctypes.c_void_p),
        *((f"{extent}_{axis}", ctypes.c_uint) for extent in ("grid", "block") for axis in "xyz"),
        ("shared_bytes", ctypes.c_uint),
        ("arguments", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    ]


class _DriverError(Exception):
    """A function of the driver returned an error."""


@cache
def _driver() -> Any:
    """The CUDA driver's library, or ``None`` if it is missing or too old."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return library if hasattr(library, "cuGraphKernelNodeGetParams_v2") else None


def _kernels(driver: Any, graph: int) -> Iterator[Kernel]:
    for node in map(ctypes.c_void_p, _nodes(driver, graph)):
        kind = ctypes.c_int()
        _call(driver.cuGraphNodeGetType, node, ctypes.byref(kind))
        if kind.value == _KERNEL:
            yield _kernel(driver, node)


def _nodes(driver: Any, graph: int) -> ctypes.Array[ctypes.c_void_p]:
    count = ctypes.c_size_t()
    _call(driver.cuGraphGetNodes, ctypes.c_void_p(graph), None, ctypes.byref(count))
    nodes = (ctypes.c_void_p * count.value)()
    _call(driver.cuGraphGetNodes, ctypes.c_void_p(graph), nodes, ctypes.byref(count))
    return nodes


def _kernel(driver: Any, node: ctypes.c_void_p) -> Kernel:
    launch = _Parameters()
    _call(driver.cuGraphKernelNodeGetParams_v2, node, ctypes.byref(launch))
    function = ctypes.c_void_p(launch.function)
    if not function.value:
        _call(driver.cuKernelGetFunction, ctypes.byref(function), ctypes.c_void_p(launch.kernel))
    resident = ctypes.c_int()
    _call(
        driver.cuOccupancyMaxActiveBlocksPerMultiprocessor,
        ctypes.byref(resident),
        function,
        ctypes.c_int(launch.block_x * launch.block_y * launch.block_z),
        ctypes.c_size_t(launch.shared_bytes),
    )
    return Kernel(launch.grid_x * launch.grid_y * launch.grid_z, resident.value)


def _call(function: Any, *arguments: Any) -> None:
    if function(*arguments) != 0:
        raise _DriverError
