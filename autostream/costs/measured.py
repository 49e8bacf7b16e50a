"""Measures the cost of ops on the device: times each distinct op of a program alone, on its real inputs.

    all ops measured before, in these shapes, strides, dtypes and constants? ──▶ nothing to do
    else: run the program in an Interpreter; for each op: inputs ──▶ time it alone ──▶ run it

On CUDA an op is timed in a small CUDA graph of several copies of it, so that the time includes no launch by the host;
the graph also tells which kernels the op launches. Its inputs are then in the L2 cache. If the program as a whole is
too large for that cache (``locality.py``), the op is also timed behind a kernel that evicts everything from it. On the
CPU the clock is read around a few calls.
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
from autostream.costs.roofline import WAIT, cost_of, fill, price
from autostream.frontend.settings import numerics
from autostream.ir import Costs, DeviceProfile, Op, OpCost, OpGraph, Placeholder, Program
from autostream.runtime.capture import capture
from autostream.runtime.restore import Restore
from autostream.runtime.small_fills import fill_by_kernels
from autostream.runtime.streams import capture_stream
from autostream.store import key_of
from autostream.utils.kernels import Kernel
from autostream.utils.operators import written_names

Call = Callable[[], object]
Timer = Callable[[Call, Restore, float], Record]
"""Takes a call, the memory to restore before each run of it, and the time that it is expected to take, µs. Returns its
measured times, without the time that restoring takes.

``warm_us`` is the time with the inputs in the cache, ``cold_us`` without. If ``copies`` of the call were timed in one
CUDA graph, both include the edge behind each copy, and ``warm_us`` a share of the overhead of the replay.
``busy_share`` is the share of the multiprocessors that it keeps busy. A number that was not measured is absent.
"""

METHOD = 4
"""Version of the method of measuring, part of the cache's key: increase it when the meaning of a record changes, or the
formula in ``occupancy.py``. Numbers derived from the device's profile are not in records: the profile may improve."""

_REPLAY_US = 100.0
"""A replay at least this long hides the launch of the next one, which takes the host about 10 µs."""

_OTHER_KERNEL_US = 0.1
"""How much longer a kernel takes behind another kernel than behind a copy of itself, whose code is in the instruction
cache: on an H200, 26 models took so much longer per kernel than the sum of their kernels timed alone."""

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

    If there is any, the program runs once, as by :func:`run_alone`. Some ops cannot be timed and keep their estimates
    (:func:`~autostream.costs.roofline.price`): ops on another device, ops that cannot be captured on a GPU, ops with
    effects besides random numbers, ops that fail when run alone, and ops behind the end of the budget.

    Args:
        program: the program.
        graph: its ops.
        profile: of ``program.device``; the overhead of its replays and its edges are subtracted from the times.
        args: one tensor per placeholder, in order, on their devices.
        known: records of earlier measurements, by :func:`~autostream.store.key_of` each op.
        budget_s: once timing has taken this long, the remaining ops keep their estimates.

    Returns:
        Op name to cost, in program order; ``source`` tells which costs were measured. And the records measured now, by
        key, for the cache.

    Raises:
        Exception: any error of the program itself.
    """
    missed = missed_share(graph, profile) if program.device != "cpu" else 0.0
    needed = {"warm_us", "cold_us"} if missed else {"warm_us"}
    complete = {key for key, record in known.items() if not record or needed <= record.keys()}
    keys, measured = _expected_keys(program, graph), dict[str, Record]()
    if not complete.issuperset(keys.values()):
        measurement = _run(program, graph, profile, args, complete, budget_s, cold=missed > 0)
        keys, measured = measurement.keys, measurement.records
    records, costs = {**known, **measured}, dict(price(graph, profile))
    for name, key in keys.items():
        record = records.get(key, {})
        if "warm_us" in record:
            costs[name] = _cost(graph.ops[name], profile, record, missed)
    return costs, measured


def _cost(op: Op, profile: DeviceProfile, record: Record, missed: float) -> OpCost:
    """The cost of an op if this share of its reads misses the cache.

    The additional time is spent waiting for memory, and leaves the multiprocessors to other ops.
    """
    warm_us = _alone_us(record["warm_us"], record, profile, replays=1)
    cold_us = _alone_us(record["cold_us"], record, profile, replays=0) if "cold_us" in record else warm_us
    duration_us = warm_us + missed * max(0.0, cold_us - warm_us)
    busy = record.get("busy_share") or fill(op, profile)
    return cost_of(op, profile, duration_us, "measured", busy * (warm_us / duration_us if duration_us else 1.0))


def _alone_us(clock_us: float, record: Record, profile: DeviceProfile, *, replays: int) -> float:
    """The time of an op without edges and the overhead of replays, behind another op, µs."""
    if "copies" not in record:  # not timed in a CUDA graph
        return clock_us
    # The edge is known roughly: a very short kernel must not come out as 0.
    rest_us = clock_us - replays * profile.replay_us / record["copies"] - profile.same_stream_edge_us
    return max(rest_us, profile.kernel_us) + _OTHER_KERNEL_US


def _run(
    program: Program,
    graph: OpGraph,
    profile: DeviceProfile,
    args: Sequence[Tensor],
    complete: Collection[str],
    budget_s: float,
    *,
    cold: bool,
) -> _Measurement:
    """Run the program once and time the ops without a complete record; if ``cold``, with an empty cache as well."""
    timer = _time_calls if program.device == "cpu" else _GraphTimer(program.device, profile, cold=cold)
    measurement = _Measurement(program, graph, profile, timer, complete, budget_s)
    run_alone(program, graph, args, measurement)
    return measurement


def run_alone(program: Program, graph: OpGraph, args: Sequence[Tensor], run: _Alone | None = None) -> None:
    """Run a program once, without gradients, on the current stream.

    It mutates copies of ``args``, and the states of random generators are restored. Collectives, for which other
    processes would have to be there, are not run: what is behind them gets other values.

    Args:
        program: the program.
        graph: its ops.
        args: one tensor per placeholder, in order, on their devices.
        run: runs the nodes.

    Raises:
        Exception: any error of the program itself.
    """
    run = run or _Alone(program.module, graph.collectives)
    cuda = program.device.startswith("cuda")
    random = torch.random.fork_rng(devices=[program.device] if cuda else [], device_type="cuda")
    # An op that launches nothing makes an empty graph, for which torch warns; the user can do nothing about it.
    with torch.no_grad(), random, _current(program.device), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run.run(*_with_copies(program.placeholders, args, _written(graph)), enable_io_processing=False)


class _Alone(Interpreter):
    """Runs a program op by op in one process: its collectives are not run, and what is behind them gets other values.

    Args:
        module: of the program.
        collectives: the names of its collectives.
    """

    def __init__(self, module: fx.GraphModule, collectives: Collection[str]) -> None:
        super().__init__(module, garbage_collect_values=True)
        self._collectives = collectives

    def run_node(self, n: Node) -> Any:
        """Run a node."""
        return self._unshared(n) if n.name in self._collectives else super().run_node(n)

    def _unshared(self, collective: Node) -> Any:
        """What a collective returns, as if nothing came from other processes: what it writes, or zeros."""
        target: Any = collective.target
        args, kwargs = self.fetch_args_kwargs_from_env(collective)
        names = (argument.name for argument in target._schema.arguments)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        for written in written_names(target):
            return given[written]
        return map_aggregate(collective.meta["val"], _zeros_like)


class _Measurement(_Alone):
    """Times each op whose key it meets for the first time.

    Attributes:
        keys: op name to the key of its record; ops that are not timed have none.
        records: the new records, by key; a record is empty if the op cannot be timed.
    """

    def __init__(
        self,
        program: Program,
        graph: OpGraph,
        profile: DeviceProfile,
        timer: Timer,
        complete: Collection[str],
        budget_s: float,
    ) -> None:
        super().__init__(program.module, graph.collectives)
        self.keys: dict[str, str] = {}
        self.records: dict[str, Record] = {}
        self._ops = _timeable(graph)
        self._estimates = price(graph, profile)
        self._timer = timer
        self._complete = complete
        self._left_s = budget_s

    def run_node(self, n: Node) -> Any:
        """Time the node's op, then run the node."""
        op = self._ops.get(n.name)
        if op is not None:
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            key = self.keys[op.name] = _key(n.target, args, kwargs)
            if key not in self._complete and key not in self.records and self._left_s > 0:
                start = time.perf_counter()
                record = self._time(op, n, args, kwargs)
                if record == {}:  # another thread may have invalidated the capture, and records are kept on disk
                    record = self._time(op, n, args, kwargs)
                if record is not None:
                    self.records[key] = record
                self._left_s -= time.perf_counter() - start
        return super().run_node(n)

    def _time(self, op: Op, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Record | None:
        call, originals = getattr(self, node.op), tree_leaves((args, kwargs))
        try:
            if not op.writes <= op.allocates:
                args, kwargs = _on_copies(node.target, args, kwargs)
            copies = (new for new, old in zip(tree_leaves((args, kwargs)), originals, strict=True) if new is not old)
            restore = Restore(filter(_must_restore, copies))
            estimate_us = self._estimates[op.name].duration_us
            return self._timer(functools.partial(call, node.target, args, kwargs), restore, estimate_us)
        except torch.OutOfMemoryError:
            return None  # not a record: a later run may have more memory
        except Exception:
            # The op cannot run alone, or not in a capture: it keeps its estimate.
            return {}


class _GraphTimer:
    """Times calls in CUDA graphs, which share a memory pool of their own.

    Captures on the stream reserved for captures. A stream from ``torch.cuda.Stream()`` may also be in use by another
    thread, whose launches would be captured instead of run.
    """

    def __init__(self, device: str, profile: DeviceProfile, *, cold: bool) -> None:
        self._stream = capture_stream(device)
        self._multiprocessors = profile.multiprocessors
        self._first_graph: torch.cuda.CUDAGraph | None = None
        self._ballast: Tensor | None = None
        if cold:  # reading and writing it evicts everything else from the cache
            with torch.cuda.stream(self._stream):
                self._ballast = torch.zeros(2 * profile.cache_bytes, dtype=torch.uint8, device=device)

    def __call__(self, call: Call, restore: Restore, expected_us: float) -> Record:
        """Time one call."""
        # The inputs were computed on the caller's stream. Afterwards no wait is needed: the times are synchronized on.
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
        """The time of a call by copies of it in one graph, and the share of the device that it keeps busy."""
        copies = min(_MAX_COPIES, math.ceil(_REPLAY_US / max(expected_us, 1.0)))
        once = _behind(restore, call)
        # The first run loads kernels and chooses algorithms, which is not allowed during a capture.
        once()
        graph = self._captured(lambda: _repeat(once, copies))
        busy = max((busy_share(kernel, self._multiprocessors) for kernel in kernels_of(graph)), default=0.0)
        us = max(0.0, replay_us(graph) - self._restoring_us(restore, copies)) / copies
        return {"warm_us": us, "copies": copies} | ({"busy_share": busy} if busy else {})

    def _restoring_us(self, restore: Restore, copies: int) -> float:
        """The time of restoring in a replay, µs: how much longer a replay takes that restores twice as often."""
        if not restore.spans:
            return 0.0
        once, twice = (
            replay_us(self._captured(functools.partial(_repeat, restore, count))) for count in (copies, 2 * copies)
        )
        return twice - once

    def _behind_ballast_us(self, call: Call) -> float:
        """The time of a call with an empty cache, including that of the ballast which empties it, µs."""
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
        graph, _ = capture(run, self._stream, self._first_graph and self._first_graph.pool(), keep_nodes=True)
        fill_by_kernels(graph, self._stream)
        # A memory pool lives as long as a graph of it: the first graph is kept, so that all graphs use its pool.
        self._first_graph = self._first_graph or graph
        return graph


def _zeros_like(fake: Any) -> Any:
    return torch.zeros(fake.shape, dtype=fake.dtype, device=fake.device) if isinstance(fake, Tensor) else fake


def _repeat(call: Call, copies: int) -> None:
    for _ in range(copies):
        call()


def _behind(restore: Restore, call: Call) -> Call:
    """A call that restores the memory that it writes before it runs."""

    def once() -> None:
        restore()
        call()

    return once if restore.spans else call


def _time_calls(call: Call, restore: Restore, expected_us: float) -> Record:
    """The least time of a few calls on the CPU, as disturbances only add; of a long call, the time of one."""
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
    """Whether an op can be repeated: a collective needs its peers, and unknown effects cannot be undone."""
    capturable = device == "cpu" or not op.uncapturable
    return op.device == device and capturable and op.orders <= {"rng"} and op.target != WAIT


def _expected_keys(program: Program, graph: OpGraph) -> dict[str, str]:
    """The keys of a program's ops, computed from the values of its trace; ``""`` if these are not enough."""
    timeable, keys = _timeable(graph), dict[str, str]()
    for node in program.module.graph.nodes:
        if node.name in timeable:
            metas = [source.meta for source in node.all_input_nodes]
            traced = all("val" in meta and _is_concrete(meta["val"]) for meta in metas)
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: source.meta.get("val"))
            keys[node.name] = _key(node.target, args, kwargs) if traced else ""
    return keys


def _key(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """The key of an op's record: kernel, layouts and dtypes of tensors, other arguments by value, and settings."""
    kernel = target.content if isinstance(target, Kernel) and target.content else str(target)
    settings = repr((numerics(), torch.get_num_threads()))
    return key_of(kernel, _content(args), _content(kwargs), settings)


def _is_concrete(value: object) -> bool:
    """Whether all sizes and strides are numbers, not symbols."""
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
    """The arguments of a call, with copies of those that it writes; of all, if its schema does not say which.

    An example is ``aten::batch_norm``: it writes running statistics which its schema declares as read.
    """
    if isinstance(target, Kernel):
        return tuple(_copied(arg) if at in target.written else arg for at, arg in enumerate(args)), kwargs
    written = written_names(target) if isinstance(target, OpOverload) else ()
    if not written:
        return _copied(args), _copied(kwargs)
    names = (argument.name for argument in target._schema.arguments)
    fresh = tuple(_copied(arg) if name in written else arg for name, arg in zip(names, args, strict=False))
    return fresh, {name: _copied(arg) if name in written else arg for name, arg in kwargs.items()}


def _must_restore(copy: Tensor) -> bool:
    """Whether a tensor must be restored before each run of an op that writes it.

    A fused kernel may increment a position and index with it, which goes out of bounds when repeated. Large
    floating-point tensors are weights and activations: restoring them would take longer than most ops.
    """
    return not (copy.is_floating_point() or copy.is_complex()) or copy.numel() <= _FEW


_FEW = 64
"""Elements."""


def _copied(value: Any) -> Any:
    return map_aggregate(value, lambda leaf: _copied_tensor(leaf) if isinstance(leaf, Tensor) else leaf)


def _copied_tensor(tensor: Tensor) -> Tensor:
    """A copy with the same strides, which ``clone`` does not preserve if there are gaps or overlaps."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    extent = 1 + sum((size - 1) * stride for size, stride in steps) if tensor.numel() else 0
    return tensor.as_strided((extent,), (1,)).clone().as_strided(tensor.shape, tensor.stride())


def _written(graph: OpGraph) -> frozenset[str]:
    """Names of the storages, or parts of storages, that some op writes."""
    return frozenset[str]().union(*(op.writes for op in graph.ops.values()))


def _with_copies(
    placeholders: Iterable[Placeholder], args: Sequence[Tensor], written: frozenset[str]
) -> tuple[Tensor, ...]:
    """The arguments, with copies of those whose storage is written; the copies alias each other as the originals do."""
    copies: dict[int, torch.UntypedStorage] = {}
    return tuple(
        _on_copied_storage(arg, copies) if placeholder.storage in written else arg
        for placeholder, arg in zip(placeholders, args, strict=True)
    )


def _on_copied_storage(tensor: Tensor, copies: dict[int, torch.UntypedStorage]) -> Tensor:
    """The same view of a copy of the tensor's storage; each storage is copied once."""
    storage = tensor.untyped_storage()
    if storage.data_ptr() not in copies:
        copies[storage.data_ptr()] = storage.clone()  # type: ignore[no-untyped-call]
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(copies[storage.data_ptr()], tensor.storage_offset(), tensor.shape, tensor.stride())
