"""How long planning takes, by the number of ops, and how long importing autostream takes.

    python -m benchmarks.planning --out benchmarks/results/latest

No device is needed: models of eight chains, joined now and then, are planned for an H200 with default options. Of
tracing, nearly all is ``torch.export``'s own: it is also timed alone.
"""

from __future__ import annotations

import argparse
import gc
import math
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

from autostream import pipeline
from autostream.costs.device import known_names, profile_named
from autostream.ir import DeviceProfile
from autostream.options import Options
from benchmarks.stamp import RESULTS, save, stamp

STAGES = ("trace", "analyze", "price", "schedule", "verify")
SIZES = (1_000, 2_000, 5_000, 10_000)
WIDTH = 8
IMPORTS = 7


class Chains(nn.Module):
    """Chains of ``relu(x @ w)`` over a few shared weights, added up after every so many ops of each.

    Args:
        ops: as many as there are to be, or a few more.
        chains: how many may run side by side.
        weights: how many they share.
        joint: ops of each chain between two sums.
    """

    def __init__(self, ops: int, chains: int = 8, weights: int = 16, joint: int = 16) -> None:
        super().__init__()
        self.chains = chains
        self.layers = joint // 2
        self.joints = math.ceil(ops / (chains * joint + chains - 1))
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) / WIDTH**0.5 for _ in range(weights))

    def forward(self, x: Tensor) -> Tensor:
        """Add up what the chains make of ``x``, again and again."""
        for _ in range(self.joints):
            x = sum((self._chain(x) for _ in range(self.chains - 1)), self._chain(x))
        return x

    def _chain(self, x: Tensor) -> Tensor:
        for layer in range(self.layers):
            x = torch.relu(x @ self.weights[layer % len(self.weights)])
        return x


def main(argv: list[str] | None = None) -> int:
    """Measure, save and print the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planning", description=__doc__.splitlines()[0])
    parser.add_argument("sizes", nargs="*", type=int, metavar="OPS", help=f"default: {' '.join(map(str, SIZES))}")
    parser.add_argument("--profile", default="h200", choices=known_names(), help="plan for this device (default: h200)")
    parser.add_argument("--rounds", type=int, default=3, help="measure so many times, keep the medians (default: 3)")
    parser.add_argument("--out", type=Path, default=RESULTS / "latest", help="folder for the JSON and the tables")
    options = parser.parse_args(argv)
    sizes, profile = options.sizes or SIZES, profile_named(options.profile)
    planned(64, profile)  # the first one loads code
    rows = [_median_row([planned(size, profile) for _ in range(options.rounds)]) for size in sizes]
    imports = {f"import_{name}_s": round(seconds, 3) for name, seconds in import_seconds().items()}
    result: dict[str, Any] = {
        "schema": 1,
        "stamp": stamp(),
        "profile": profile.name,
        "rows": rows,
        "exponents": {column: round(exponent(rows, column), 2) for column in (*STAGES, "export", "total")},
        **imports,
        "import_ratio": round(imports["import_autostream_s"] / imports["import_torch_s"], 2),
    }
    save("planning", result, _tables(result), options.out)
    return 0


def planned(ops: int, profile: DeviceProfile) -> dict[str, float]:
    """Seconds that each stage takes for a model of so many ops, and that ``torch.export`` takes alone."""
    model, x = Chains(ops).eval(), torch.randn(WIDTH, WIDTH)
    gc.collect()
    with torch.no_grad():
        start = time.perf_counter()
        torch.export.export(model, (x,), strict=False)
        export_s = time.perf_counter() - start
        gc.collect()
        report = pipeline.plan(model, (x,), {}, Options(), profile)
    assert report.graph is not None
    seconds = {stage: report.seconds[stage] for stage in STAGES}
    return {"ops": len(report.graph.ops), **seconds, "total": sum(seconds.values()), "export": export_s}


def exponent(rows: list[dict[str, float]], column: str) -> float:
    """The growth from the first row to the last: time goes with the number of ops to the power of this."""
    first, last = rows[0], rows[-1]
    if first["ops"] == last["ops"]:
        return math.nan
    return math.log(last[column] / first[column]) / math.log(last["ops"] / first["ops"])


def import_seconds() -> dict[str, float]:
    """Median seconds of importing torch, and autostream, each in a new process, in turn."""
    times: dict[str, list[float]] = {"torch": [], "autostream": []}
    for _ in range(IMPORTS):
        for module, seconds in times.items():
            program = f"import time; start = time.perf_counter(); import {module}; print(time.perf_counter() - start)"
            seconds.append(float(subprocess.check_output([sys.executable, "-c", program])))
    return {module: median(seconds) for module, seconds in times.items()}


def _median_row(rows: list[dict[str, float]]) -> dict[str, float]:
    return {column: round(median(row[column] for row in rows), 6) for column in rows[0]}


def _tables(result: dict[str, Any]) -> str:
    columns = ["ops", *STAGES, "total", "export"]
    rows = [[row[column] for column in columns] for row in result["rows"]]
    rows.append(["exponent", *(result["exponents"][column] for column in columns[1:])])
    headers = ["ops", *(f"{column} (s)" for column in columns[1:-1]), "torch.export alone (s)"]
    times = f"importing autostream {result['import_autostream_s']} s, torch {result['import_torch_s']} s"
    return f"{tabulate(rows, headers, tablefmt='github', floatfmt='.3g')}\n\n{times}: ratio {result['import_ratio']}"


if __name__ == "__main__":
    sys.exit(main())
