"""What an op costs on this device: each distinct op of a program timed alone, on the inputs that it really gets.

    known already, in these shapes, strides, dtypes and constants? ──▶ nothing to do
    else: Interpreter ──▶ op, its real inputs ──▶ time it alone ──▶ run it, go on

Where some op is not known, the program runs once, op by op. On CUDA an op is timed inside a small CUDA graph of several
copies of it, so that no launch by the host is part of the time; the graph also tells which kernels it launches. Its
inputs are then in the L2 cache. Where the program as a whole is too large for that cache (``locality.py``), the op is
timed once more behind a kernel that empties it. On the CPU the clock is read around a few calls.
"""

from __future__ import annotations

import functools
import math
import time
import warnings
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx import Interpreter, Node
from torch.fx.node import map_aggregate
from torch.utils._pytree import tree_leaves

from autostream.costs.locality import missed_share
from autostream.costs.occupancy import busy_share, kernels_of
from autostream.costs.records import Record
from autostream.costs.replay_time import replay_us
from autostream.costs.roofline import cost_of, fill, price
from autostream.frontend.settings import numerics
from autostream.ir import Costs, DeviceProfile, Op, OpCost, OpGraph, Placeholder, Program
from autostream.runtime.capture import capture
from autostream.runtime.restore import Restore
from autostream.runtime.streams import capture_stream
from autostream.store import key_of
from autostream.utils.kernels import Kernel
from autostream.utils.operators import written_names

Call = Callable[[], object]
Timer = Callable[[Call, Restore, float], Record]
"""Takes a call, what is to be put back before each, and the time that it is expected to take, µs; returns what was
measured, without what putting back takes.

``warm_us`` is its time with its inputs in the cache, ``cold_us`` without, as the clock says: where ``copies`` of it
were timed in one CUDA graph, with the edge that follows each, and the warm ones with a share of what the replay itself
takes. ``busy_share`` is the share of the multiprocessors that it keeps busy. What was not measured is absent.
"""

METHOD = 3
"""Grows when what is kept of a measurement changes its meaning, ``occupancy.py``'s formula included: older ones are of
no use then. What is derived from the device's profile is not kept, for a better profile may come."""

_REPLAY_US = 100.0
"""A replay at least this long hides the launch of the next one: that takes the host about 10 µs."""

_BEHIND_ANOTHER_US = 0.1
"""What a kernel takes longer behind another one than behind a copy of itself, whose code is at hand: seen on an H200,
where 26 models took so much longer for each of their kernels than these alone."""

_MAX_COPIES = 20
_COLD_COPIES = 3
_CPU_CALLS = 5
_CPU_CALL_BUDGET_S = 0.05


def measure(
    program: Program,
    graph: OpGraph,
    profile: DeviceProfile,
    args: Sequence[Tensor],
    known: Mapping[str, Record],
    budget_s: float,
) -> tuple[Costs, Mapping[str, Record]]:
    """Time every distinct op of a program on its device that has not been timed before.

    If there is any, the program runs once, without gradients, on the current stream; what it writes of ``args`` it
    writes to copies, and the generators' states are put back. An op keeps its estimate
    (:func:`~autostream.costs.roofline.price`) where it cannot be timed: it is of another device, cannot be captured on
    a GPU, has effects besides random numbers, fails when it is run alone, or comes when timing has already taken long.

    Args:
        program: what to run.
        graph: its ops.
        profile: of ``program.device``; its replay and its edge within a stream are taken off the times.
        args: one tensor per placeholder, in order, on their devices.
        known: what was measured before, by :func:`~autostream.store.key_of` each op.
        budget_s: once timing has taken this long, ops not yet seen keep their estimates.

    Returns:
        Op name to cost, in program order; ``source`` tells which costs were measured. And what was measured now, by
        key, to be known the next time.

    Raises:
        Exception: whatever the program itself raises when it runs.
    """
    missed = missed_share(graph, profile) if program.device != "cpu" else 0.0
    needed = {"warm_us", "cold_us"} if missed else {"warm_us"}
    settled = {key for key, record in known.items() if not record or needed <= record.keys()}
    keys, found = _expected_keys(program, graph), dict[str, Record]()
    if not settled.issuperset(keys.values()):
        measurement = _run(program, graph, profile, args, settled, budget_s, cold=missed > 0)
        keys, found = measurement.keys, measurement.found
    records, costs = {**known, **found}, dict(price(graph, profile))
    for name, key in keys.items():
        record = records.get(key, {})
        if "warm_us" in record:
            costs[name] = _cost(graph.ops[name], profile, record, missed)
    return costs, found


def _cost(op: Op, profile: DeviceProfile, record: Record, missed: float) -> OpCost:
    """An op's cost where this share of what it reads is not in the cache.

    What it takes longer for that, it waits: meanwhile the multiprocessors are there for others.
    """
    warm_us = _alone_us(record["warm_us"], record, profile, replays=1)
    cold_us = _alone_us(record["cold_us"], record, profile, replays=0) if "cold_us" in record else warm_us
    duration_us = warm_us + missed * max(0.0, cold_us - warm_us)
    busy = record.get("busy_share") or fill(op, profile)
    return cost_of(op, profile, duration_us, "measured", busy * (warm_us / duration_us if duration_us else 1.0))


def _alone_us(clock_us: float, record: Record, profile: DeviceProfile, *, replays: int) -> float:
    """What an op itself took of what the clock says, behind an op other than itself, µs."""
    if "copies" not in record:  # not in a CUDA graph
        return clock_us
    # Edges are known roughly; what they leave of a very short kernel should not be nothing.
    rest_us = clock_us - replays * profile.replay_us / record["copies"] - profile.same_stream_edge_us
    return max(rest_us, profile.kernel_us) + _BEHIND_ANOTHER_US


def _run(
    program: Program,
    graph: OpGraph,
    profile: DeviceProfile,
    args: Sequence[Tensor],
    settled: Collection[str],
    budget_s: float,
    *,
    cold: bool,
) -> _Measurement:
    """Run the program once and time what is not settled, with an empty cache as well if that is asked for."""
    cuda = program.device.startswith("cuda")
    random = torch.random.fork_rng(devices=[program.device] if cuda else [], device_type="cuda")
    # An op that launches nothing makes an empty graph, which torch warns of; the user cannot do anything about that.
    with torch.no_grad(), random, _current(program.device), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        timer = _GraphTimer(program.device, profile, cold=cold) if cuda else _time_calls
        measurement = _Measurement(program, graph, profile, timer, settled, budget_s)
        measurement.run(*_with_copies(program.placeholders, args, _written(graph)), enable_io_processing=False)
    return measurement


class _Measurement(Interpreter):
    """Runs a program op by op and times those that it has not seen yet.

    Attributes:
        keys: op name to the key of what it is; ops that are not timed have none.
        found: what was measured, by key; a record is empty where nothing can be.
    """

    def __init__(
        self,
        program: Program,
        graph: OpGraph,
        profile: DeviceProfile,
        timer: Timer,
        settled: Collection[str],
        budget_s: float,
    ) -> None:
        super().__init__(program.module, garbage_collect_values=True)
        self.keys: dict[str, str] = {}
        self.found: dict[str, Record] = {}
        self._ops = _timeable(graph)
        self._estimates = price(graph, profile)
        self._timer = timer
        self._settled = settled
        self._left_s = budget_s

    def run_node(self, n: Node) -> Any:
        """Time the node's op, then run the node."""
        op = self._ops.get(n.name)
        if op is not None:
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            key = self.keys[op.name] = _key(n.target, args, kwargs)
            if key not in self._settled and key not in self.found and self._left_s > 0:
                start = time.perf_counter()
                record = self._time(op, n, args, kwargs)
                if record == {}:  # another thread may have spoilt the capture, and what is found is kept for good
                    record = self._time(op, n, args, kwargs)
                if record is not None:
                    self.found[key] = record
                self._left_s -= time.perf_counter() - start
        return super().run_node(n)

    def _time(self, op: Op, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Record | None:
        call, given = getattr(self, node.op), tree_leaves((args, kwargs))
        try:
            if not op.writes <= op.allocates:
                args, kwargs = _on_copies(node.target, args, kwargs)
            copies = (new for new, old in zip(tree_leaves((args, kwargs)), given, strict=True) if new is not old)
            restore = Restore(filter(_may_count, copies))
            estimate_us = self._estimates[op.name].duration_us
            return self._timer(functools.partial(call, node.target, args, kwargs), restore, estimate_us)
        except torch.OutOfMemoryError:
            return None  # another time there may be more
        except Exception:
            # Whatever an op cannot do alone (take part in a capture, …), the estimate stands in.
            return {}


class _GraphTimer:
    """Times calls inside CUDA graphs, captured into a memory pool of their own.

    On the stream of all captures: a user's thread may be on any that ``torch.cuda.Stream()`` hands out, and what it
    launched there would be captured in the place of being run.
    """

    def __init__(self, device: str, profile: DeviceProfile, *, cold: bool) -> None:
        self._stream = capture_stream(device)
        self._multiprocessors = profile.multiprocessors
        self._kept: torch.cuda.CUDAGraph | None = None
        self._ballast: Tensor | None = None
        if cold:  # reading and writing this much leaves nothing else in the cache
            with torch.cuda.stream(self._stream):
                self._ballast = torch.zeros(2 * profile.cache_bytes, dtype=torch.uint8, device=device)

    def __call__(self, call: Call, restore: Restore, expected_us: float) -> Record:
        """Time one call."""
        # The inputs were enqueued on the caller's stream. The way back needs no wait: this returns when all is done.
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            record = self._warm(call, restore, expected_us)
            if record["warm_us"] * record["copies"] < _REPLAY_US / 2 and record["copies"] < _MAX_COPIES:
                record = self._warm(call, restore, record["warm_us"])
            if self._ballast is not None:
                before_us = self._behind_ballast_us(restore) if restore.spans else self._ballast_us
                record["cold_us"] = max(0.0, self._behind_ballast_us(_behind(restore, call)) - before_us)
        return record

    def _warm(self, call: Call, restore: Restore, expected_us: float) -> dict[str, float]:
        """What copies of a call take in one graph, and the share of the device that it keeps busy."""
        copies = min(_MAX_COPIES, math.ceil(_REPLAY_US / max(expected_us, 1.0)))
        once = _behind(restore, call)
        # A first run loads kernels and chooses algorithms, which no capture may.
        once()
        graph = self._captured(lambda: _repeat(once, copies))
        busy = max((busy_share(kernel, self._multiprocessors) for kernel in kernels_of(graph)), default=0.0)
        us = max(0.0, replay_us(graph) - self._restoring_us(restore, copies)) / copies
        return {"warm_us": us, "copies": copies} | ({"busy_share": busy} if busy else {})

    def _restoring_us(self, restore: Restore, copies: int) -> float:
        """What putting back so often takes of a replay, µs: what it takes longer to do it twice as often."""
        if not restore.spans:
            return 0.0
        once, twice = (
            replay_us(self._captured(functools.partial(_repeat, restore, count))) for count in (copies, 2 * copies)
        )
        return twice - once

    def _behind_ballast_us(self, call: Call) -> float:
        """What a call takes that finds nothing in the cache, with the ballast that sees to it, µs."""
        assert self._ballast is not None
        ballast = self._ballast

        def once() -> None:
            ballast.add_(1)
            call()

        return replay_us(self._captured(lambda: _repeat(once, _COLD_COPIES))) / _COLD_COPIES

    @functools.cached_property
    def _ballast_us(self) -> float:
        return self._behind_ballast_us(lambda: None)

    def _captured(self, run: Call) -> torch.cuda.CUDAGraph:
        graph, _ = capture(run, self._stream, self._kept and self._kept.pool(), keep_nodes=True)
        # A pool lives as long as a graph of it does: the first one is kept, so that all use the same memory.
        self._kept = self._kept or graph
        return graph


def _repeat(call: Call, copies: int) -> None:
    for _ in range(copies):
        call()


def _behind(restore: Restore, call: Call) -> Call:
    """A call on what it was given the first time."""

    def once() -> None:
        restore()
        call()

    return once if restore.spans else call


def _time_calls(call: Call, restore: Restore, expected_us: float) -> Record:
    """The least time of a few calls on the CPU, for others only ever make one longer; one long call is enough."""
    _behind(restore, call)()
    times_s: list[float] = []
    while len(times_s) < _CPU_CALLS and sum(times_s) < _CPU_CALL_BUDGET_S:
        restore()
        start = time.perf_counter()
        call()
        times_s.append(time.perf_counter() - start)
    return {"warm_us": 1e6 * min(times_s)}


def _current(device: str) -> AbstractContextManager[object]:
    return torch.cuda.device(device) if device.startswith("cuda") else nullcontext()


def _timeable(graph: OpGraph) -> dict[str, Op]:
    return {name: op for name, op in graph.ops.items() if _is_timeable(op, graph.device)}


def _is_timeable(op: Op, device: str) -> bool:
    """Whether an op can be repeated: a collective needs its peers, and what has unknown effects must happen once."""
    capturable = device == "cpu" or not op.uncapturable
    return op.device == device and capturable and op.orders <= {"rng"}


def _expected_keys(program: Program, graph: OpGraph) -> dict[str, str]:
    """The keys of a program's ops by the values that tracing gave its nodes; ``""`` where they do not tell."""
    timeable, keys = _timeable(graph), dict[str, str]()
    for node in program.module.graph.nodes:
        if node.name in timeable:
            given = [source.meta for source in node.all_input_nodes]
            traced = all("val" in meta and _is_concrete(meta["val"]) for meta in given)
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: source.meta.get("val"))
            keys[node.name] = _key(node.target, args, kwargs) if traced else ""
    return keys


def _key(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """What an op's time depends on: the kernel, layouts and dtypes of tensors, everything else by value, settings."""
    kernel = target.content if isinstance(target, Kernel) and target.content else str(target)
    settings = repr((numerics(), torch.get_num_threads()))
    return key_of(kernel, _content(args), _content(kwargs), settings)


def _is_concrete(value: object) -> bool:
    """Whether sizes are numbers, not symbols for what data will tell."""
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return all(isinstance(size, int) for tensor in tensors for size in (*tensor.shape, *tensor.stride()))


def _content(value: object) -> Hashable:
    if isinstance(value, Tensor):
        return ("tensor", tuple(value.shape), value.stride(), str(value.dtype), value.device.type)
    if isinstance(value, list | tuple):
        return tuple(_content(item) for item in value)
    if isinstance(value, Mapping):
        return tuple((name, _content(item)) for name, item in sorted(value.items()))
    return repr(value)


def _on_copies(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a call that writes some of them, with copies of those; of all if its schema does not say which.

    ``aten::batch_norm`` is one that does not: it writes running statistics which its schema declares as read.
    """
    if isinstance(target, Kernel):
        return tuple(_copied(arg) if at in target.written else arg for at, arg in enumerate(args)), kwargs
    written = written_names(target) if isinstance(target, OpOverload) else ()
    if not written:
        return _copied(args), _copied(kwargs)
    names = (argument.name for argument in target._schema.arguments)
    fresh = tuple(_copied(arg) if name in written else arg for name, arg in zip(names, args, strict=False))
    return fresh, {name: _copied(arg) if name in written else arg for name, arg in kwargs.items()}


def _may_count(copy: Tensor) -> bool:
    """Whether an op that writes a tensor again and again may come to an index that there is none of.

    A fused kernel may count up a position and use it. Many numbers that are no integers are weights and activations,
    whose time would be lost in that of putting them back.
    """
    return not (copy.is_floating_point() or copy.is_complex()) or copy.numel() <= _FEW


_FEW = 64
"""Elements."""


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
