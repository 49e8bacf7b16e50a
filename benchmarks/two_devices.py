"""A training step on one GPU against the same step as a pipeline over two, in one process.

    python -m benchmarks.two_devices --out benchmarks/results/latest

The first half of the layers is on one GPU and the second on the other; the batch is the same, cut into microbatches.
The share says how long kernels or copies run on both GPUs at once, of the time in which they do on either, by a
profiler.
Without ``--kernels auto`` all ops are ATen's and nothing is tuned, on one GPU as on two.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

import autostream
from benchmarks.stamp import save, saving_parser, stamp

MICROBATCHES = 8
WARM_UP = 3
"""Steps before any is timed: the first makes the state of the optimizer, the second compiles."""


@dataclass(frozen=True)
class Case:
    """A model to train.

    Attributes:
        layers: makes one of them.
        count: of the layers.
        shape: of a batch.
    """

    layers: Callable[[], nn.Module]
    count: int
    shape: tuple[int, ...]


def encoder_layer(width: int = 2048) -> nn.Module:
    """A layer of a transformer."""
    return nn.TransformerEncoderLayer(width, width // 128, 4 * width, dropout=0.0, batch_first=True, norm_first=True)


def mlp_layer(width: int = 8192) -> nn.Module:
    """A linear layer with its activation."""
    return nn.Sequential(nn.Linear(width, width), nn.GELU())


CASES = {
    "encoder": Case(encoder_layer, 6, (64, 256, 2048)),
    "MLP": Case(mlp_layer, 8, (8192, 8192)),
}


class Halves(nn.Module):
    """Layers, the second half of them on another device."""

    def __init__(self, layers: Sequence[nn.Module], devices: tuple[str, str]) -> None:
        super().__init__()
        middle, self.there = len(layers) // 2, devices[1]
        self.first = nn.Sequential(*layers[:middle]).to(devices[0])
        self.second = nn.Sequential(*layers[middle:]).to(devices[1])

    def forward(self, x: Tensor) -> Tensor:
        """The second half of the first."""
        y: Tensor = self.second(self.first(x).to(self.there))
        return y


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The mean square difference, in float32."""
    loss: Tensor = (model(x) - y).float().square().mean()
    return loss


def made(
    case: Case, devices: tuple[str, str], dtype: torch.dtype
) -> tuple[Halves, torch.optim.Optimizer, list[Tensor]]:
    """A model over two devices, or twice the same, its optimizer and a batch."""
    torch.manual_seed(0)
    with torch.device(devices[0]):
        model = Halves([case.layers() for _ in range(case.count)], devices).to(dtype)
        batch = [torch.randn(case.shape, dtype=dtype) for _ in range(2)]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    return model, optimizer, [tensor.to(device) for tensor, device in zip(batch, devices, strict=True)]


def eager(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """The step as PyTorch runs it."""
    loss = loss_fn(model, x, y)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def busy_together(intervals: Iterable[tuple[int, float, float]]) -> float:
    """The share of the time in which both of two devices are busy, of the time in which either is.

    Args:
        intervals: device, start and end of each kernel and copy.

    Example:
        >>> busy_together([(0, 0.0, 3.0), (1, 2.0, 4.0)])
        0.25
    """
    points = sorted(
        (at, change, device) for device, *ends in intervals for at, change in zip(ends, (1, -1), strict=True)
    )
    running, before, both, either = {0: 0, 1: 0}, 0.0, 0.0, 0.0
    for at, change, device in points:
        both += (at - before) * (min(running.values()) > 0)
        either += (at - before) * (max(running.values()) > 0)
        running[device] += change
        before = at
    return both / either if either else 0.0


def watched(step: Callable[[], object]) -> float:
    """How long both devices are busy at once in a step; see :func:`busy_together`."""
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        step()
        synchronize()
    events = (each for each in profiler.events() if each.device_type == DeviceType.CUDA)
    return busy_together((each.device_index, each.time_range.start, each.time_range.end) for each in events)


def synchronize() -> None:
    """Wait for all devices."""
    for device in range(torch.cuda.device_count()):
        torch.cuda.synchronize(device)


def step_ms(step: Callable[[], object], steps: int = 10, rounds: int = 5) -> float:
    """The time of a step back to back, ms: the median of rounds."""
    times = []
    for _ in range(rounds):
        synchronize()
        start = perf_counter()
        for _ in range(steps):
            step()
        synchronize()
        times.append((perf_counter() - start) * 1e3 / steps)
    return median(times)


def row(name: str, kernels: str) -> dict[str, Any]:
    """One model: ms of a step on one GPU, in eager and as a graph, and over two."""
    case, bf16 = CASES[name], torch.bfloat16
    fixed = {} if kernels == "auto" else {"kernels": "eager", "policy": "sequential", "costs": "roofline"}
    found: dict[str, Any] = {"model": name, "microbatches": MICROBATCHES, "kernels": kernels}
    alone, pair = ("cuda:0", "cuda:0"), ("cuda:0", "cuda:1")
    for way, devices, count in (("eager", alone, 0), ("one_gpu", alone, 1), ("two_gpus", pair, MICROBATCHES)):
        model, optimizer, batch = made(case, devices, bf16)
        if count:
            options: dict[str, Any] = {"microbatches": count, "memory_budget": float("inf"), **fixed}
            train = autostream.train_step(model, optimizer, loss_fn, **options)
            step: Callable[[], Tensor] = partial(train, *batch)
        else:
            step = partial(eager, model, optimizer, *batch)
        start = perf_counter()
        losses = [step().item() for _ in range(WARM_UP)]
        found |= {f"{way}_prepare_s": perf_counter() - start, f"{way}_losses": losses}
        found[f"{way}_ms"] = step_ms(step)
        found[f"{way}_memory"] = [torch.cuda.max_memory_allocated(each) for each in dict.fromkeys(devices)]
        if count:
            report = train.reports[0]
            found[f"{way}_runs"] = [report.mode, *(refusal.reason for refusal in report.refusals[:1])]
            found[f"{way}_graphs"] = sum(part.mode == "cuda graph" for part in report.parts)
        if devices is pair:
            found["busy_together"] = watched(step)
        del model, optimizer, batch, step
        torch.cuda.empty_cache()
        for each in dict.fromkeys(devices):
            torch.cuda.reset_peak_memory_stats(each)
    return found


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each model."""
    lines = [
        [
            each["model"],
            each["eager_ms"],
            each["one_gpu_ms"],
            each["two_gpus_ms"],
            f"{each['one_gpu_ms'] / each['two_gpus_ms']:.2f}×",
            f"{each['busy_together']:.0%}",
            each["two_gpus_graphs"],
        ]
        for each in rows
    ]
    headers = ["model", "one GPU, eager, ms", "one GPU, ms", "two GPUs, ms", "speed", "both busy", "CUDA graphs"]
    return tabulate(lines, headers, tablefmt="github", floatfmt=".2f")


def main(argv: list[str] | None = None) -> int:
    """Measure, save and print the results."""
    parser = saving_parser("two_devices", __doc__)
    parser.add_argument("--kernels", choices=("eager", "auto"), default="eager", help="ATen's, or what is fastest")
    parser.add_argument("models", nargs="*", choices=[*CASES, []], help="which (default: all)")
    options = parser.parse_args(argv)
    if torch.cuda.device_count() < 2:
        parser.error("there are no two CUDA devices here")
    rows = [row(name, options.kernels) for name in options.models or CASES]
    save("two_devices", {"schema": 1, "stamp": stamp(), "rows": rows}, table(rows), options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
