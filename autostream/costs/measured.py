"""What an op costs on this device: each distinct op of a program timed alone, on the inputs that it really gets.

    Interpreter ──▶ op, its real inputs ──▶ seen before? ──▶ time it alone ──▶ run it, go on
                                            (same target, shapes, strides, dtypes, constants)

The program runs once, op by op. On CUDA an op is timed inside a small CUDA graph of several copies of it, so that no
launch by the host is part of the time; its inputs are then as warm in the L2 cache as if their producer had just run.
On the CPU the clock is read around a few calls.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
import warnings
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.fx import Interpreter, Node
from torch.fx.node import map_aggregate

from autostream.costs.device import multiprocessor_of
from autostream.costs.occupancy import share_filled
from autostream.costs.roofline import cost_of, price
from autostream.execution.capture import capture
from autostream.execution.streams import capture_stream
from autostream.ir import Costs, DeviceProfile, Op, OpGraph, Placeholder, Program
from autostream.kernels import Kernel

Call = Callable[[], object]
Timer = Callable[[Call, float], float]
"""Takes a call and the time that it is expected to take, µs; returns the time that it took, µs."""

_BUDGET_S = 8.0
"""Once timing has taken this long, ops not yet seen keep their estimates: a report is not worth waiting longer for."""

_REPLAY_US = 100.0
"""A replay at least this long hides the launch of the next one: that takes the host about 10 µs."""

_MAX_COPIES = 20
_REPLAYS = 5
_CPU_CALLS = 5
_CPU_CALL_BUDGET_S = 0.05


def measure(program: Program, graph: OpGraph, profile: DeviceProfile, args: Sequence[Tensor]) -> Costs:
    """Time every distinct op of a program on its device.

    The program runs once, without gradients, on the current stream; what it writes of ``args`` it writes to copies, and
    the generators' states are put back. An op keeps its estimate (:func:`~autostream.costs.roofline.price`) where it
    cannot be timed: it is of another device, cannot be captured on a GPU, has effects besides random numbers, fails
    when it is run alone, or comes when timing has already taken long.

    Args:
        program: what to run.
        graph: its ops.
        profile: of ``program.device``; its gap between kernels is taken off the times.
        args: one tensor per placeholder, in order, on their devices.

    Returns:
        Op name to cost, in program order; ``source`` tells which costs were measured.

    Raises:
        Exception: whatever the program itself raises when it runs.
    """
    cuda = program.device.startswith("cuda")
    random = torch.random.fork_rng(devices=[program.device] if cuda else [], device_type="cuda")
    # An op that launches nothing makes an empty graph, which torch warns of; the user cannot do anything about that.
    with torch.no_grad(), random, _current(program.device), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        timer = _GraphTimer(program.device, profile.same_stream_edge_us) if cuda else _time_calls
        measurement = _Measurement(program, graph, profile, timer)
        measurement.run(*_with_copies(program.placeholders, args, _written(graph)), enable_io_processing=False)
    return measurement.costs


class _Measurement(Interpreter):
    """Runs a program op by op and times those that it has not seen yet.

    Attributes:
        costs: the result: estimates, replaced by measurements one by one.
    """

    def __init__(self, program: Program, graph: OpGraph, profile: DeviceProfile, timer: Timer) -> None:
        super().__init__(program.module, garbage_collect_values=True)
        self.costs = dict(price(graph, profile))
        self._ops = {name: op for name, op in graph.ops.items() if _is_timeable(op, graph.device)}
        self._profile = profile
        self._timer = timer
        self._durations: dict[Hashable, float | None] = {}
        self._spent_s = 0.0

    def run_node(self, n: Node) -> Any:
        """Time the node's op, then run the node."""
        op = self._ops.get(n.name)
        if op is not None:
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            duration_us = self._duration(op, n, args, kwargs)
            if duration_us is not None:
                share = _share_filled(n.target, args, op.device, self._profile)
                self.costs[op.name] = cost_of(op, self._profile, duration_us, "measured", share)
        return super().run_node(n)

    def _duration(self, op: Op, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float | None:
        """µs, or ``None`` where the op cannot be timed or there is no time left."""
        key = (op.target, _signature(args), _signature(kwargs))
        if key not in self._durations:
            if self._spent_s > _BUDGET_S:
                return None
            start = time.perf_counter()
            self._durations[key] = self._time(op, node, args, kwargs)
            self._spent_s += time.perf_counter() - start
        return self._durations[key]

    def _time(self, op: Op, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float | None:
        call = getattr(self, node.op)
        try:
            if not op.writes <= op.allocates:
                args, kwargs = _on_copies(node.target, args, kwargs)
            return self._timer(functools.partial(call, node.target, args, kwargs), self.costs[op.name].duration_us)
        except Exception:
            # Whatever an op cannot do alone (not enough memory for a copy, no capture, …), the estimate stands in.
            return None


class _GraphTimer:
    """Times calls inside CUDA graphs, captured into a memory pool of their own.

    On the stream of all captures: a user's thread may be on any that ``torch.cuda.Stream()`` hands out, and what it
    launched there would be captured in the place of being run.
    """

    def __init__(self, device: str, gap_us: float) -> None:
        self._stream = capture_stream(device)
        self._gap_us = gap_us
        self._kept: torch.cuda.CUDAGraph | None = None

    def __call__(self, call: Call, expected_us: float) -> float:
        """Time one call without the gap that follows it, µs."""
        # The inputs were enqueued on the caller's stream. The way back needs no wait: this returns when all is done.
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            each_us, copies = self._time(call, expected_us)
            if each_us * copies < _REPLAY_US / 2 and copies < _MAX_COPIES:
                each_us, _ = self._time(call, each_us)
        # The gap is known roughly; what it leaves of a very short kernel should not be nothing.
        return max(each_us - self._gap_us, each_us / 2)

    def _time(self, call: Call, expected_us: float) -> tuple[float, int]:
        copies = min(_MAX_COPIES, math.ceil(_REPLAY_US / max(expected_us, 1.0)))
        # A first run loads kernels and chooses algorithms, which no capture may.
        call()
        graph, _ = capture(lambda: _repeat(call, copies), self._stream, self._kept and self._kept.pool())
        # A pool lives as long as a graph of it does: the first one is kept, so that all use the same memory.
        self._kept = self._kept or graph
        return _replay_us(graph) / copies, copies


def _repeat(call: Call, copies: int) -> None:
    for _ in range(copies):
        call()


def _replay_us(graph: torch.cuda.CUDAGraph) -> float:
    """The median time of a replay on the current stream, µs; the first is not counted: it uploads the graph."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(_REPLAYS + 1)]  # type: ignore[no-untyped-call]
    for event in events:
        graph.replay()
        event.record()
    events[-1].synchronize()
    times_ms: list[float] = [before.elapsed_time(after) for before, after in itertools.pairwise(events)]
    return 1e3 * median(times_ms)


def _time_calls(call: Call, expected_us: float) -> float:
    """The median time of a few calls on the CPU, µs; one long call is enough."""
    call()
    times_s: list[float] = []
    while len(times_s) < _CPU_CALLS and sum(times_s) < _CPU_CALL_BUDGET_S:
        start = time.perf_counter()
        call()
        times_s.append(time.perf_counter() - start)
    return 1e6 * median(times_s)


def _current(device: str) -> AbstractContextManager[object]:
    return torch.cuda.device(device) if device.startswith("cuda") else nullcontext()


def _share_filled(target: Any, args: tuple[Any, ...], device: str, profile: DeviceProfile) -> float | None:
    """Of the multiprocessors, where the call is a kernel's that says what its launch takes."""
    footprint = target.footprint(*args) if isinstance(target, Kernel) else None
    if footprint is None:
        return None
    return share_filled(footprint, multiprocessor_of(device), profile.multiprocessors)


def _is_timeable(op: Op, device: str) -> bool:
    """Whether an op can be repeated: a collective needs its peers, and what has unknown effects must happen once."""
    capturable = device == "cpu" or not op.uncapturable
    return op.device == device and capturable and op.orders <= {"rng"}


def _signature(value: object) -> Hashable:
    """What an op's time depends on: layout and dtype of tensors, and everything else by value."""
    if isinstance(value, Tensor):
        return ("tensor", tuple(value.shape), value.stride(), str(value.dtype), str(value.device))
    if isinstance(value, list | tuple):
        return tuple(_signature(item) for item in value)
    if isinstance(value, dict):
        return tuple((name, _signature(item)) for name, item in sorted(value.items()))
    return repr(value)


def _on_copies(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a call that writes some of them, with copies of those; of all if its schema does not say which.

    ``aten::batch_norm`` is one that does not: it writes running statistics which its schema declares as read.
    """
    if isinstance(target, Kernel):
        return tuple(_copied(arg) if at in target.written else arg for at, arg in enumerate(args)), kwargs
    schema = getattr(target, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    written = {argument.name for argument in schema.arguments if _is_written(argument)} if schema is not None else set()
    if not written:
        return _copied(args), _copied(kwargs)
    fresh = tuple(_copied(arg) if name in written else arg for name, arg in zip(names, args, strict=False))
    return fresh, {name: _copied(arg) if name in written else arg for name, arg in kwargs.items()}


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _copied(value: Any) -> Any:
    return map_aggregate(value, lambda leaf: _copied_tensor(leaf) if isinstance(leaf, Tensor) else leaf)


def _copied_tensor(tensor: Tensor) -> Tensor:
    """A copy with the same strides, which ``clone`` does not keep where there are gaps or overlaps."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    extent = 1 + sum((size - 1) * stride for size, stride in steps) if tensor.numel() else 0
    return tensor.as_strided((extent,), (1,)).clone().as_strided(tensor.shape, tensor.stride())


def _written(graph: OpGraph) -> frozenset[str]:
    """Names of the storages that some op writes."""
    return frozenset[str]().union(*(op.writes for op in graph.ops.values()))


def _with_copies(
    placeholders: Iterable[Placeholder], args: Sequence[Tensor], written: frozenset[str]
) -> tuple[Tensor, ...]:
    """The arguments, with those whose storage is written replaced by copies that share memory where they did."""
    copies: dict[int, torch.UntypedStorage] = {}
    return tuple(
        _moved(arg, copies) if placeholder.storage in written else arg
        for placeholder, arg in zip(placeholders, args, strict=True)
    )


def _moved(tensor: Tensor, copies: dict[int, torch.UntypedStorage]) -> Tensor:
    """The same view of a copy of its storage; copies are made once per address."""
    storage = tensor.untyped_storage()
    if storage.data_ptr() not in copies:
        copies[storage.data_ptr()] = storage.clone()  # type: ignore[no-untyped-call]
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(copies[storage.data_ptr()], tensor.storage_offset(), tensor.shape, tensor.stride())
