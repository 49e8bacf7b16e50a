"""How much faster a model's ATen calls run over several streams than over one, both captured as CUDA graphs.

    python -m benchmarks.aten_level --out benchmarks/results/h200-torch2.11

The baseline is the same eager code captured on one stream. Both sides copy the input into static memory, replay, and
copy the output out; they run in interleaved rounds, timed by device events around back-to-back calls.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

import autostream
from autostream import zoo
from benchmarks.stamp import RESULTS, save, stamp

WORKLOADS = {
    "googlenet": 1.7,
    "inception_v3": 1.5,
    "nasnetalarge": 1.9,
    "resnet50": 0.98,
    "mobilenet_v2": 0.98,
    "densenet121": 0.98,
    "squeezenet1_1": None,
}
"""Zoo name to the ratio to reach, where one is set."""

ROUNDS = 25
ROUND_US = 4000.0


def main(argv: list[str] | None = None) -> int:
    """Measure the workloads, save and print the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.aten_level", description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(WORKLOADS)}; default: all")
    parser.add_argument("--out", type=Path, default=RESULTS / "latest", help="folder for the JSON and the table")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a CUDA device")
    rows = []
    for name in options.models or WORKLOADS:
        print(name, file=sys.stderr, flush=True)
        rows.append(_attempted(name))
        print(rows[-1], file=sys.stderr, flush=True)
        torch.cuda.empty_cache()
    result = {"schema": 1, "stamp": stamp(), "dtype": "float16", "batch": 1, "rows": rows}
    save("aten-level", result, _table(rows), options.out)
    return 0


def _attempted(name: str) -> dict[str, Any]:
    try:
        return _measured(name)
    except Exception as error:  # a model that fails is a row like any other
        traceback.print_exc()
        return {"model": name, "error": f"{type(error).__name__}: {error}"}


def _measured(name: str) -> dict[str, Any]:
    model, (x,) = zoo.build(name)
    model, x = calibrated(model.cuda(), x.cuda()).half(), x.cuda().half()
    with torch.inference_mode():
        eager = model(x)
        baseline = captured(model, x)
        start = time.perf_counter()
        fast = autostream.optimize(model, x)
        tuning_s = time.perf_counter() - start
        outputs = fast(x)
        report = fast.reports[0]
        times = _interleaved([lambda: baseline(x), lambda: fast(x)])
    ratios = [a / b for a, b in zip(*times, strict=True)]
    chosen = report.chosen
    return {
        "model": name,
        "graph_us": round(median(times[0]), 1),
        "graph_iqr_us": round(_iqr(times[0]), 1),
        "autostream_us": round(median(times[1]), 1),
        "autostream_iqr_us": round(_iqr(times[1]), 1),
        "ratio": round(median(ratios), 3),
        "target": WORKLOADS.get(name),
        "mode": report.mode,
        "policy": chosen.schedule.policy if chosen else None,
        "streams": chosen.schedule.streams if chosen else None,
        "waits": chosen.schedule.wait_count if chosen else None,
        "ops": len(report.graph.ops) if report.graph else None,
        "predicted_us": round(chosen.predicted_us, 1) if chosen else None,
        "candidates": [
            [c.schedule.policy, c.schedule.streams, round(c.predicted_us, 1), c.measured_us and round(c.measured_us, 1)]
            for c in report.candidates
        ],
        "tuning_s": round(tuning_s, 1),
        "seconds": {stage: round(seconds, 2) for stage, seconds in report.seconds.items()},
        "output_norm": float(eager.double().norm()),
        "finite": bool(torch.isfinite(eager).all()),
        "equal_to_eager": torch.equal(outputs, eager),
        "relative_error": float((outputs.double() - eager.double()).norm() / eager.double().norm()),
    }


def calibrated(model: nn.Module, x: Tensor) -> nn.Module:
    """The model with batch statistics of its own: random weights and no statistics let activations vanish in fp16."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    for norm in norms:
        norm.momentum = 1.0
    torch.manual_seed(0)
    with torch.no_grad():
        model.train()(torch.randn(8, *x.shape[1:], device=x.device))
    return model.eval()


def captured(model: nn.Module, x: Tensor) -> Callable[[Tensor], Tensor]:
    """The eager model captured on one stream, as a function that takes any such input and returns a new output."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    static_x = x.clone()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            model(static_x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        static_y = model(static_x)

    def call(x: Tensor) -> Tensor:
        static_x.copy_(x)
        graph.replay()
        copy: Tensor = static_y.clone()
        return copy

    return call


def _interleaved(calls: list[Callable[[], object]]) -> list[list[float]]:
    """µs of one call, by call and round; all calls take their turn in each round, in alternating order."""
    counts = [max(3, round(ROUND_US / max(_device_us(call, 5), 1.0))) for call in calls]
    times: list[list[float]] = [[] for _ in calls]
    for turn in range(ROUNDS):
        order = range(len(calls)) if turn % 2 else reversed(range(len(calls)))
        for index in order:
            times[index].append(_device_us(calls[index], counts[index]))
    return times


def _device_us(call: Callable[[], object], runs: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    call()
    start.record()
    for _ in range(runs):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / runs * 1e3


def _iqr(times: list[float]) -> float:
    low, _, high = quantiles(times, n=4)
    return high - low


def _table(rows: list[dict[str, Any]]) -> str:
    columns = ["model", "graph_us", "autostream_us", "ratio", "target", "mode", "policy", "streams", "waits", "ops"]
    columns += ["tuning_s", "equal_to_eager", "error"]
    return tabulate([[row.get(column, "") for column in columns] for row in rows], columns, tablefmt="github")


if __name__ == "__main__":
    sys.exit(main())
