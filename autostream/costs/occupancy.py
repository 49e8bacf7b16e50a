"""Estimates the share of a GPU's multiprocessors that the kernels of a captured graph keep busy.

    active = blocks of the grid / multiprocessors                          at most 1: one block keeps most of one busy
    waves  = blocks of the grid / blocks that all multiprocessors hold     at most 1
    share  = √active × (0.7 + 0.3 × waves)

A multiprocessor is nearly as busy with one block of an efficient kernel as with all blocks that fit on it, so what
matters is how many multiprocessors have a block. A kernel on a quarter of them uses more than a quarter of what they
share (caches, memory bandwidth). The formula was fitted on an H200 to 1,008 pairs of concurrent kernels, whose slowdown
(between 1 and 2) it predicts with a mean error of 0.18 (by occupancy alone: 0.22), and to 436 schedules of 26 models:
see ``docs/cost-model.md``.

Grids are read from the graph's nodes. The driver's occupancy calculator tells how many blocks fit on a multiprocessor;
it knows the registers and shared memory even of closed-source kernels.
"""

from __future__ import annotations

from math import sqrt
from typing import TYPE_CHECKING, Any, NamedTuple

from autostream.runtime.graph_nodes import UNKNOWN, nodes_of, returned

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
    """The kernels of a graph that was captured with ``keep_graph=True``; none if the driver does not tell."""
    try:
        return tuple(map(_kernel, nodes_of(graph, "KERNEL")))
    except (RuntimeError, *UNKNOWN):
        return ()  # the caller estimates the share from the op's size


def _kernel(node: Any) -> Kernel:
    from cuda.bindings import driver  # type: ignore[import-not-found, unused-ignore]

    (launch,) = returned(driver.cuGraphKernelNodeGetParams(node))
    function = launch.func
    if not int(function):
        (function,) = returned(driver.cuKernelGetFunction(launch.kern))
    threads = launch.blockDimX * launch.blockDimY * launch.blockDimZ
    (resident,) = returned(driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, threads, launch.sharedMemBytes))
    return Kernel(launch.gridDimX * launch.gridDimY * launch.gridDimZ, resident)
