"""Which share of a GPU's multiprocessors the kernels of a captured graph keep busy while they run.

    active = blocks of the grid / multiprocessors                          at most 1: one block keeps most of one busy
    waves  = blocks of the grid / blocks that all multiprocessors hold     at most 1
    share  = √active × (0.7 + 0.3 × waves)

A multiprocessor is nearly as busy with one block of a good kernel as with all that it holds, so what counts is on how
many there is one; and a kernel on a quarter of them takes more than a quarter of what they share (caches, the way to
memory). The formula was fitted on an H200 to 1,008 pairs of kernels that ran side by side, whose slow-down it predicts
to 0.14 on average (between 1 and 2; by occupancy: 0.20), and to 436 schedules of 26 models: see ``docs/cost-model.md``.

Grids are read from the graph's nodes through the CUDA driver, and how many blocks one multiprocessor holds is for the
driver's own calculator to say, which knows the registers and shared memory of kernels that are nobody's to look into.
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
        resident: of these, how many one multiprocessor holds at a time.
    """

    blocks: int
    resident: int


def busy_share(kernel: Kernel, multiprocessors: int) -> float:
    """The share of a GPU that a kernel keeps busy, above 0 and at most 1.

    Args:
        kernel: its launch.
        multiprocessors: how many there are.

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
    """The kernels of a graph that was captured with ``keep_graph=True``; none where the driver does not tell.

    Uses the driver's public functions, and of PyTorch ``raw_cuda_graph``, which is there since 2.9.
    """
    driver = _driver()
    try:
        return tuple(_kernels(driver, graph.raw_cuda_graph())) if driver else ()
    except (AttributeError, RuntimeError, _Refused):
        # Another driver, another PyTorch: sizes say how much of the device an op fills.
        return ()


_KERNEL = 0
"""``CU_GRAPH_NODE_TYPE_KERNEL``"""


class _Parameters(ctypes.Structure):
    """``CUDA_KERNEL_NODE_PARAMS_v2``"""

    _fields_ = [
        ("function", ctypes.c_void_p),
        *((f"{what}_{axis}", ctypes.c_uint) for what in ("grid", "block") for axis in "xyz"),
        ("shared_bytes", ctypes.c_uint),
        ("arguments", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    ]


class _Refused(Exception):  # noqa: N818 - a notice within this file
    """The driver answered with an error."""


@cache
def _driver() -> Any:
    """The CUDA driver's library, or ``None`` where there is none or an old one."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return library if hasattr(library, "cuGraphKernelNodeGetParams_v2") else None


def _kernels(driver: Any, graph: int) -> Iterator[Kernel]:
    for node in map(ctypes.c_void_p, _nodes(driver, graph)):
        kind = ctypes.c_int()
        _ask(driver.cuGraphNodeGetType, node, ctypes.byref(kind))
        if kind.value == _KERNEL:
            yield _kernel(driver, node)


def _nodes(driver: Any, graph: int) -> ctypes.Array[ctypes.c_void_p]:
    count = ctypes.c_size_t()
    _ask(driver.cuGraphGetNodes, ctypes.c_void_p(graph), None, ctypes.byref(count))
    nodes = (ctypes.c_void_p * count.value)()
    _ask(driver.cuGraphGetNodes, ctypes.c_void_p(graph), nodes, ctypes.byref(count))
    return nodes


def _kernel(driver: Any, node: ctypes.c_void_p) -> Kernel:
    launch = _Parameters()
    _ask(driver.cuGraphKernelNodeGetParams_v2, node, ctypes.byref(launch))
    function = ctypes.c_void_p(launch.function)
    if not function.value:
        _ask(driver.cuKernelGetFunction, ctypes.byref(function), ctypes.c_void_p(launch.kernel))
    resident = ctypes.c_int()
    _ask(
        driver.cuOccupancyMaxActiveBlocksPerMultiprocessor,
        ctypes.byref(resident),
        function,
        ctypes.c_int(launch.block_x * launch.block_y * launch.block_z),
        ctypes.c_size_t(launch.shared_bytes),
    )
    return Kernel(launch.grid_x * launch.grid_y * launch.grid_z, resident.value)


def _ask(function: Any, *arguments: Any) -> None:
    if function(*arguments) != 0:
        raise _Refused
