"""Time of planning by the number of ops, of importing autostream, and of a command.

    python -m benchmarks.planning --out benchmarks/results/latest

No device is needed: models of eight chains with joins, and some of the zoo, are planned for an H200 with default
options. ``torch.export`` is also timed alone, for comparison with tracing. Search is left out of the total, since it
runs for a given time.

Scheduling is also timed alone for very large graphs: from a graph and its costs to a verified and simulated schedule of
each policy but ``search``. Each graph has a process of its own, whose peak memory is reported.
"""

from __future__ import annotations

import gc
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

from autostream import pipeline
from autostream.costs.device import known_names, profile_named
from autostream.ir import Dependency, DeviceProfile, Hazard, Op, OpCost, OpGraph, Role, Storage
from autostream.options import Options
from autostream.scheduling.policies import POLICIES
from autostream.scheduling.releases import place_releases
from autostream.scheduling.simulate import simulate
from autostream.scheduling.synchronize import synchronize
from autostream.scheduling.verify import verify
from benchmarks import zoo
from benchmarks.stamp import save, saving_parser, stamp

STAGES = ("trace", "analyze", "price", "schedule", "verify")
SIZES = (1_000, 2_000, 5_000, 10_000)
MODELS = ("googlenet", "inception_v3", "bert_base", "t5_small", "moe8", "towers8")
GRAPH_SIZES = (10_000, 100_000)
STREAMS = 8
WIDTH = 8
IMPORTS = 7
COMMANDS = 3
COMMAND = ("inspect", "googlenet", "--input", "1x3x224x224")
"""Arguments of ``autostream``: a typical first command."""


class Chains(nn.Module):
    """Chains of ``relu(x @ w)`` over shared weights, with a sum of all chains after every few ops.

    Args:
        ops: the least number of ops.
        chains: number of independent chains.
        weights: number of shared weights.
        joint: ops of each chain between two sums.
    """

    def __init__(self, ops: int, chains: int = 8, weights: int = 16, joint: int = 16) -> None:
        super().__init__()
        self.chains = chains
        self.layers = joint // 2
        self.joints = math.ceil(ops / (chains * joint + chains - 1))
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) / WIDTH**0.5 for _ in range(weights))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the chains to ``x``, sum, and repeat."""
        for _ in range(self.joints):
            x = sum((self._chain(x) for _ in range(self.chains - 1)), self._chain(x))
        return x

    def _chain(self, x: Tensor) -> Tensor:
        for layer in range(self.layers):
            x = torch.relu(x @ self.weights[layer % len(self.weights)])
        return x


def main(argv: list[str] | None = None) -> int:
    """Measure, save and print the results."""
    parser = saving_parser("planning", __doc__)
    parser.add_argument("sizes", nargs="*", type=int, metavar="OPS", help=f"default: {' '.join(map(str, SIZES))}")
    parser.add_argument("--profile", default="h200", choices=known_names(), help="plan for this device (default: h200)")
    parser.add_argument(
        "--models", nargs="*", choices=zoo.INFERENCE, default=MODELS, metavar="MODEL", help="plan these of the zoo"
    )
    parser.add_argument(
        "--graphs", nargs="*", type=int, default=GRAPH_SIZES, metavar="OPS", help="schedule graphs of so many ops alone"
    )
    parser.add_argument("--rounds", type=int, default=3, help="measure so many times, keep the medians (default: 3)")
    options = parser.parse_args(argv)
    sizes, profile = options.sizes or SIZES, profile_named(options.profile)
    planned(*chained(64), profile)  # warms up
    rounds = range(options.rounds)
    rows = [_median_row([planned(*chained(size), profile) for _ in rounds]) for size in sizes]
    models = {name: _median_row([planned(*workload(name), profile) for _ in rounds]) for name in options.models}
    imports = {f"import_{name}_s": round(seconds, 3) for name, seconds in import_seconds().items()}
    result: dict[str, Any] = {
        "schema": 1,
        "stamp": stamp(),
        "profile": profile.name,
        "rows": rows,
        "models": [{"model": name, **row} for name, row in models.items()],
        "scheduling": [scheduled_alone(shape, ops, profile) for shape in SHAPES for ops in options.graphs],
        "exponents": {column: round(exponent(rows, column), 2) for column in (*STAGES, "export", "total")},
        **imports,
        "import_ratio": round(imports["import_autostream_s"] / imports["import_torch_s"], 2),
        "command": " ".join(COMMAND),
        "command_s": round(command_seconds(), 2),
    }
    save("planning", result, _tables(result), options.out)
    return 0


def chained(ops: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A model with this number of ops, and its inputs."""
    return Chains(ops).eval(), (torch.randn(WIDTH, WIDTH),)


def workload(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A model of the zoo, and its inputs at batch size 1."""
    return zoo.INFERENCE[name].model().eval(), zoo.INFERENCE[name].inputs(1)


def planned(model: nn.Module, args: tuple[Tensor, ...], profile: DeviceProfile) -> dict[str, float]:
    """Seconds of each stage for a model, and of ``torch.export`` alone."""
    gc.collect()
    with torch.no_grad():
        start = time.perf_counter()
        torch.export.export(model, args, strict=False)
        export_s = time.perf_counter() - start
        gc.collect()
        report = pipeline.plan(model, args, {}, Options(), profile)
    assert report.graph is not None
    seconds = {stage: report.seconds[stage] for stage in STAGES}
    return {"ops": len(report.graph.ops), **seconds, "total": sum(seconds.values()), "export": export_s}


def chains(ops: int) -> list[list[int]]:
    """Eight chains of 16 ops that are summed and forked repeatedly: the positions of the ops that each op reads."""
    reads: list[list[int]] = []
    joined: list[int] = []
    while len(reads) < ops:
        ends = []
        for _ in range(WIDTH):
            start = len(reads)
            reads += [joined, *([at] for at in range(start, start + 15))]
            ends.append(len(reads) - 1)
        total = ends[0]
        for end in ends[1:]:
            reads.append([total, end])
            total = len(reads) - 1
        joined = [total]
    return reads


def layers(ops: int) -> list[list[int]]:
    """Each op reads one to three of the forty before it, from a fixed seed."""
    rng = random.Random(0)
    return [sorted({rng.randrange(max(0, at - 40), at) for _ in range(rng.randint(1, 3)) if at}) for at in range(ops)]


def towers(ops: int) -> list[list[int]]:
    """A thousand independent chains."""
    return [[at - 1000] if at >= 1000 else [] for at in range(ops)]


SHAPES: Mapping[str, Callable[[int], list[list[int]]]] = {"chains": chains, "layers": layers, "towers": towers}
"""Graphs by name: a function from the number of ops to the positions of the ops that each op reads."""


def graph_of(reads: Sequence[Sequence[int]]) -> OpGraph:
    """The graph of these reads; each op writes a new storage, and the last one is the output."""
    names = [f"op{at}" for at in range(len(reads))]
    written = [frozenset({name}) for name in names]
    none = frozenset[str]()
    return OpGraph(
        ops={
            name: Op(
                name,
                "aten.relu.default",
                (name,),
                none.union(*(written[other] for other in reads[at])),
                written[at],
                written[at],
            )
            for at, name in enumerate(names)
        },
        dependencies=tuple(
            Dependency(names[other], name, Hazard.RAW, names[other])
            for at, name in enumerate(names)
            for other in reads[at]
        ),
        storages={name: Storage(name, Role.INTERMEDIATE, 1024, (name,), escapes=name == names[-1]) for name in names},
        prelude=(),
        device="cuda:0",
    )


def scheduled(shape: str, ops: int, profile: DeviceProfile) -> dict[str, Any]:
    """Seconds of each policy from a graph to a verified and simulated schedule, and peak memory of this process, MB."""
    graph = graph_of(SHAPES[shape](ops))
    costs = {name: OpCost(2.0 + at % 7, 0.2, 0.1, "roofline") for at, name in enumerate(graph.ops)}
    seconds = {}
    for policy in POLICIES:
        if policy != "search":
            gc.collect()
            start = time.perf_counter()
            schedule = synchronize(graph, POLICIES[policy](graph, costs, profile, STREAMS, frozenset()))
            simulate(schedule, costs, profile)
            verify(graph, place_releases(graph, schedule))
            seconds[policy] = round(time.perf_counter() - start, 3)
    return {"shape": shape, "ops": len(graph.ops), **seconds, "peak_mb": peak_mb()}


def peak_mb() -> int:
    """Peak memory of this process, MB, on Linux. The peak of ``getrusage`` may be that of the parent process."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) // 1024


def scheduled_alone(shape: str, ops: int, profile: DeviceProfile) -> dict[str, Any]:
    """The same in a process of its own."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(scheduled, shape, ops, profile).result()


def exponent(rows: list[dict[str, float]], column: str) -> float:
    """The exponent k of time ∝ ops^k, from the first row to the last."""
    first, last = rows[0], rows[-1]
    if first["ops"] == last["ops"]:
        return math.nan
    return math.log(last[column] / first[column]) / math.log(last["ops"] / first["ops"])


def import_seconds() -> dict[str, float]:
    """Median seconds of importing torch and autostream in new processes, in turn."""
    times: dict[str, list[float]] = {"torch": [], "autostream": []}
    for _ in range(IMPORTS):
        for module, seconds in times.items():
            program = f"import time; start = time.perf_counter(); import {module}; print(time.perf_counter() - start)"
            seconds.append(float(subprocess.check_output([sys.executable, "-c", program])))
    return {module: median(seconds) for module, seconds in times.items()}


def command_seconds() -> float:
    """Median seconds of :data:`COMMAND`, with empty caches."""
    times = []
    for _ in range(COMMANDS):
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            command = [sys.executable, "-m", "autostream", *COMMAND]
            subprocess.run(command, env={**os.environ, "AUTOSTREAM_CACHE_DIR": folder}, check=True, capture_output=True)
            times.append(time.perf_counter() - start)
    return median(times)


def _median_row(rows: list[dict[str, float]]) -> dict[str, float]:
    return {column: round(median(row[column] for row in rows), 6) for column in rows[0]}


def _share(row: Mapping[str, float]) -> float:
    """Percentage of verification in the time of all stages."""
    return 100 * row["verify"] / row["total"]


def _tables(result: dict[str, Any]) -> str:
    columns = [*STAGES, "total", "export"]
    rows = [["", row["ops"], *(row[column] for column in columns), _share(row)] for row in result["rows"]]
    rows.append(["", "exponent", *(result["exponents"][column] for column in columns)])
    rows += [[row["model"], row["ops"], *(row[column] for column in columns), _share(row)] for row in result["models"]]
    seconds = [f"{column} (s)" for column in columns[:-1]]
    headers = ["model", "ops", *seconds, "torch.export alone (s)", "verify (% of total)"]
    times = f"importing autostream {result['import_autostream_s']} s, torch {result['import_torch_s']} s"
    alone = {"shape": "graph", "ops": "ops", "peak_mb": "peak memory (MB)"}
    graphs = [{alone.get(key, f"{key} (s)"): value for key, value in row.items()} for row in result["scheduling"]]
    return "\n\n".join(
        (
            tabulate(rows, headers, tablefmt="github", floatfmt=".3g"),
            f"One schedule of each policy, from a graph and its costs, for up to {STREAMS} streams; PyTorch is loaded:",
            tabulate(graphs, "keys", tablefmt="github", floatfmt=".3g"),
            f"{times}: ratio {result['import_ratio']}",
            f"autostream {result['command']}: {result['command_s']} s from the shell to the table",
        )
    )


if __name__ == "__main__":
    sys.exit(main())
