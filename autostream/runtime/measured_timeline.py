"""Measures when each op of a captured graph runs: profiled kernels are mapped back to ops.

    lowered graph, profiled op by op     ──▶ which kernels each op launches      kernels_by_op
    captured graph, profiled             ──▶ which kernels ran, and when         replays
    both, and the order of the schedule  ──▶ Timeline                            match

The profile of a replay has neither the op of a kernel nor the stream that was captured: it names hardware queues. Known
are the kernels that each op launches, the order of ops on each stream, and their waits. So a kernel belongs to an op
that is next on its stream, has no wait left, and launches a kernel of this name and grid next. Where several ops match
(equal branches), one is preferred whose waits had ended when the kernel started, then a stream whose last kernel ran in
the same queue, then the op launched first. If no op matches a later kernel, the last choice is taken back (depth-first
search). Matching kernels are equal, so a wrong choice that remains swaps similar times. Small fills of memory are
kernels in a graph (``runtime/small_fills.py``), and none op by op.

Times are from CUPTI, read from the trace file that ``torch.profiler`` writes.
"""

from __future__ import annotations

import json
import tempfile
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.profiler import ProfilerActivity, profile, record_function

from autostream.ir import FORK, Launch, OpGraph, Schedule, Slice, Timeline
from autostream.runtime.cuda_graph import CapturedGraph
from autostream.runtime.runs import without_autocast
from autostream.runtime.streams import restored

REPLAYS = 5
"""The replay of median duration is used. There is one more, the first, which uploads the graph."""

_PLACEMENTS = 50
"""So many times as many kernels as there are may be placed. Simulated runs of 300 ops needed up to 2.7 times."""

_SPAN = "autostream op "
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_ON_HOST = ("cuda_runtime", "cuda_driver")

_FILL, _FILLING = "Memset", "FillFunctor"
"""In the names of fills of memory that are no kernels, and of those that are."""

Event = Mapping[str, Any]
"""An entry of a trace file."""

Key = tuple[object, ...]
"""Identifies a kernel: its name, its grid and blocks, or the bytes that it copies."""


class Unmatched(Exception):  # noqa: N818 - a notice between modules, not an error
    """A replay ran other kernels than the ops launched one by one; the message has the first difference."""


class Kernel(NamedTuple):
    """A kernel, copy or fill that ran on the device.

    Attributes:
        key: identifies the kernel.
        queue: the hardware queue, as the profiler numbers it.
        start_us: when it started, µs.
        end_us: when it ended, µs.
    """

    key: Key
    queue: int
    start_us: float
    end_us: float


def measure_timeline(
    lowered: fx.GraphModule,
    graph: OpGraph,
    schedule: Schedule,
    captured: CapturedGraph,
    arguments: Sequence[Tensor],
    level: str,
) -> Timeline:
    """Run a schedule under a profiler and return when each op ran. Its ops must not mutate the model's state.

    Args:
        lowered: the lowered graph.
        graph: its ops.
        schedule: that it was lowered from.
        captured: the CUDA graph; it is replayed with the current contents of its static inputs.
        arguments: of a call; bound ones must be where the graph reads them.
        level: of the program, as in :class:`~autostream.ir.Program`.

    Raises:
        Unmatched: kernels could not be mapped to ops, or the profiler recorded nothing.
    """
    device = str(captured.device)
    annotated = Annotated(lowered, graph)
    inputs = [captured.static.get(at, argument) for at, argument in enumerate(arguments)]

    def op_by_op() -> None:
        with torch.no_grad(), restored(device), without_autocast(level):
            annotated.run(*inputs)

    op_by_op()  # in the first run, libraries choose kernels
    launched = kernels_by_op(profiled(op_by_op, device))

    def replayed() -> None:
        for _ in range(REPLAYS + 1):
            captured.replay()

    runs = replays(profiled(replayed, device))[1:]
    if not runs:
        raise Unmatched("the profiler saw no replay of a CUDA graph")
    runs.sort(key=lambda run: max(kernel.end_us for kernel in run) - min(kernel.start_us for kernel in run))
    return match(schedule, launched, runs[len(runs) // 2])


class Annotated(fx.Interpreter):
    """Runs a lowered graph with a profiler annotation around each op.

    Args:
        lowered: takes and returns flat tensors.
        graph: its ops.
    """

    def __init__(self, lowered: fx.GraphModule, graph: OpGraph) -> None:
        super().__init__(lowered)
        self._op_of = {node: op.name for op in graph.ops.values() for node in op.nodes}

    def run_node(self, n: fx.Node) -> Any:
        """Compute a node's value."""
        if n.name not in self._op_of:
            return super().run_node(n)
        with record_function(f"{_SPAN}{self._op_of[n.name]}"):
            return super().run_node(n)


def profiled(run: Callable[[], object], device: str) -> Sequence[Event]:
    """The events that a profiler records on the host and on a device during a run."""
    torch.cuda.synchronize(device)
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities, acc_events=True) as profiler:  # otherwise 2.11 warns that it would drop events
        run()
        torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events: Sequence[Event] = json.loads(path.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
    return events


def kernels_by_op(events: Iterable[Event]) -> Mapping[str, Sequence[Key]]:
    """The keys of the kernels that each op launched, in order; ops that launched none are left out.

    A kernel belongs to the op in whose annotation the host launched it.

    Example:
        >>> span = {"cat": "user_annotation", "name": "autostream op a", "ts": 0, "dur": 9}
        >>> launch = {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 2, "args": {"correlation": 7}}
        >>> ran = {"correlation": 7, "stream": 20, "grid": [4, 1, 1], "block": [128, 1, 1]}
        >>> kernel = {"cat": "kernel", "name": "relu", "ts": 30, "dur": 5, "args": ran}
        >>> kernels_by_op([span, launch, kernel])
        {'a': [('relu', (4, 1, 1), (128, 1, 1), None)]}
    """
    events = [*events]
    spans = sorted(
        (event["ts"], event["ts"] + event["dur"], event["name"].removeprefix(_SPAN))
        for event in events
        if event.get("cat") == "user_annotation" and event["name"].startswith(_SPAN)
    )
    starts = [start for start, _, _ in spans]
    keys_of: dict[str, list[Key]] = defaultdict(list)
    kernels = _kernels_by_launch(events)
    for launch in sorted(_launches(events), key=lambda event: event["ts"]):
        at = bisect_right(starts, launch["ts"]) - 1
        if at >= 0 and launch["ts"] <= spans[at][1]:
            keys_of[spans[at][2]] += [kernel.key for kernel in kernels.get(launch["args"]["correlation"], ())]
    return {op: keys for op, keys in keys_of.items() if keys}


def replays(events: Iterable[Event]) -> list[list[Kernel]]:
    """The kernels of each replay of a CUDA graph, in order of their start; replays in order of launch."""
    events = [*events]
    kernels = _kernels_by_launch(events)
    launches = (event for event in _launches(events) if "GraphLaunch" in event["name"])
    ordered = sorted(launches, key=lambda event: event["ts"])
    runs = (kernels.get(launch["args"]["correlation"], []) for launch in ordered)
    return [sorted(run, key=lambda kernel: kernel.start_us) for run in runs if run]


def share_in_graphs(events: Iterable[Event]) -> float:
    """The share of replays of CUDA graphs in the time of all kernels and copies; 0 if there are none.

    Example:
        >>> launches = [("cudaGraphLaunch", 1), ("cudaLaunchKernel", 2)]
        >>> host = [{"cat": "cuda_runtime", "name": n, "ts": 0, "args": {"correlation": c}} for n, c in launches]
        >>> took = [(1, 3.0), (1, 3.0), (2, 2.0)]
        >>> ran = [{"cat": "kernel", "name": "k", "ts": 1, "dur": t, "args": {"correlation": c}} for c, t in took]
        >>> share_in_graphs(host + ran)
        0.75
    """
    events = [*events]
    total_us = sum(_busy_us(kernels) for kernels in _kernels_by_launch(events).values())
    return sum(map(_busy_us, replays(events))) / total_us if total_us else 0.0


def _busy_us(kernels: Iterable[Kernel]) -> float:
    return sum(kernel.end_us - kernel.start_us for kernel in kernels)


def _launches(events: Iterable[Event]) -> Iterable[Event]:
    return (event for event in events if event.get("cat") in _ON_HOST and "correlation" in event.get("args", {}))


def _kernels_by_launch(events: Iterable[Event]) -> Mapping[int, Sequence[Kernel]]:
    """The kernels on the device, by the correlation number of the host's call that launched them."""
    by_launch: dict[int, list[Kernel]] = defaultdict(list)
    for event in events:
        if event.get("cat") in _ON_DEVICE:
            args = event["args"]
            key = (event["name"], *(tuple(args.get(shape, ())) for shape in ("grid", "block")), args.get("bytes"))
            by_launch[args["correlation"]].append(
                Kernel(key, int(args.get("stream", 0)), event["ts"], event["ts"] + event["dur"])
            )
    return by_launch


def match(schedule: Schedule, launched: Mapping[str, Sequence[Key]], kernels: Sequence[Kernel]) -> Timeline:
    """Map the kernels of a run to ops.

    Args:
        schedule: of the run.
        launched: the keys of the kernels that each op launches, in order.
        kernels: of one run, in order of their start.

    Returns:
        One slice per launch, in launch order, from the start of its first kernel to the end of its last one; the run
        starts at 0. An op that launches nothing takes no time, when those that it comes after have ended.

    Raises:
        Unmatched: other kernels ran than the ops launch, or in an order in which no way was found to map them.

    Example:
        >>> beside = Schedule("by hand", 2, (Launch("a", 0), Launch("b", 1, waits=("a",)), Launch("c", 0)))
        >>> launched = {"a": [("relu",)], "b": [("add",)], "c": [("mul",)]}
        >>> ran = [Kernel(("relu",), 7, 5.0, 6.0), Kernel(("mul",), 7, 7.0, 9.0), Kernel(("add",), 9, 8.0, 9.5)]
        >>> [(slice.op, slice.start_us, slice.end_us) for slice in match(beside, launched, ran).slices]
        [('a', 0.0, 1.0), ('b', 3.0, 4.5), ('c', 2.0, 4.0)]
    """
    progress, hopeless, reason = _Progress(schedule, launched), set[object](), ""
    untried: list[Iterator[Launch]] = []  # of each kernel so far, other launches to which it may belong
    left = _PLACEMENTS * len(kernels)
    while True:
        try:
            if len(untried) == len(kernels):
                progress.finish()
                return Timeline(tuple(_slices(schedule, progress)), source="measured")
            untried.append(iter(progress.matching(kernels[len(untried)])))
        except Unmatched as error:
            reason = reason or str(error)
            progress.give_up(hopeless)
        while True:
            if not untried:
                raise Unmatched(reason)
            if not left:
                raise Unmatched(f"{reason}; no other way was found to map {len(kernels)} kernels")
            launch = next(untried[-1], None)
            if launch is None:
                untried.pop()
                progress.give_up(hopeless)
                continue
            left -= 1
            progress.place(kernels[len(untried) - 1], launch)
            if progress.state not in hopeless:
                break
            progress.undo()


@dataclass(frozen=True, slots=True)
class _Placed:
    """Where a kernel was placed, the queue of the one before on that stream, and the launches that it ended."""

    launch: Launch
    queue: int | None
    passed: Sequence[Launch]


class _Progress:
    """How far each stream has come.

    Attributes:
        ran: by op, its kernels.
        ended_us: when each op that is over has ended; one that launches nothing, when those before it have.
    """

    def __init__(self, schedule: Schedule, launched: Mapping[str, Sequence[Key]]) -> None:
        self.ran: dict[str, list[Kernel]] = {launch.op: [] for launch in schedule.launches}
        self.ended_us: dict[str, float] = {FORK: -inf}
        self._placed: list[_Placed] = []
        self._launched = launched
        self._index = {launch.op: at for at, launch in enumerate(schedule.launches)}
        self._queue: dict[int, int | None] = {}
        self._before: dict[str, str] = {}  # the op before it on its stream
        self._remaining: dict[int, deque[Launch]] = defaultdict(deque)
        for launch in schedule.launches:
            lane = self._remaining[launch.stream]
            self._before[launch.op] = lane[-1].op if lane else FORK
            lane.append(launch)
        self._pass()

    @property
    def state(self) -> object:
        """How many kernels of each stream have run: what can be placed next depends on nothing else."""
        return tuple((len(lane), len(self.ran[lane[0].op]) if lane else 0) for lane in self._remaining.values())

    def matching(self, kernel: Kernel) -> Sequence[Launch]:
        """The launches to which the next kernel that ran may belong, the likeliest first.

        Raises:
            Unmatched: there is none.
        """
        lanes = (lane[0] for lane in self._remaining.values() if lane)
        turns = [launch for launch in lanes if self._has_no_wait(launch) and _is(kernel.key, self._next(launch.op))]
        if not turns:
            over = len(self.ended_us) - 1
            raise Unmatched(f"no op whose turn it is launches {kernel.key[0]}, which ran {over} ops in")

        def unlikeliness(launch: Launch) -> tuple[bool, bool, int]:
            too_early = kernel.start_us < self._ready_us(launch)
            return too_early, self._queue.get(launch.stream) != kernel.queue, self._index[launch.op]

        return sorted(turns, key=unlikeliness)

    def place(self, kernel: Kernel, launch: Launch) -> None:
        """Count a kernel as one of the op that is launched there."""
        queue = self._queue.get(launch.stream)
        self._queue[launch.stream] = kernel.queue
        self.ran[launch.op].append(kernel)
        self._placed.append(_Placed(launch, queue, self._pass()))

    def undo(self) -> None:
        """Take back the latest kernel."""
        placed = self._placed.pop()
        for launch in reversed(placed.passed):
            self._remaining[launch.stream].appendleft(launch)
            del self.ended_us[launch.op]
        self.ran[placed.launch.op].pop()
        self._queue[placed.launch.stream] = placed.queue

    def give_up(self, hopeless: set[object]) -> None:
        """Remember that nothing can follow, and take back the latest kernel, if there is one."""
        hopeless.add(self.state)
        if self._placed:
            self.undo()

    def finish(self) -> None:
        """Check that no kernel is missing.

        Raises:
            Unmatched: one is.
        """
        if rest := [op for op in self._index if op not in self.ended_us]:
            raise Unmatched(f"{rest[0]} did not run all the kernels that it launches op by op")

    def _pass(self) -> Sequence[Launch]:
        """Pass the launches that have run all of their kernels."""
        passed: list[Launch] = []
        before = -1
        while before != len(passed):
            before = len(passed)
            for lane in self._remaining.values():
                while lane and self._has_no_wait(lane[0]) and self._next(lane[0].op) is None:
                    passed.append(lane.popleft())
                    self.ended_us[passed[-1].op] = self._ready_us(passed[-1])
        return passed

    def _ready_us(self, launch: Launch) -> float:
        """When its own kernels so far, the op before it on its stream, and those that it waits for, have ended."""
        own = (kernel.end_us for kernel in self.ran[launch.op][-1:])
        return max(*own, *(self.ended_us[op] for op in (self._before[launch.op], *launch.waits)), -inf)

    def _next(self, op: str) -> Key | None:
        """The kernel that an op launches next; ``None`` after its last one."""
        launched, ran = self._launched.get(op, ()), self.ran[op]
        return launched[len(ran)] if len(ran) < len(launched) else None

    def _has_no_wait(self, launch: Launch) -> bool:
        return all(op in self.ended_us for op in launch.waits)


def _is(ran: Key, launched: Key | None) -> bool:
    """Whether a kernel of a replay is the one that an op launches, or fills memory in its place."""
    return ran == launched or bool(launched and _FILL in str(launched[0]) and _FILLING in str(ran[0]))


def _slices(schedule: Schedule, progress: _Progress) -> Iterator[Slice]:
    first_us = min((kernel.start_us for kernels in progress.ran.values() for kernel in kernels), default=0.0)
    for launch in schedule.launches:
        kernels = progress.ran[launch.op]
        over_us = max(progress.ended_us[launch.op], first_us)
        start_us = min((kernel.start_us for kernel in kernels), default=over_us)
        end_us = max((kernel.end_us for kernel in kernels), default=over_us)
        yield Slice(launch.op, launch.stream, start_us - first_us, end_us - first_us)
