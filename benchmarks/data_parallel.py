"""Data-parallel training: `train_step(data_parallel=)` beside DistributedDataParallel, one process for each GPU.

    python -m benchmarks.data_parallel --world 2 --out benchmarks/results/latest
    torchrun --nproc-per-node 2 -m benchmarks.data_parallel --out benchmarks/results/latest

`alone` is the step without collectives on one GPU, `any_memory` the step without a memory budget, and `all_reduce` are
its sums by NCCL, 25 MiB at a time, with nothing beside them. Sums are `exposed` while no other kernel runs: the share
of their time, the median of profiled replays, of the process where it is largest. NCCL's kernel runs on each process
until the last one has come. What it takes longer than there is `waiting`, of the process where that is largest, and no
part of a sum's time. What a step takes more than alone, (autostream - alone) / all_reduce, is `added`: sums that are
hidden slow down what runs beside them.
In a group of one, autostream / alone says what NCCL costs. All processes run each mode equally often, in interleaved
rounds; a round takes as long as on the slowest of them.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch.nn.parallel import DistributedDataParallel

from autostream.errors import first_line
from autostream.explaining import reports_of
from autostream.ir import OpGraph
from autostream.reporting.report import Report
from autostream.runtime.profiled_kernels import Kernel, profiled, replays
from autostream.scheduling.communication import uncovered_us
from benchmarks.harness.training import TrainingSubject, eager, scheduled
from benchmarks.stamp import save, saving_parser, stamp
from benchmarks.zoo import TRAINING, prepare_training

BATCHES = {"train_encoder6": 16, "train_resnet50": 32}
"""Workloads, and the part of a batch that each process has."""

ROUNDS = 9
WARM_UP = 3
"""Steps before the rounds: the first may compile, and DistributedDataParallel makes its buckets anew after one."""

RUNS = {"cuda": 20, "cpu": 2}
"""Steps in a round."""

_VARIABLES = ("NCCL_", "TORCH_NCCL_")
"""Environment variables on which results depend begin so."""

MINUTES = 4
"""How long a process waits for another one: some compile longer."""

Step = Callable[[], object]
Mode = Callable[[TrainingSubject, dist.ProcessGroup], Callable[..., object]]


def alone(subject: TrainingSubject, group: dist.ProcessGroup) -> Callable[..., object]:
    """``autostream.train_step`` of this process's part alone."""
    return scheduled(subject)


def autostream(subject: TrainingSubject, group: dist.ProcessGroup) -> Callable[..., object]:
    """``autostream.train_step(data_parallel=group)``."""
    return scheduled(subject, data_parallel=group)


def any_memory(subject: TrainingSubject, group: dist.ProcessGroup) -> Callable[..., object]:
    """The same, whatever memory a schedule needs: buckets keep gradients for longer than a step of one process does."""
    return scheduled(subject, data_parallel=group, memory_budget=math.inf)


def ddp(subject: TrainingSubject, group: dist.ProcessGroup) -> Callable[..., object]:
    """The eager step of a model in ``DistributedDataParallel``."""
    return eager(replace(subject, model=_wrapped(subject, group)))


def ddp_compiled(subject: TrainingSubject, group: dist.ProcessGroup) -> Callable[..., object]:
    """The same, compiled by ``torch.compile``."""
    return eager(replace(subject, model=torch.compile(_wrapped(subject, group), dynamic=False)))  # type: ignore[arg-type]


def all_reduce(graph: OpGraph, group: dist.ProcessGroup) -> Callable[..., object]:
    """The sums of a step alone, by NCCL, given its ops: all of its gradients of a type, at most 25 MiB at a time."""
    flat: list[torch.Tensor] = []
    sums = [graph.ops[name] for name in graph.ops if name in graph.collectives]
    for name in sorted({each.dtype for each in sums}):
        dtype = getattr(torch, name)
        total = sum(each.elements for each in sums if each.dtype == name)
        whole = torch.zeros(total, dtype=dtype, device=graph.device)
        flat += whole.split((25 << 20) // dtype.itemsize)  # type: ignore[no-untyped-call]

    def run(*_: object) -> None:
        for work in [dist.all_reduce(each, group=group, async_op=True) for each in flat]:
            work.wait()

    return run


STEPS: Mapping[str, Mode] = {mode.__name__: mode for mode in (alone, autostream, any_memory, ddp, ddp_compiled)}
MODES = (*STEPS, all_reduce.__name__)


def main(argv: list[str] | None = None) -> int:
    """Measure, save and print the results; without ``torchrun``, start it."""
    parser = saving_parser("data_parallel", __doc__)
    parser.add_argument("--world", type=int, default=2, help="number of processes (default: %(default)s)")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="NCCL or gloo (default: %(default)s)")
    parser.add_argument("--workloads", nargs="+", choices=TRAINING, default=[*BATCHES], metavar="NAME")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=[*MODES], metavar="MODE")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="(default: %(default)s)")
    options = parser.parse_args(argv)
    if "all_reduce" in options.modes and "autostream" not in options.modes:
        parser.error("all_reduce takes the sums of autostream: measure both, --modes autostream all_reduce")
    if "RANK" not in os.environ:
        if options.device == "cuda" and torch.cuda.device_count() < options.world:
            parser.error(f"there are {torch.cuda.device_count()} GPUs here for {options.world} processes")
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.world}"]
        given = sys.argv[1:] if argv is None else argv
        return subprocess.run(
            [sys.executable, *launcher, "-m", "benchmarks.data_parallel", *given], check=False
        ).returncode
    device = torch.device(options.device if options.device == "cpu" else f"cuda:{os.environ['LOCAL_RANK']}")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(minutes=MINUTES))
    variables = {name: value for name, value in os.environ.items() if name.startswith(_VARIABLES)}
    result: dict[str, Any] = {"schema": 1, "stamp": stamp(), "variables": variables, "world": dist.get_world_size()}
    if device.type == "cuda":
        result["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    rows = result["rows"] = list[dict[str, Any]]()
    for name in options.workloads:
        rows.append(row(name, options.modes, device, options.rounds))
        if dist.get_rank() == 0:  # after each, since a later one may be cut off
            save(f"data_parallel-{result['world']}", result, table(rows), options.out)
    dist.destroy_process_group()
    return 0


def row(name: str, modes: Sequence[str], device: torch.device, rounds: int) -> dict[str, Any]:
    """Median µs of a step by mode; what autostream chose; and the reasons of modes that failed.

    Every process of the default group has to call this.
    """
    steps: dict[str, Step] = {}
    failed: dict[str, str] = {}
    reports: dict[str, Report] = {}
    batch, dtype = BATCHES.get(name, 4), torch.bfloat16 if device.type == "cuda" else torch.float32
    assert dist.group.WORLD is not None
    for mode in filter(STEPS.__contains__, modes):
        subject = prepare_training(TRAINING[name], batch, "adamw", device, dtype)
        try:
            step = STEPS[mode](subject, dist.group.WORLD)
            for _ in range(WARM_UP):
                step(*subject.data)
        except Exception as error:  # torch.compile fails in all processes or in none
            failed[mode] = first_line(error)
            continue
        steps[mode] = partial(step, *subject.data)
        if made := reports_of(step):
            reports[mode] = made[0]
    if "all_reduce" in modes and "autostream" in reports and (graph := reports["autostream"].graph):
        steps["all_reduce"] = all_reduce(graph, dist.group.WORLD)
    times = [{mode: _us(step, device) for mode, step in steps.items()} for _ in range(1 + rounds)]
    of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, times[1:])
    slowest = {mode: [max(each[mode] for each in turn) for turn in zip(*of_all, strict=True)] for mode in steps}
    us = {mode: round(median(values), 2) for mode, values in slowest.items()}
    dist.all_gather_object(of_all, {mode: _replays(steps[mode], device) for mode in reports})
    sums = {mode: found for mode in reports if (found := sums_of([each[mode] for each in of_all]))}
    return {
        "workload": name,
        "batch": batch,
        "us": us,
        "exposed_us": {mode: round(max(found).exposed_us, 2) for mode, found in sums.items()},
        "exposed": {mode: round(max(found).share, 3) for mode, found in sums.items()},
        "exposed_by_process": {mode: [round(each.share, 3) for each in found] for mode, found in sums.items()},
        "waiting_us": {mode: round(max(each.waiting_us for each in found), 2) for mode, found in sums.items()},
        "schedules": {mode: _described(report) for mode, report in reports.items()},
        "failed": failed,
    }


class Sums(NamedTuple):
    """The sums of a step on one process: medians of its replays.

    Attributes:
        share: of their time in which no other kernel runs.
        exposed_us: that time, µs.
        us: how long they take, µs.
        waiting_us: how long NCCL's kernels wait for other processes before, µs.
    """

    share: float
    exposed_us: float
    us: float
    waiting_us: float


def sums_of(processes: Sequence[Sequence[Sequence[Kernel]]]) -> list[Sums]:
    """The sums of each process, from the replays of a step on each; none without kernels of NCCL that belong together.

    Example:
        >>> early, late = [Kernel(("gemm",), 1, 0.0, 6.0)], [Kernel(("gemm",), 1, 0.0, 8.0)]
        >>> early += [Kernel(("ncclDevKernel_AllReduce",), 2, 3.0, 11.0)]
        >>> late += [Kernel(("ncclDevKernel_AllReduce",), 2, 7.0, 11.0)]
        >>> [(sums.share, sums.us, sums.waiting_us) for sums in sums_of([[early], [late]])]
        [(1.0, 4.0, 4.0), (0.75, 4.0, 0.0)]
    """
    if len(set(map(len, processes))) > 1:  # the profiler has lost one, and nobody knows which
        return []
    found: list[list[Sums]] = [[] for _ in processes]
    for replays_of_one_step in zip(*processes, strict=True):
        kernels = [[_interval(each) for each in run if _is_sum(each)] for run in replays_of_one_step]
        if len(set(map(len, kernels))) > 1:  # it has lost a kernel
            continue
        shortest = [min(end - start for start, end in each) for each in zip(*kernels, strict=True)]
        for ours, own, run in zip(found, kernels, replays_of_one_step, strict=True):
            sums = [(end - us, end) for (_, end), us in zip(own, shortest, strict=True)]
            us, exposed_us = (uncovered_us(sums, hiding) for hiding in ([], _others(run)))
            if us:
                ours.append(Sums(exposed_us / us, exposed_us, us, uncovered_us(own, []) - us))
    return [Sums(*map(median, zip(*ours, strict=True))) for ours in found if ours]


def _others(run: Sequence[Kernel]) -> list[tuple[float, float]]:
    return [_interval(each) for each in run if not _is_sum(each)]


def _interval(kernel: Kernel) -> tuple[float, float]:
    return kernel.start_us, kernel.end_us


def _is_sum(kernel: Kernel) -> bool:
    return str(kernel.key[0]).startswith("nccl")


def added_share(us: Mapping[str, float]) -> float | None:
    """The share of the sums by which a step takes longer than without them, by the times of its modes.

    Example:
        >>> added_share({"alone": 900.0, "autostream": 910.0, "all_reduce": 100.0})
        0.1
    """
    if not us.keys() >= {"alone", "autostream", "all_reduce"}:
        return None
    return (us["autostream"] - us["alone"]) / us["all_reduce"]


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line for each workload: µs by mode, and what follows."""
    lines = []
    for each in rows:
        us = each["us"]
        cells = [f"{us[mode]:,.0f}" if mode in us else "failed" if mode in each["failed"] else "" for mode in MODES]
        over = [f"{us[mode] / us['autostream']:.2f}×" if {mode, "autostream"} <= us.keys() else "" for mode in _OVER]
        costs = f"{us['autostream'] / us['alone'] - 1:+.1%}" if {"alone", "autostream"} <= us.keys() else ""
        shares = (added_share(us), each.get("exposed", {}).get("autostream"))
        told = ["" if share is None else f"{share:.0%}" for share in shares]
        waiting_us = each.get("waiting_us", {}).get("autostream")
        told.append("" if waiting_us is None else f"{waiting_us:,.0f}")
        lines.append([each["workload"], each["batch"], *cells, *over, costs, *told])
    names = [mode.replace("_", " ") for mode in MODES]
    over = [f"over {mode.replace('_', ' ')}" for mode in _OVER]
    headers = [
        "workload",
        "batch",
        *(f"{name}, µs" for name in names),
        *over,
        "over alone",
        "added",
        "exposed",
        "waiting, µs",
    ]
    aligned = ("left", *["right"] * (len(headers) - 1))
    return tabulate(lines, headers, tablefmt="github", colalign=aligned, disable_numparse=True)


_OVER = ("ddp", "ddp_compiled")


def _wrapped(subject: TrainingSubject, group: dist.ProcessGroup) -> DistributedDataParallel:
    return DistributedDataParallel(subject.model, process_group=group)


def _us(step: Step, device: torch.device) -> float:
    """The µs of a step, back to back, the same number of them in each process; they begin together."""
    runs = RUNS[device.type]
    dist.barrier()
    _finish(device)
    start = time.perf_counter()
    for _ in range(runs):
        step()
    _finish(device)
    return (time.perf_counter() - start) / runs * 1e6


def _replays(step: Step, device: torch.device) -> Sequence[Sequence[Kernel]]:
    """The kernels of replays of a step's CUDA graph."""
    if device.type == "cpu":
        return []
    dist.barrier()
    runs = replays(profiled(lambda: [step() for _ in range(RUNS[device.type])], str(device)))
    return runs[1:]  # the first uploads the graph


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _described(report: Report) -> str:
    """What runs, and how many schedules there was time to measure."""
    streams = report.chosen.schedule.streams if report.chosen else 0
    measured = sum(each.measured_us is not None for each in report.candidates)
    tried = f"{measured} of {len(report.candidates)} schedules measured in {report.seconds.get('select', 0.0):.1f} s"
    return f"{report.mode}, {report.level} kernels, {streams} streams, {tried}"


if __name__ == "__main__":
    sys.exit(main())
