"""A run captured as one CUDA graph and replayed.

A CUDA graph holds addresses. Inputs are therefore copied into static tensors before a replay, outputs are copied out of
the graph's memory after it, and tensors that stay where they are (weights) are *bound*: used in place, and compared at
every call with what the graph holds.

What a run computes in between lies in a *pool*, and graphs of one pool lie in the same memory::

    call of A    copy in ─ replay ─ copy back and out
    call of B                                         copy in ─ replay ─ copy back and out

A call is one *turn*: it begins behind the end of the last one, whichever graph, thread or stream that was.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from operator import itemgetter
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from autostream.errors import CaptureError, first_line
from autostream.runtime.addresses import Bound
from autostream.runtime.capture import capture, own_cublas_workspaces, run_first
from autostream.runtime.failing_node import where
from autostream.runtime.static_inputs import Output, copier, copier_out, handouts_of, lendable
from autostream.runtime.streams import capture_stream, current_device, raw_stream
from autostream.utils.storages import storage_of

FlatFunction = Callable[..., Sequence[Output]]
"""Takes flat tensors, returns flat tensors."""

_capturing = threading.Lock()
"""A process can capture one graph at a time."""

_drawing = threading.Lock()
_drawn: dict[torch.device, torch.cuda.Stream] = {}
"""By device, the stream of the last replay that drew random numbers."""


class Moved(Exception):  # noqa: N818 - a notice between modules, not an error
    """A tensor that a captured graph uses in place lies somewhere else now, or differently."""


class GraphPool:
    """Memory that captured graphs of one device compute in, one at a time.

    A capture takes what earlier captures into the pool have let go of: arenas, workspaces, and whatever ops allocated
    by themselves. So a replay overwrites what other graphs computed in between, and the outputs of those that were
    captured later, which is why PyTorch wants graphs of one pool replayed in the order of their captures. Here any
    order will do, since nothing in the pool is needed from one turn to the next: inputs, weights and what is written
    lie elsewhere, and outputs are copied before the turn ends.

    It lives as long as a graph in it: PyTorch refuses captures into a pool that has lost its last graph. What a dropped
    graph has used is free for later captures, and goes back to the device after the last graph.

    Args:
        device: a CUDA device.

    Attributes:
        handle: what PyTorch calls the pool.
        stream: that of the latest turn.
        lock: is held during a turn.
        failed: whether a capture into it has: it takes no other.
    """

    def __init__(self, device: torch.device) -> None:
        self.handle = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.current_stream(device)
        self.lock = threading.Lock()
        self.failed = False
        self._device = device
        self._raw_stream = self.stream.cuda_stream

    def begin_turn(self) -> None:
        """Let what is launched on the current stream from now on come after all earlier turns; hold the lock."""
        if raw_stream(self._device.index) != self._raw_stream:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_stream(self.stream)
            self.stream, self._raw_stream = stream, stream.cuda_stream

    def capture(
        self, run: Callable[[], Sequence[Output]], stream: torch.cuda.Stream
    ) -> tuple[torch.cuda.CUDAGraph, Sequence[Output]]:
        """Capture a run that computes here; see :func:`~autostream.runtime.capture.capture`."""
        try:
            return capture(run, stream, self.handle)
        except BaseException:
            self.failed = True
            raise


GraphPools = WeakValueDictionary[torch.device, GraphPool]
"""By device, the pool of a model's graphs, for as long as there are any."""


def return_unused(device: str) -> None:
    """Give the driver back what PyTorch's allocator keeps for nobody: graphs that were measured and let go leave much.

    Args:
        device: on which all has been made ready, ``"cuda:0"`` or ``"cpu"``.
    """
    if device != "cpu":
        with _capturing, suppress(RuntimeError):  # what a capture of the user's would not bear can wait
            torch.cuda.empty_cache()


class CapturedGraph:
    """A run captured into a CUDA graph; calling it replays the graph on the current stream.

    Outputs are the caller's to keep: later replays do not overwrite them. Calls from several threads or streams run one
    after another, and so do those of all graphs in the same pool, because they share its memory.

    Args:
        run: what to capture; it may use several streams, if it forks them from the current one and joins them.
        tensors: arguments of ``run``, all on ``device``.
        bound: which of them are used where they are. Whoever replays the graph sees to it that they are still there, as
            :meth:`__call__` does: nothing here holds them. The others are the graph's *static* tensors, made for it or
            for several graphs in turn (:func:`~autostream.runtime.static_inputs.static_copies`): calls copy inputs
            there.
        written: which of them ``run`` writes; those that are not bound are copied back.
        device: a CUDA device.
        draws: whether ``run`` may draw random numbers.
        restore: puts back what ``run`` writes: it runs a few times, and finds each time what the first one did. So does
            whoever comes next.
        pool: to compute in, beside the graphs that are in it; by default the graph's own.

    Attributes:
        static: the tensors that the graph reads in the place of arguments that are not bound, by the places of these.
        bound: the places of those that are.
        lent: places of outputs that are not copied: see :meth:`lend`.
        written: which arguments it writes.
        pool: where it computes.
        takes_inputs: whether a call needs no arguments but those that are copied in: see :meth:`launch_inputs`.

    Raises:
        CaptureError: the run or its capture failed. The current device and stream are as before. If it was the capture,
            nothing can be captured into this pool any more; graphs that are in it work.
    """

    def __init__(
        self,
        run: FlatFunction,
        tensors: Sequence[Tensor],
        bound: Sequence[bool],
        written: Sequence[bool],
        device: torch.device,
        *,
        draws: bool,
        restore: Callable[[], None],
        pool: GraphPool | None = None,
    ) -> None:
        self.device = device
        self.pool = pool or GraphPool(device)
        self._home = torch.cuda.current_stream(device)
        self.written = tuple(written)
        self._run, self._flags, self._draws = run, tuple(bound), draws
        self.bound = tuple(index for index, is_bound in enumerate(bound) if is_bound)
        self.static = {index: tensors[index] for index, is_bound in enumerate(bound) if not is_bound}
        self._those_bound, self._those_copied = _at(self.bound), _at([*self.static])
        self._returned = [index for index in self.static if written[index]]
        self._copy_in = copier([*self.static.values()])
        self._unmoved = Bound([tensors[index] for index in self.bound]).unmoved
        self._graph, outputs = _captured(run, tensors, device, self.pool, restore)
        self._handouts = handouts_of(outputs, tensors)
        self._lendable = lendable(outputs, tensors)
        # Others may be views of what is bound, which is not held.
        self._outputs = [output if place in self._lendable else None for place, output in enumerate(outputs)]
        self.lent = frozenset[int]()
        self._copy_out = copier_out(self._outputs, self._handouts, self.lent)
        given = set(map(storage_of, tensors))
        returned = any(output is not None and storage_of(output) in given for output in outputs)
        self.takes_inputs = not self._returned and not returned
        with self.pool.lock:  # calls come after the making of the static tensors too
            self.pool.begin_turn()

    def __del__(self) -> None:
        """Whoever is given the static tensors' memory next, on the stream of their making, comes after all replays."""
        # CUDA may have ended before Python does, or there may have been too little memory for a pool.
        with suppress(RuntimeError, AttributeError):
            if self.pool.stream != self._home:
                self._home.wait_stream(self.pool.stream)

    def recaptured(self, tensors: Sequence[Tensor], pool: GraphPool, restore: Callable[[], None]) -> CapturedGraph:
        """The same run, captured with other tensors or into another pool; it runs on them a few times.

        Args:
            tensors: arguments of the run, like those of this graph.
            pool: to compute in.
            restore: puts back those that it writes.

        Raises:
            CaptureError: as of the class.
        """
        same = self._run, tensors, self._flags, self.written, self.device
        again = CapturedGraph(*same, draws=self._draws, restore=restore, pool=pool)
        again.lend(self.lent)
        if any(tensors[at] is static for at, static in self.static.items()):
            again._home = self._home  # that is where they go back to, whichever of the two is the last to have them
        return again

    def lend(self, places: frozenset[int]) -> None:
        """Hand out outputs at these places where they lie from now on, as far as they lie in memory of their own.

        The next turn of a graph in the same pool may overwrite them: a pool of its own lends until the next replay.
        """
        lent = places & self._lendable
        if lent != self.lent:
            self.lent, self._copy_out = lent, copier_out(self._outputs, self._handouts, lent)

    def fill(self, places: Sequence[int], tensors: Sequence[Tensor]) -> None:
        """Let static tensors hold what the arguments of a call at these places do, behind all turns so far."""
        with self.pool.lock:
            self.pool.begin_turn()
            copier([self.static[at] for at in places])([tensors[at] for at in places])

    def replay(self) -> None:
        """Replay on the current stream with what the static tensors hold, copying nothing and waiting for no turn."""
        if not self._draws:
            self._graph.replay()
            return
        with _turn_to_draw(torch.cuda.current_stream(self.device)):
            self._graph.replay()

    def __call__(self, *tensors: Tensor) -> list[Output]:
        """Copy inputs in, replay, copy outputs out: all asynchronous, on the device's current stream.

        Raises:
            Moved: a bound tensor is not where the graph reads it. Nothing that the caller can see has changed.
        """
        if not self.unmoved(tensors):
            raise Moved
        return self.launch(tensors)

    def launch(self, tensors: Sequence[Tensor]) -> list[Output]:
        """What a call does, for bound tensors that are known not to have moved, or whose move is found out later.

        What the graph reads must be there until it has been launched: in memory that has gone back to the driver, the
        device fails.
        """
        return self.launch_inputs(self._those_copied(tensors), tensors)

    def launch_inputs(self, inputs: Sequence[Tensor], tensors: Sequence[Tensor] = ()) -> list[Output]:
        """The same.

        Args:
            inputs: those of the arguments that are copied in, in order.
            tensors: all arguments; needed where inputs are written back, or outputs share memory with an argument.
        """
        if current_device() != self.device.index:
            with torch.cuda.device(self.device):
                return self.launch_inputs(inputs, tensors)
        pool = self.pool
        with pool.lock:
            pool.begin_turn()
            self._copy_in(inputs)
            self.replay()
            if self._returned:
                copier([tensors[index] for index in self._returned])([self.static[index] for index in self._returned])
            return self._copy_out(tensors)

    def unmoved(self, tensors: Sequence[Tensor]) -> bool:
        """Whether bound tensors lie where the graph reads them, in the way that they did."""
        return self._unmoved(self._those_bound(tensors))


@contextmanager
def _turn_to_draw(stream: torch.cuda.Stream) -> Iterator[None]:
    """Come after the last replay that drew: a generator tells all graphs their seed and offset in the same memory."""
    with _drawing:
        last = _drawn.setdefault(stream.device, stream)
        if last != stream:
            stream.wait_stream(last)
            _drawn[stream.device] = stream
        yield


def _at(places: Sequence[int]) -> Callable[[Sequence[Tensor]], Sequence[Tensor]]:
    """A function that picks what is at these places, which mostly follow each other."""
    first = places[0] if places else 0
    following = slice(first, first + len(places))
    return itemgetter(following) if list(places) == [*range(first, following.stop)] else itemgetter(*places)


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
