"""A run captured as one CUDA graph, and the calls that replay it.

A CUDA graph holds addresses. So inputs are copied into *static inputs* before a replay, and outputs are copied out of
the graph's memory after it. Tensors that stay at their addresses from call to call (weights) are *bound*: used in
place, and their addresses are checked at every call.

Intermediate tensors lie in a memory pool. Graphs that share a pool use the same memory, so their calls run one after
another, whichever threads and streams make them::

    call of A    copy in ─ replay ─ copy back and out
    call of B                                         copy in ─ replay ─ copy back and out
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from operator import itemgetter
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from autostream.errors import CaptureError, first_line
from autostream.runtime.capture import capture, own_cublas_workspaces, run_first
from autostream.runtime.collectives_first import communicate_first
from autostream.runtime.failing_node import where
from autostream.runtime.layouts import SameLayout
from autostream.runtime.small_fills import fill_by_kernels
from autostream.runtime.static_inputs import Output, copier, copier_out, output_makers, shareable
from autostream.runtime.streams import capture_stream, current_device, raw_stream
from autostream.utils.storages import storage_of

FlatFunction = Callable[..., Sequence[Output]]
"""A function of flat tensors that returns flat tensors."""

_capturing = threading.Lock()
"""A process can capture one graph at a time."""

_random_lock = threading.Lock()
_last_random: dict[torch.device, torch.cuda.Stream] = {}
"""By device, the stream of the last replay that generated random numbers."""


class Moved(Exception):  # noqa: N818 - a notice between modules, not an error
    """A tensor that a captured graph uses in place has another address or another layout now."""


class GraphPool:
    """A memory pool that captured graphs of one device compute in, one at a time.

    A capture reuses memory that earlier captures into the pool have freed: arenas, workspaces, and what ops allocated
    themselves. So a replay overwrites intermediate tensors of other graphs, and outputs of graphs that were captured
    later. That is why PyTorch asks for graphs of one pool to be replayed in the order of their captures. Here any order
    is right, because no data in the pool is needed from one call to the next: inputs, weights and mutated tensors lie
    outside of it, and outputs are copied before the call ends.

    A pool lives as long as a graph in it: PyTorch cannot capture into a pool whose last graph was freed. Later captures
    reuse a freed graph's memory; the device gets it back after the last graph.

    Args:
        device: a CUDA device.

    Attributes:
        handle: PyTorch's identifier of the pool.
        stream: of the latest call.
        lock: held during a call.
        failed: whether a capture into it has failed; no other capture can succeed then.
    """

    def __init__(self, device: torch.device) -> None:
        self.handle = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.current_stream(device)
        self.lock = threading.Lock()
        self.failed = False
        self._device = device
        self._raw_stream = self.stream.cuda_stream

    def wait_for_last_call(self) -> None:
        """Make the current stream wait for all earlier calls. The caller holds the lock."""
        if raw_stream(self._device.index) != self._raw_stream:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_stream(self.stream)
            self.stream, self._raw_stream = stream, stream.cuda_stream

    def capture(
        self, run: Callable[[], Sequence[Output]], stream: torch.cuda.Stream
    ) -> tuple[torch.cuda.CUDAGraph, Sequence[Output]]:
        """Capture a run into this pool; see :func:`~autostream.runtime.capture.capture`."""
        try:
            graph, outputs = capture(run, stream, self.handle, keep_nodes=True)
            with torch.cuda.device(stream.device):
                fill_by_kernels(graph, stream)
                if dist.is_available() and dist.is_initialized():
                    communicate_first(graph)
                graph.instantiate()
            return graph, outputs
        except BaseException:
            self.failed = True
            raise


GraphPools = WeakValueDictionary[torch.device, GraphPool]
"""By device, the pool of a model's graphs. Keeps no pool alive."""


def release_unused_memory(device: str) -> None:
    """Return memory that PyTorch's allocator caches to the driver: graphs that were measured and freed leave much.

    Args:
        device: ``"cuda:0"`` or ``"cpu"``, on which the preparation of a program has ended.
    """
    if device != "cpu":
        with _capturing, suppress(RuntimeError):  # it is not allowed during a capture of the user's
            torch.cuda.empty_cache()


class CapturedGraph:
    """A run captured into a CUDA graph; calling it replays the graph on the current stream.

    Later replays do not overwrite outputs. Calls from several threads or streams run one after another, and so do those
    of all graphs in the same pool, because they share its memory.

    Args:
        run: to capture; it may use several streams, if it forks them from the current one and joins them.
        tensors: arguments of ``run``, all on ``device``.
        bound: which of them are used in place. The graph does not own them: the caller of a replay ensures that they
            are still at their addresses, as :meth:`__call__` does. The others are the graph's *static inputs*, made for
            it or for several graphs (:func:`~autostream.runtime.static_inputs.static_copies`): calls copy inputs there.
        written: which of them ``run`` writes; those that are not bound are copied back.
        device: a CUDA device.
        random: whether ``run`` may generate random numbers.
        restore: restores the tensors that ``run`` writes. It is called before each of a few runs, and after the last.
        pool: a pool to share with other graphs; by default a new one.

    Attributes:
        static: the static inputs, by the index of the argument.
        bound: the indices of bound arguments.
        shared: the indices of outputs that are not copied: see :meth:`share_outputs`.
        written: which arguments it writes.
        pool: of its intermediate tensors.
        needs_inputs_only: whether a call needs no arguments but those that are copied in: see :meth:`launch_inputs`.

    Raises:
        CaptureError: the run or its capture failed. The current device and stream are as before. If it was the capture,
            no other graph can be captured into this pool; graphs that are in it work.
    """

    def __init__(
        self,
        run: FlatFunction,
        tensors: Sequence[Tensor],
        bound: Sequence[bool],
        written: Sequence[bool],
        device: torch.device,
        *,
        random: bool,
        restore: Callable[[], None],
        pool: GraphPool | None = None,
    ) -> None:
        self.device = device
        self.pool = pool or GraphPool(device)
        self._origin = torch.cuda.current_stream(device)
        self.written = tuple(written)
        self._run, self._is_bound, self._random = run, tuple(bound), random
        self.bound = tuple(index for index, is_bound in enumerate(bound) if is_bound)
        self.static = {index: tensors[index] for index, is_bound in enumerate(bound) if not is_bound}
        self._get_bound, self._get_inputs = _getter(self.bound), _getter([*self.static])
        self._written_back = [index for index in self.static if written[index]]
        self._copy_in = copier([*self.static.values()])
        self._unmoved = SameLayout([tensors[index] for index in self.bound]).unmoved
        self._graph, outputs = _captured(run, tensors, device, self.pool, restore)
        self._makers = output_makers(outputs, tensors)
        own = shareable(outputs, tensors, frozenset(range(len(outputs))))
        # Other outputs may be views of bound tensors, which must not be kept alive.
        self._outputs = [output if at in own else None for at, output in enumerate(outputs)]
        self.shared = frozenset[int]()
        self._copy_out = copier_out(self._outputs, self._makers, self.shared)
        storages = set(map(storage_of, tensors))
        aliased = any(output is not None and storage_of(output) in storages for output in outputs)
        self.needs_inputs_only = not self._written_back and not aliased
        with self.pool.lock:  # calls have to wait for the static inputs' allocation too
            self.pool.wait_for_last_call()

    def __del__(self) -> None:
        """Make the stream that the static inputs were allocated on, which reuses their memory, wait for all replays."""
        # CUDA may have shut down before Python, or the constructor may have failed before there was a pool.
        with suppress(RuntimeError, AttributeError):
            if self.pool.stream != self._origin:
                self._origin.wait_stream(self.pool.stream)

    def recaptured(self, tensors: Sequence[Tensor], pool: GraphPool, restore: Callable[[], None]) -> CapturedGraph:
        """Capture the same run with other tensors or into another pool. It runs with them a few times.

        Args:
            tensors: arguments of the run, like those of this graph.
            pool: for intermediate tensors.
            restore: restores the tensors that it writes.

        Raises:
            CaptureError: as the class does.
        """
        same = self._run, tensors, self._is_bound, self.written, self.device
        again = CapturedGraph(*same, random=self._random, restore=restore, pool=pool)
        again.share_outputs(self.shared, aliased=True)
        if any(tensors[at] is static for at, static in self.static.items()):
            again._origin = self._origin  # the stream that allocated them, whichever of the two graphs lives longer
        return again

    def share_outputs(self, indices: frozenset[int], *, aliased: bool = False) -> None:
        """From now on, return these outputs in the graph's memory without a copy, if no other tensor shares theirs.

        The next call of a graph in the same pool may overwrite them; with a pool of its own, the next replay does.

        Args:
            indices: of outputs.
            aliased: whether several of them may share memory.
        """
        shared = indices & shareable(self._outputs, (), indices if aliased else frozenset())
        if shared != self.shared:
            self.shared, self._copy_out = shared, copier_out(self._outputs, self._makers, shared)

    def fill(self, indices: Sequence[int], tensors: Sequence[Tensor]) -> None:
        """Copy these of a call's arguments to the static inputs, after all earlier calls."""
        with self.pool.lock:
            self.pool.wait_for_last_call()
            copier([self.static[at] for at in indices])([tensors[at] for at in indices])

    def replay(self) -> None:
        """Replay on the current stream, without copies and without waiting for other calls."""
        if not self._random:
            self._graph.replay()
            return
        with _after_last_random_replay(torch.cuda.current_stream(self.device)):
            self._graph.replay()

    def __call__(self, *tensors: Tensor) -> list[Output]:
        """Copy inputs in, replay, copy outputs out: all asynchronous, on the device's current stream.

        Raises:
            Moved: a bound tensor is not where the graph reads it. Nothing was copied or launched.
        """
        if not self.unmoved(tensors):
            raise Moved
        return self.launch(tensors)

    def launch(self, tensors: Sequence[Tensor]) -> list[Output]:
        """Call without checking bound tensors: they have been checked, or will be checked before outputs are used.

        The memory of bound tensors must not have been returned to the driver, or the device fails.
        """
        return self.launch_inputs(self._get_inputs(tensors), tensors)

    def launch_inputs(self, inputs: Sequence[Tensor], tensors: Sequence[Tensor] = ()) -> list[Output]:
        """Call, as :meth:`launch` does.

        Args:
            inputs: the arguments that are copied in, in order.
            tensors: all arguments; needed if inputs are written back, or if outputs share memory with an argument.
        """
        if current_device() != self.device.index:
            with torch.cuda.device(self.device):
                return self.launch_inputs(inputs, tensors)
        pool = self.pool
        with pool.lock:
            pool.wait_for_last_call()
            self._copy_in(inputs)
            self.replay()
            if self._written_back:
                copier([tensors[index] for index in self._written_back])(
                    [self.static[index] for index in self._written_back]
                )
            return self._copy_out(tensors)

    def unmoved(self, tensors: Sequence[Tensor]) -> bool:
        """Whether bound tensors have the addresses and layouts that the graph was captured for."""
        return self._unmoved(self._get_bound(tensors))


@contextmanager
def _after_last_random_replay(stream: torch.cuda.Stream) -> Iterator[None]:
    """Wait for the last random replay: a generator passes seed and offset to all graphs in the same memory."""
    with _random_lock:
        last = _last_random.setdefault(stream.device, stream)
        if last != stream:
            stream.wait_stream(last)
            _last_random[stream.device] = stream
        yield


def _getter(indices: Sequence[int]) -> Callable[[Sequence[Tensor]], Sequence[Tensor]]:
    """A function that gets the items at these indices: a slice, where they are consecutive."""
    first = indices[0] if indices else 0
    consecutive = slice(first, first + len(indices))
    return itemgetter(consecutive) if list(indices) == [*range(first, consecutive.stop)] else itemgetter(*indices)


def _captured(
    run: FlatFunction,
    tensors: Sequence[Tensor],
    device: torch.device,
    pool: GraphPool,
    restore: Callable[[], None],
) -> tuple[torch.cuda.CUDAGraph, Sequence[Output]]:
    """Warm up, then capture."""
    stream = capture_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))

    def warm_up() -> None:
        restore()
        run(*tensors)

    try:
        with _capturing, own_cublas_workspaces():
            with torch.cuda.stream(stream):
                run_first(warm_up, stream)
                warm_up()
                restore()
            return pool.capture(lambda: run(*tensors), stream)
    except Exception as error:
        raise CaptureError(f"{first_line(error)}{where(error)}") from error
    finally:
        torch.cuda.current_stream(device).wait_stream(stream)
