"""Runs a lowered graph on emulated streams, without a GPU: in a hostile order for tests, or in threads on a CPU.

Each lane is a queue of steps. The host walks the graph and only enqueues steps::

    host ──▶ lane 0:  record forked │ relu │ wait linear_done │ add │ free relu │ output
        └──▶ lane 1:  wait forked │ linear │ record linear_done

:func:`run_interleaved` executes the queues in an order that the waits allow and that exposes missing waits: the result
is wrong in every run, while a GPU would be right most of the time. :class:`ThreadedProgram` executes them concurrently,
one thread for each lane.
"""

from __future__ import annotations

import operator
import os
import random
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map_only

from autostream.runtime import arena, streams
from autostream.runtime.lower import storages_of

aten = torch.ops.aten

_NEW_MEMORY = frozenset(
    {
        *(aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default),
        *(aten.new_empty.default, aten.new_empty_strided.default, arena.reserve),
    }
)
"""Ops whose results are uninitialized memory, which could hold the right values by chance."""

Values = dict[str, Any]
"""The value of each node that has run, by name."""


@dataclass(frozen=True, slots=True)
class Compute:
    """Call ``function`` on the args and kwargs that ``read`` takes from the values, and keep the result as ``name``."""

    name: str
    function: Callable[..., Any]
    read: Callable[[Values], tuple[Sequence[Any], Mapping[str, Any]]]

    def __call__(self, values: Values) -> None:
        """Compute the value."""
        args, kwargs = self.read(values)
        values[self.name] = self.function(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class Record:
    """Record ``event``."""

    event: str


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait until ``event`` is recorded."""

    event: str


@dataclass(frozen=True, slots=True)
class Free:
    """Drop ``holders``, the values that share a storage, so that later steps of this lane may reuse its memory."""

    holders: tuple[str, ...]

    def __call__(self, values: Values) -> None:
        """Drop them."""
        for holder in self.holders:
            values.pop(holder, None)


Step = Compute | Record | Wait | Free


@dataclass(frozen=True, slots=True)
class Queues:
    """All steps that the host enqueues in one run.

    Attributes:
        inputs: names of the run's inputs.
        constants: the module's attributes, such as the submodules of higher-order ops.
        fakes: by name, fake tensors with a value's metadata.
        lanes: the steps of each lane; the last step of lane 0 computes the results.
        result: the name of the tuple of results.
    """

    inputs: tuple[str, ...]
    constants: Mapping[str, Any]
    fakes: Mapping[str, Any]
    lanes: tuple[tuple[Step, ...], ...]
    result: str


def enqueue(lowered: fx.GraphModule) -> Queues:
    """Enqueue the steps of a lowered graph.

    A storage is freed where the generated code drops the last value that holds it, in the queue of the lane that
    allocated it, as the caching allocator does. Storages of inputs and results are never freed.

    Args:
        lowered: what :func:`~autostream.runtime.lower.lower` returned; its nodes have fake tensors in ``meta["val"]``
            that share a storage exactly where the real ones do.
    """
    lanes: dict[int, list[Step]] = defaultdict(list)
    allocated_on: dict[str, int] = {}
    frees, unused = _frees(lowered.graph), _unused_views(lowered.graph)
    current = 0
    for node in lowered.graph.nodes:
        if node in unused:
            pass
        elif node.target is streams.use:
            current = node.args[1]
        elif node.target is streams.record:
            lanes[node.args[1]].append(Record(node.name))
        elif node.target is streams.wait:
            lanes[node.args[1]].append(Wait(node.args[2].name))
        elif node.op == "output":
            lanes[0].append(Compute(node.name, tuple, _reader((node.args, {}))))
        elif node.op == "call_function" and node.target not in (streams.fork, streams.release):
            lanes[current].append(Compute(node.name, node.target, _reader((node.args, node.kwargs))))
        allocated_on[node.name] = current
        for free in frees.get(node.name, ()):
            lanes[allocated_on[free.holders[0]]].append(free)
    return Queues(
        inputs=tuple(node.name for node in lowered.graph.find_nodes(op="placeholder")),
        constants={n.name: operator.attrgetter(n.target)(lowered) for n in lowered.graph.find_nodes(op="get_attr")},
        fakes={node.name: node.meta.get("val") for node in lowered.graph.nodes},
        lanes=tuple(tuple(lanes[lane]) for lane in range(max(lanes) + 1)),
        result=lowered.graph.output_node().name,
    )


def run_interleaved(lowered: fx.GraphModule, args: Sequence[Tensor], seed: int) -> tuple[Tensor, ...]:
    """Run a lowered graph in an order that its waits allow and that exposes every missing wait.

    One lane, ``seed % lanes``, is the victim. It runs ahead to its end, while the others run only what its waits need.
    So an op of the victim that is not ordered after another lane's op runs before that, and

    - reads memory that is not written yet: NaN, -1 or ``True``, or
    - overwrites memory that the other op has yet to read, or
    - frees memory that the other op has yet to use, and that then holds NaN, -1 or ``True``.

    The results, and the contents of ``args`` afterwards, are those that the caller's stream would see after the join.
    Seeds from the number of lanes on first run random lanes for a few steps at a time.

    Args:
        lowered: what :func:`~autostream.runtime.lower.lower` returned.
        args: the tensors of the program's placeholders, on the CPU; they may be written.
        seed: which order, from 0.
    """
    queues = enqueue(lowered)
    # The caller's stream has computed the inputs before the fork.
    inputs_first = [
        Compute(name, lambda tensor: tensor, _reader(((arg,), {})))
        for name, arg in zip(queues.inputs, args, strict=True)
    ]
    caller, *sides = queues.lanes
    memory = _Memory(queues)
    with torch.no_grad():
        for step in _hostile_order([(*inputs_first, *caller), *sides], seed):
            if isinstance(step, (Compute, Free)):
                step(memory)
            if isinstance(step, Compute) and step.function in _NEW_MEMORY:
                _poison(memory[step.name])
            if step is caller[-1]:
                results = tuple(tensor.clone() for tensor in memory[queues.result])
                inputs = [(contents, contents.clone()) for contents in map(_bytes, args)]
        for contents, saved in inputs:
            contents.copy_(saved)
    return results


class ThreadedProgram:
    """Runs the lanes of a lowered graph concurrently on the CPU: lane 0 in the calling thread, others in their own.

    Several threads may call it at once. All lanes have the caller's grad mode, inference mode and autocast. Storages
    are freed where the schedule releases them. Threads are reused by later calls and end with this object.

    Args:
        lowered: what :func:`~autostream.runtime.lower.lower` returned.
    """

    def __init__(self, lowered: fx.GraphModule) -> None:
        self._queues = enqueue(lowered)
        self._events = [step.event for lane in self._queues.lanes for step in lane if isinstance(step, Record)]
        self._process, self._threads = os.getpid(), _pool()

    def __call__(self, *args: Tensor) -> tuple[Tensor, ...]:
        """Run once.

        Args:
            args: the tensors of the program's placeholders.

        Raises:
            BaseException: the first error of an op. All lanes have ended by then.
        """
        if os.getpid() != self._process:  # threads do not survive a fork
            self._process, self._threads = os.getpid(), _pool()
        queues = self._queues
        values = dict(queues.constants) | dict(zip(queues.inputs, args, strict=True))
        run = _ThreadedRun(values, {event: threading.Event() for event in self._events}, _modes())
        caller, *sides = queues.lanes
        lanes: list[Future[None]] = []
        try:
            for lane in sides:
                lanes.append(self._threads.submit(run.execute, lane))
            run.execute(caller)
            wait(lanes)
        except BaseException as interruption:  # Ctrl-C may come between ops
            run.stop(interruption)
            wait(lanes)
            raise
        if run.failures:
            raise run.failures.pop(0)  # popped: a reference cycle would keep the exception and all values alive
        results: tuple[Tensor, ...] = run.values[queues.result]
        return results


def _pool() -> ThreadPoolExecutor:
    """A pool that starts a thread whenever none is idle: lanes wait for each other, so none may wait for a thread."""
    return ThreadPoolExecutor(max_workers=1 << 20, thread_name_prefix="autostream-lane")


@dataclass(frozen=True, slots=True)
class _ThreadedRun:
    values: Values
    events: Mapping[str, threading.Event]
    modes: Callable[[], AbstractContextManager[None]]
    failures: list[BaseException] = field(default_factory=list)

    def execute(self, lane: Sequence[Step]) -> None:
        """Run one lane to its end, or until another lane fails."""
        try:
            with self.modes():
                self._execute(lane)
        except BaseException as failure:
            self.stop(failure)

    def stop(self, failure: BaseException) -> None:
        """End every lane at its next wait, as events of a lane that has stopped are not recorded."""
        self.failures.append(failure)
        for event in self.events.values():
            event.set()

    def _execute(self, lane: Sequence[Step]) -> None:
        for step in lane:
            match step:
                case Compute() | Free():
                    step(self.values)
                case Record(event):
                    self.events[event].set()
                case Wait(event):
                    self.events[event].wait()
                    if self.failures:
                        return


def _modes() -> Callable[[], AbstractContextManager[None]]:
    """A context manager that sets the calling thread's modes in another thread."""
    inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
    autocast, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    threads = torch.get_num_threads()

    @contextmanager
    def entered() -> Iterator[None]:
        # OpenMP's number of threads is a setting of each thread, and results of a matmul depend on it.
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        with (
            torch.inference_mode(inference),
            torch.set_grad_enabled(grad),
            torch.autocast("cpu", dtype, autocast, cache_enabled=False),
        ):
            yield

    return entered


class _Memory(Values):
    """Values, which are garbage before a step has written them and after they were freed."""

    def __init__(self, queues: Queues) -> None:
        super().__init__(queues.constants)
        self._fakes = queues.fakes

    def __missing__(self, name: str) -> Any:
        return tree_map_only(Tensor, _garbage, self._fakes[name])


def _garbage(fake: Tensor) -> Tensor:
    tensor = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype)
    _poison(tensor)
    return tensor


def _poison(tensor: Tensor) -> None:
    """Set all bits of a storage: NaN of any floating-point type, -1, or ``True``."""
    _bytes(tensor).fill_(1 if tensor.dtype is torch.bool else 0xFF)


def _bytes(tensor: Tensor) -> Tensor:
    """The whole storage of a tensor, as bytes."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def _hostile_order(lanes: Sequence[Sequence[Step]], seed: int) -> Iterator[Step]:
    """All steps, in the order of each lane, and each wait after the record of its event."""
    recorded = {s.event: (lane, at) for lane, q in enumerate(lanes) for at, s in enumerate(q) if isinstance(s, Record)}
    done = [0] * len(lanes)

    def advance(lane: int, end: int) -> Iterator[Step]:
        while done[lane] < min(end, len(lanes[lane])):
            step = lanes[lane][done[lane]]
            if isinstance(step, Wait):
                source, position = recorded[step.event]
                yield from advance(source, position + 1)
            done[lane] += 1
            yield step

    if seed >= len(lanes):
        choose = random.Random(seed)
        for _ in range(sum(map(len, lanes))):
            lane = choose.randrange(len(lanes))
            yield from advance(lane, done[lane] + choose.randint(1, 4))
    for lane in (seed % len(lanes), *range(len(lanes))):
        yield from advance(lane, len(lanes[lane]))


def _frees(graph: fx.Graph) -> Mapping[str, Sequence[Free]]:
    """By node, the storages whose last value the generated code drops after it: after its last use, if it has one."""
    position = {node: index for index, node in enumerate(graph.nodes)}
    holders: dict[int, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        for storage in filter(None, storages_of(node)):  # values without one live until the end of the run
            holders[storage].append(node)
    frees: dict[str, list[Free]] = defaultdict(list)
    for nodes in holders.values():
        if any(node.target in (arena.reserve, arena.place) for node in nodes):
            continue  # the arena lives as long as the run
        last = max((user for node in nodes for user in (node, *node.users)), key=position.__getitem__)
        if last.op != "output" and not any(node.op in ("placeholder", "get_attr") for node in nodes):
            names = tuple(dict.fromkeys(node.name for node in nodes))
            frees[last.name].append(Free(names))
    return frees


def _unused_views(graph: fx.Graph) -> set[fx.Node]:
    """Views without users. They launch nothing, so no wait keeps another lane from freeing their storage before."""
    first: dict[int, fx.Node] = {}
    for node in graph.nodes:
        for storage in filter(None, storages_of(node)):
            first.setdefault(storage, node)
    unused: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        used = any(user not in unused and user.target is not streams.release for user in node.users)
        storages = [*filter(None, storages_of(node))] if _only_reads(node) and not used else []
        if storages and all(first[storage] is not node for storage in storages):
            unused.add(node)
    return unused


def _only_reads(node: fx.Node) -> bool:
    target = node.target
    return target is operator.getitem or (isinstance(target, torch._ops.OpOverload) and not target._schema.is_mutable)


def _reader(argument: Any) -> Callable[[Values], Any]:
    """A function that takes an fx argument's nodes from the values."""
    nodes: list[fx.Node] = []
    fx.map_arg(argument, nodes.append)
    if isinstance(argument, fx.Node):
        return operator.itemgetter(argument.name)
    if not nodes:
        return lambda values: argument
    if isinstance(argument, dict):
        by_key = {key: _reader(item) for key, item in argument.items()}
        return lambda values: {key: read(values) for key, read in by_key.items()}
    readers, kind = [_reader(item) for item in argument], tuple if isinstance(argument, tuple) else list
    return lambda values: kind([read(values) for read in readers])
