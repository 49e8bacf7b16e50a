"""Time to the first results in a new process, with empty caches and with full ones.

    python -m benchmarks.startup googlenet resnet50 --out benchmarks/results/latest

Each mode of each workload runs in a process of its own, which imports torch, makes the model and runs it once in eager.
Then the first calls of the mode are timed, up to its full speed. Caches of compilers are empty in the first round, and
those of the first round in later ones.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from tabulate import tabulate

from benchmarks import zoo
from benchmarks.harness.modes import modes_of
from benchmarks.stamp import save, saving_parser, stamp

MODES = ("compile_reduce_overhead", "autostream")
"""The baseline, and autostream."""

WORKLOADS = ("googlenet", "resnet50", "bert_base", "towers8")
CALLS = 3
"""``reduce-overhead`` warms up in the first call, captures in the second, and replays from the third one on."""


def main(argv: list[str] | None = None) -> int:
    """Measure, save and print the results."""
    parser = saving_parser("startup", __doc__)
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=f"default: {' '.join(WORKLOADS)}")
    parser.add_argument("--warm", type=int, default=1, help="rounds from the caches; their median is kept (default: 1)")
    options = parser.parse_args(argv)
    unknown = set(options.workloads) - set(zoo.INFERENCE)
    if unknown:
        parser.error(f"{min(unknown)}: use {', '.join(zoo.INFERENCE)}")
    rows: list[dict[str, Any]] = []
    result: dict[str, Any] = {"schema": 1, "stamp": stamp(), "calls": CALLS, "rows": rows}
    for name in options.workloads or WORKLOADS:
        rows.append(row(name, options.warm))
        save("startup", result, table(rows), options.out)  # after each row, in case the process is killed
    return 0


def row(workload: str, warm: int, modes: Sequence[str] = MODES) -> dict[str, Any]:
    """Seconds of each mode to full speed, with empty and with full caches."""
    cells = {}
    for mode in modes:
        with tempfile.TemporaryDirectory() as caches:
            cold, *again = (_in_a_process(workload, mode, caches) for _ in range(1 + warm))
        cells[mode] = {"cold_s": round(cold, 2), "warm_s": round(median(again), 2) if again else None}
    return {"workload": workload, **cells}


def table(rows: list[dict[str, Any]]) -> str:
    """A line for each workload, with the ratio of autostream to the baseline."""
    kinds = ("cold_s", "warm_s")
    lines = []
    for measured in rows:
        line = [measured["workload"]]
        for kind in kinds:
            theirs, ours = (measured[mode][kind] for mode in MODES)
            line += [theirs, ours, None if ours is None else f"{ours / theirs:.2f}×"]
        lines.append(line)
    headers = [
        "workload",
        *(f"{name}, {kind[:-2]}" for kind in kinds for name in (*(f"{m} s" for m in MODES), "ratio")),
    ]
    return tabulate(lines, headers, tablefmt="github")


def _in_a_process(workload: str, mode: str, caches: str) -> float:
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor",
        "TRITON_CACHE_DIR": f"{caches}/triton",
        "AUTOSTREAM_CACHE_DIR": f"{caches}/autostream",
    }
    program = f"from benchmarks.startup import first; first({workload!r}, {mode!r})"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], env=environment, stdout=subprocess.PIPE)
    if done.returncode:
        raise SystemExit(f"{workload} in the mode {mode} failed: its process ended with {done.returncode}")
    return float(json.loads(done.stdout.splitlines()[-1]))


def first(workload: str, mode: str) -> None:
    """Print the seconds of the first calls of a workload in this process."""
    cuda = torch.cuda.is_available()
    device, dtype = (torch.device("cuda", 0), torch.float16) if cuda else (torch.device("cpu"), torch.float32)
    subject = zoo.prepare(zoo.INFERENCE[workload], 1, device, dtype)  # runs it once, which loads libraries
    start = time.perf_counter()
    with torch.no_grad():
        call = modes_of(device)[mode](subject.model, subject.args)
        for _ in range(CALLS):
            call(*subject.args)
    if cuda:
        torch.cuda.synchronize()
    print(json.dumps(time.perf_counter() - start))


if __name__ == "__main__":
    sys.exit(main())
