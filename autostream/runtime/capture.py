"""Captures a CUDA graph, and cleans up after a capture that fails.

PyTorch (seen on 2.11) does not clean up after a capture that the driver has invalidated: the default random generator
stays in capture mode, so that all random ops raise from then on; the allocator keeps allocating from the failed
capture's pool; and that pool is never released. All three are repaired here.

Private to PyTorch: cuBLAS workspaces, ``_cuda_endAllocateToPool`` and ``_cuda_releasePool``. Where a version lacks
them, they are skipped.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch

from autostream.runtime.streams import idle_capture_stream
from autostream.utils import collector

Result = TypeVar("Result")


def capture(
    run: Callable[[], Result], stream: torch.cuda.Stream, pool: Any = None, *, keep_nodes: bool = False
) -> tuple[torch.cuda.CUDAGraph, Result]:
    """Capture the work that a function launches, on a stream that must live as long as the graph.

    Other threads may use the device meanwhile. The caller ensures that no other capture is active in the process, and
    that the function has run before (:func:`run_first`).

    Args:
        run: launches work on the current stream, and on streams that it forks from it and joins to it.
        stream: to capture on; not the default stream.
        pool: a memory pool (:func:`torch.cuda.graph_pool_handle`) to share with other graphs; by default a new one. It
            must be new or have a graph that is alive: PyTorch cannot capture into a pool whose last graph was freed or
            failed.
        keep_nodes: whether the graph keeps its nodes, so that they can be read and replaced; then ``instantiate``, or
            the first replay, makes what is launched.

    Returns:
        The graph, and the function's result.

    Raises:
        Exception: the function's own, or the one that ended the capture. Afterwards the process can generate random
            numbers, allocate and capture as before.
    """
    pool = pool or torch.cuda.graph_pool_handle()
    graph = torch.cuda.CUDAGraph(keep_graph=True) if keep_nodes else torch.cuda.CUDAGraph()
    stream.synchronize()
    with (
        torch.cuda.device(stream.device),
        own_cublas_workspaces(),
        collector.paused(),  # freeing another graph's memory would end this thread's capture
        torch.cuda.stream(stream),
    ):
        try:
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            result = run()
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "The CUDA Graph is empty")  # a graph of views launches nothing
                graph.capture_end()
        except BaseException:
            _clean_up(graph, stream.device, pool)
            raise
    return graph, result


def run_first(run: Callable[[], object], stream: torch.cuda.Stream) -> None:
    """Run a function that will be captured for the first time: on the default stream, in order with another stream.

    In a first run, libraries load kernels, choose algorithms and fill tables. They fill tables by copies on the default
    stream, for which streams of PyTorch's pools do not wait: on such a stream, cuFFT has read its tables too early.

    Args:
        run: launches work on the current stream.
        stream: the run comes after its earlier work and before its later work.
    """
    default = torch.cuda.default_stream(stream.device)
    default.wait_stream(stream)
    with torch.cuda.stream(default):
        run()
    stream.wait_stream(default)


def _clean_up(graph: torch.cuda.CUDAGraph, device: torch.device, pool: Any) -> None:
    # A step fails where there is nothing to clean up; all of them do when the device itself is lost.
    with suppress(RuntimeError):
        graph.capture_end()
    with suppress(RuntimeError, AttributeError):
        torch._C._cuda_endAllocateToPool(device.index, pool)
        # Where allocation had not ended, the graph does not hold the reference to the pool that it would release.
        torch._C._cuda_releasePool(device.index, pool)
    # The driver reports the error that ended the capture again at the next call.
    for _ in range(_ATTEMPTS):
        if _capture_empty(device):
            return


_ATTEMPTS = 4


def _capture_empty(device: torch.device) -> bool:
    """Capture an empty graph, which takes the random generator out of capture mode. Returns whether that succeeded."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the graph is empty
        empty = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(idle_capture_stream(device)):
                empty.capture_begin(capture_error_mode="thread_local")
                empty.capture_end()
        except RuntimeError:
            return False
    return True


@contextmanager
def own_cublas_workspaces() -> Iterator[None]:
    """Make cuBLAS allocate new workspaces inside, in the graph's pool, and new ones again afterwards.

    cuBLAS has one workspace for each thread and stream. Two graphs captured on the same streams would share it, and
    corrupt each other's data when they are replayed at the same time. Graphs of one pool may share it, as they are
    replayed one at a time. Inductor's CUDA graph trees clear workspaces before and after a capture as well.
    """
    clear_cublas_workspaces()
    try:
        yield
    finally:
        clear_cublas_workspaces()


def clear_cublas_workspaces() -> None:
    """Free cuBLAS's workspaces of all threads and streams; it allocates new ones when it needs them."""
    clear: Callable[[], None] = getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)
    clear()
