"""Estimates the share of a GPU's multiprocessors that the kernels of a captured graph keep busy.

    active = blocks of the grid / multiprocessors                          at most 1: one block keeps most of one busy
    waves  = blocks of the grid / blocks that all multiprocessors hold     at most 1
    share  = √active × (0.7 + 0.3 × waves)

A multiprocessor is nearly as busy with one block of an efficient kernel as with all blocks that fit on it, so what
matters is how many multiprocessors have a block. A kernel on a quarter of them uses more than a quarter of what they
share (caches, memory bandwidth). The formula was fitted on an H200 to 1,008 pairs of concurrent kernels, whose slowdown
(between 1 and 2) it predicts with a mean error of 0.18 (by occupancy alone: 0.22), and to 436 schedules of 26 models:
see ``docs/cost-model.md``.

Grids are read from the graph's nodes through the CUDA driver, with ``cuda.bindings``, which PyTorch's packages for CUDA
depend on. The driver's occupancy calculator tells how many blocks fit on a multiprocessor; it knows the registers and
shared memory even of closed-source kernels.
"""

from __future__ import annotations

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
    try:
        from cuda.bindings import driver  # type: ignore[import-not-found, unused-ignore]

        raw = driver.CUgraph(graph.raw_cuda_graph())
        _, count = _returned(driver.cuGraphGetNodes(raw))
        nodes, _ = _returned(driver.cuGraphGetNodes(raw, count))
        kernel = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL
        return tuple(_kernel(driver, node) for node in nodes if _returned(driver.cuGraphNodeGetType(node)) == [kernel])
    except (ImportError, AttributeError, RuntimeError):
        # No bindings, or another version of them, of the driver or of PyTorch: the caller estimates the share from the
        # op's size.
        return ()


def _kernel(driver: Any, node: Any) -> Kernel:
    (launch,) = _returned(driver.cuGraphKernelNodeGetParams(node))
    function = launch.func
    if not int(function):
        (function,) = _returned(driver.cuKernelGetFunction(launch.kern))
    threads = launch.blockDimX * launch.blockDimY * launch.blockDimZ
    (resident,) = _returned(
        driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, threads, launch.sharedMemBytes)
    )
    return Kernel(launch.gridDimX * launch.gridDimY * launch.gridDimZ, resident)


def _returned(answer: tuple[Any, ...]) -> list[Any]:
    """What a function of the driver returns beside its status.

    Raises:
        RuntimeError: the status is an error.
    """
    status, *values = answer
    if int(status):
        raise RuntimeError(f"the CUDA driver returned {status!r}")
    return values
