"""Profiles of kernels: which ran in a replay of a CUDA graph, and which each op launches.

Times are from CUPTI, read from the trace file that ``torch.profiler`` writes.
"""

from __future__ import annotations

import json
import tempfile
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.profiler import ProfilerActivity, profile, record_function

from autostream.ir import OpGraph

_SPAN = "autostream op "
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_ON_HOST = ("cuda_runtime", "cuda_driver")

Event = Mapping[str, Any]
"""An entry of a trace file."""

Key = tuple[object, ...]
"""Identifies a kernel: its name, its grid and blocks, or the bytes that it copies."""


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
