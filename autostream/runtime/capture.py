"""Capturing a CUDA graph, and leaving the process in order when that fails.

PyTorch (seen on 2.11) does not clean up after a capture that the driver has invalidated: the default random generator
goes on believing that it is in a capture, so that every later random number raises, and the allocator keeps serving
the dead capture's pool, which nobody gives back. All three are put right here.

Private to PyTorch: cuBLAS workspaces, ``_cuda_endAllocateToPool`` and ``_cuda_releasePool``. Where a version lacks
them, they are passed over.
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
    """Capture what a function launches, on a stream that must live as long as the graph.

    Other threads may go on using the device. The caller sees to it that no other capture is under way in the process,
    and that the function has run before (:func:`run_first`).

    Args:
        run: launches work on the current stream, and on streams that it forks from it and joins to it.
        stream: to capture on; not the default stream.
        pool: of :func:`torch.cuda.graph_pool_handle`, to share memory with other graphs; by default the graph's own. It
            must have a living graph or be new: one whose last graph is gone, or failed, cannot be captured into again.
        keep_nodes: keep what was captured beside what is replayed, to be looked at.

    Returns:
        The graph, and what the function returned.

    Raises:
        Exception: what the function raised, or what ended the capture. The process can draw random numbers, allocate
            and capture as before.
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
                warnings.filterwarnings("ignore", "The CUDA Graph is empty")  # it only looks at memory
                graph.capture_end()
        except BaseException:
            _clean_up(graph, stream.device, pool)
            raise
    return graph, result


def run_first(run: Callable[[], object], stream: torch.cuda.Stream) -> None:
    """Run what will be captured for the first time, in the turn of a stream but on the device's default stream.

    Libraries load kernels, choose algorithms and fill tables in a first run. They fill tables by copies on the default
    stream, which no stream of PyTorch's pools waits for: there, cuFFT has been seen to read them too early.

    Args:
        run: launches work on the current stream.
        stream: what it has launched comes before this run, and what it launches next behind it.
    """
    default = torch.cuda.default_stream(stream.device)
    default.wait_stream(stream)
    with torch.cuda.stream(default):
        run()
    stream.wait_stream(default)


def _clean_up(graph: torch.cuda.CUDAGraph, device: torch.device, pool: Any) -> None:
    # Each step fails where there is nothing to do, and all do when the device itself is lost.
    with suppress(RuntimeError):
        graph.capture_end()
    with suppress(RuntimeError, AttributeError):
        torch._C._cuda_endAllocateToPool(device.index, pool)
        # Only if this was still to be done, the graph never came to own a share of the pool that it could release.
        torch._C._cuda_releasePool(device.index, pool)
    # The driver reports what ended the capture once more, to whoever asks next.
    for _ in range(_ATTEMPTS):
        if _captures_nothing(device):
            return


_ATTEMPTS = 4


def _captures_nothing(device: torch.device) -> bool:
    """Whether an empty capture succeeds: the one thing that tells the generator that capturing is over."""
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
    """Make cuBLAS allocate new workspaces, so that a graph has its own, in its pool, and leaves them to the next there.

    A workspace belongs to a thread and stream at capture. Two graphs captured over the same streams would scribble over
    each other's when they are replayed at the same time, which those of one pool never are. Inductor's CUDA graph trees
    do the same, before and after.
    """
    clear_cublas_workspaces()
    try:
        yield
    finally:
        clear_cublas_workspaces()


def clear_cublas_workspaces() -> None:
    """Give back the memory that cuBLAS holds for each thread and stream; it takes some again when it next needs it."""
    clear: Callable[[], None] = getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)
    clear()
