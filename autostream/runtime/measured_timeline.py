"""When each op of a captured graph really runs: the kernels that a profiler sees, mapped back to ops.

    lowered graph, op by op, each under its name ──▶ which kernels each op launches      kernels_by_op
    captured graph, replayed                     ──▶ which kernels ran, and when         replays
    both, and the order of the schedule          ──▶ Timeline                            match

A replay does not say for whom a kernel ran, and the queues that it names are not the streams that were captured. What
is known is what each op launches, in which order each stream goes through its ops, and what they wait for. So a kernel
belongs to the next op of some stream that expects one of this name and this grid and has nothing to wait for any more.
Where several streams do (equal branches), the one that was in the kernel's queue before goes first, then the one
launched first: such kernels are alike, and so are the times that they could swap.

Times are those of CUPTI, by way of ``torch.profiler`` and the trace file that it writes.
"""

from __future__ import annotations

import json
import tempfile
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
"""The one of median length is told of; the first uploads the graph."""

_SPAN = "autostream op "
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_ON_HOST = ("cuda_runtime", "cuda_driver")

Event = Mapping[str, Any]
"""An entry of a trace file."""

Key = tuple[object, ...]
"""What a kernel has in common with other runs of the same: its name, its grid and blocks, or the bytes it moves."""


class Unmatched(Exception):  # noqa: N818 - a notice between modules, not an error
    """What ran is not what was launched op by op; the message says where they part."""


class Kernel(NamedTuple):
    """A kernel, copy or fill that ran on the device.

    Attributes:
        key: which it is.
        queue: the hardware queue, as the profiler numbers it.
        start_us: when it started, µs.
        end_us: when it ended, µs.
    """

    key: Key
    queue: int
    start_us: float
    end_us: float


def watch(
    lowered: fx.GraphModule,
    graph: OpGraph,
    schedule: Schedule,
    captured: CapturedGraph,
    arguments: Sequence[Tensor],
    level: str,
) -> Timeline:
    """Run a schedule under a profiler and say when each op ran. Nothing that it runs may write what others see.

    Args:
        lowered: what was captured.
        graph: its ops.
        schedule: which it was lowered from.
        captured: the graph; it is replayed with what its static tensors hold.
        arguments: those that are bound are where the graph reads them.
        level: of the program, as in :class:`~autostream.ir.Program`.

    Raises:
        Unmatched: what was replayed cannot be told apart by op, or the profiler saw nothing.
    """
    device = str(captured.device)
    named = Named(lowered, graph)
    read = [captured.static.get(at, argument) for at, argument in enumerate(arguments)]

    def op_by_op() -> None:
        with torch.no_grad(), restored(device), without_autocast(level):
            named.run(*read)

    op_by_op()  # libraries choose their kernels in the first run
    launched = kernels_by_op(profiled(op_by_op, device))

    def again_and_again() -> None:
        for _ in range(REPLAYS + 1):
            captured.replay()

    runs = replays(profiled(again_and_again, device))[1:]
    if not runs:
        raise Unmatched("the profiler saw no replay of a CUDA graph")
    runs.sort(key=lambda run: max(kernel.end_us for kernel in run) - min(kernel.start_us for kernel in run))
    return match(schedule, launched, runs[len(runs) // 2])


class Named(fx.Interpreter):
    """Runs a lowered graph with each op's launches under its name, for a profiler to see.

    Args:
        lowered: takes and returns flat tensors.
        graph: its ops.
    """

    def __init__(self, lowered: fx.GraphModule, graph: OpGraph) -> None:
        super().__init__(lowered)
        self._op_of = {node: op.name for op in graph.ops.values() for node in op.nodes}

    def run_node(self, n: fx.Node) -> Any:
        """What a node computes."""
        if n.name not in self._op_of:
            return super().run_node(n)
        with record_function(f"{_SPAN}{self._op_of[n.name]}"):
            return super().run_node(n)


def profiled(run: Callable[[], object], device: str) -> Sequence[Event]:
    """What a profiler sees on the host and on a device while something runs."""
    torch.cuda.synchronize(device)
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities, acc_events=True) as profiler:  # 2.11 warns that it would drop earlier events
        run()
        torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events: Sequence[Event] = json.loads(path.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
    return events


def kernels_by_op(events: Iterable[Event]) -> Mapping[str, Sequence[Key]]:
    """What each op launched, as keys in the order of the launches; ops that launched nothing are not named.

    A kernel belongs to the op in whose span the host launched it.

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
    found: dict[str, list[Key]] = defaultdict(list)
    kernels = _kernels_by_launch(events)
    for launch in sorted(_launches(events), key=lambda event: event["ts"]):
        at = bisect_right(starts, launch["ts"]) - 1
        if at >= 0 and launch["ts"] <= spans[at][1]:
            found[spans[at][2]] += [kernel.key for kernel in kernels.get(launch["args"]["correlation"], ())]
    return {op: keys for op, keys in found.items() if keys}


def replays(events: Iterable[Event]) -> list[list[Kernel]]:
    """The kernels of each replay of a CUDA graph, by their starts; replays in their order."""
    events = [*events]
    kernels = _kernels_by_launch(events)
    launches = (event for event in _launches(events) if "GraphLaunch" in event["name"])
    ordered = sorted(launches, key=lambda event: event["ts"])
    found = (kernels.get(launch["args"]["correlation"], []) for launch in ordered)
    return [sorted(run, key=lambda kernel: kernel.start_us) for run in found if run]


def share_in_graphs(events: Iterable[Event]) -> float:
    """How much of the time that the device worked, summed over all kernels and copies, was in replays of CUDA graphs.

    Nothing, where it did not work at all.

    Example:
        >>> launches = [("cudaGraphLaunch", 1), ("cudaLaunchKernel", 2)]
        >>> host = [{"cat": "cuda_runtime", "name": n, "ts": 0, "args": {"correlation": c}} for n, c in launches]
        >>> took = [(1, 3.0), (1, 3.0), (2, 2.0)]
        >>> ran = [{"cat": "kernel", "name": "k", "ts": 1, "dur": t, "args": {"correlation": c}} for c, t in took]
        >>> share_in_graphs(host + ran)
        0.75
    """
    events = [*events]
    of_all_us = sum(_busy_us(kernels) for kernels in _kernels_by_launch(events).values())
    return sum(map(_busy_us, replays(events))) / of_all_us if of_all_us else 0.0


def _busy_us(kernels: Iterable[Kernel]) -> float:
    return sum(kernel.end_us - kernel.start_us for kernel in kernels)


def _launches(events: Iterable[Event]) -> Iterable[Event]:
    return (event for event in events if event.get("cat") in _ON_HOST and "correlation" in event.get("args", {}))


def _kernels_by_launch(events: Iterable[Event]) -> Mapping[int, Sequence[Kernel]]:
    """What ran on the device, by the number that it shares with the host's call."""
    found: dict[int, list[Kernel]] = defaultdict(list)
    for event in events:
        if event.get("cat") in _ON_DEVICE:
            args = event["args"]
            key = (event["name"], *(tuple(args.get(what, ())) for what in ("grid", "block")), args.get("bytes"))
            found[args["correlation"]].append(
                Kernel(key, int(args.get("stream", 0)), event["ts"], event["ts"] + event["dur"])
            )
    return found


def match(schedule: Schedule, launched: Mapping[str, Sequence[Key]], kernels: Sequence[Kernel]) -> Timeline:
    """Say which op each kernel of a run belongs to.

    Args:
        schedule: what ran.
        launched: the keys of the kernels that each op launches, in order.
        kernels: of one run, by their starts.

    Returns:
        One slice per launch, in launch order, from the start of its first kernel to the end of its last one; the run
        starts at 0. An op that launches nothing takes no time, at the end of the one before it.

    Raises:
        Unmatched: a kernel is expected by no op whose turn it is, or one that is expected did not run.

    Example:
        >>> beside = Schedule("drawn", 2, (Launch("a", 0), Launch("b", 1, waits=("a",)), Launch("c", 0)))
        >>> launched = {"a": [("relu",)], "b": [("add",)], "c": [("mul",)]}
        >>> ran = [Kernel(("relu",), 7, 5.0, 6.0), Kernel(("mul",), 7, 7.0, 9.0), Kernel(("add",), 9, 8.0, 9.5)]
        >>> [(piece.op, piece.start_us, piece.end_us) for piece in match(beside, launched, ran).slices]
        [('a', 0.0, 1.0), ('b', 3.0, 4.5), ('c', 2.0, 4.0)]
    """
    lanes = _Lanes(schedule, launched)
    for kernel in kernels:
        lanes.give(kernel)
    lanes.turns()
    if rest := [launch.op for launch in schedule.launches if launch.op not in lanes.through]:
        raise Unmatched(f"{rest[0]} did not run all the kernels that it launches op by op")
    return Timeline(tuple(_slices(schedule, lanes.ran)), source="measured")


class _Lanes:
    """How far each stream has got.

    Attributes:
        ran: by op, the kernels that are known to be its own.
        through: the ops that have run all of theirs.
    """

    def __init__(self, schedule: Schedule, launched: Mapping[str, Sequence[Key]]) -> None:
        self.ran: dict[str, list[Kernel]] = {launch.op: [] for launch in schedule.launches}
        self.through = {FORK}
        self._launched = launched
        self._place = {launch.op: at for at, launch in enumerate(schedule.launches)}
        self._queue: dict[int, int] = {}
        self._todo: dict[int, deque[Launch]] = defaultdict(deque)
        for launch in schedule.launches:
            self._todo[launch.stream].append(launch)

    def give(self, kernel: Kernel) -> None:
        """Say whose a kernel is: the next one that ran."""
        able = [launch for launch in self.turns() if self.next(launch.op) == kernel.key]
        if not able:
            raise Unmatched(
                f"no op whose turn it is launches {kernel.key[0]}, which ran {len(self.through) - 1} ops in"
            )
        mine = min(able, key=lambda launch: (self._queue.get(launch.stream) != kernel.queue, self._place[launch.op]))
        self._queue[mine.stream] = kernel.queue
        self.ran[mine.op].append(kernel)

    def turns(self) -> Sequence[Launch]:
        """What is first on its stream and waits for nothing any more; passes ops that are through."""
        before = -1
        while before != len(self.through):
            before = len(self.through)
            for lane in self._todo.values():
                while lane and self._free(lane[0]) and self.next(lane[0].op) is None:
                    self.through.add(lane.popleft().op)
        return [lane[0] for lane in self._todo.values() if lane and self._free(lane[0])]

    def next(self, op: str) -> Key | None:
        """The kernel that an op launches next; ``None`` where it has run all of its own."""
        launched, ran = self._launched.get(op, ()), self.ran[op]
        return launched[len(ran)] if len(ran) < len(launched) else None

    def _free(self, launch: Launch) -> bool:
        return self.through.issuperset(launch.waits)


def _slices(schedule: Schedule, ran: Mapping[str, Sequence[Kernel]]) -> Iterator[Slice]:
    first_us = min((kernel.start_us for kernels in ran.values() for kernel in kernels), default=0.0)
    until: dict[int, float] = {}
    for launch in schedule.launches:
        kernels, at_us = ran[launch.op], until.get(launch.stream, 0.0)
        start_us = min((kernel.start_us - first_us for kernel in kernels), default=at_us)
        end_us = max((kernel.end_us - first_us for kernel in kernels), default=at_us)
        until[launch.stream] = end_us
        yield Slice(launch.op, launch.stream, start_us, end_us)
