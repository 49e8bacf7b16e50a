"""How much of a model's time on the device is captured, where it holds what no CUDA graph can.

    python -m benchmarks.partial_graphs --out benchmarks/results/latest

Each model is two times four branches, and something in between; in the last, a copy from the host runs beside the first
branches, and one to the host beside the second. The share is what a profiler sees: kernels and copies that ran in
replays of CUDA graphs, of all that ran. Beside it stand the times of calls back to back.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

import autostream
from autostream.runtime.clock import clock_of, interleaved
from autostream.runtime.measured_timeline import profiled, share_in_graphs
from benchmarks.stamp import RESULTS, save, stamp

WIDTH, ROWS, BRANCHES = 512, 1024, 4
CALLS = 10
"""Under the profiler."""

SETTLED = 200
"""Calls after which nothing is compiled any more, or tried in pieces and plainly by turns."""


def main(argv: list[str] | None = None) -> int:
    """Measure, save and print the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.partial_graphs", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS / "latest", help="folder for the JSON and the table")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device here: on the CPU nothing is captured")
    rows = [row(name) for name in MODELS]
    save("partial_graphs", {"schema": 1, "stamp": stamp(), "rows": rows}, table(rows), options.out)
    return 0


class Branches(nn.Module):
    """Branches side by side, something in between, and as many branches again: (rows, WIDTH) to the same."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.before, self.after = (nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BRANCHES)) for _ in range(2))
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        """What the second branches make of the sum of the first."""
        return self.second(self.between(self.first(x)))

    def first(self, x: Tensor) -> Tensor:
        """The sum of the first branches."""
        return torch.stack([layer(x).relu() for layer in self.before]).sum(0)

    def second(self, x: Tensor) -> Tensor:
        """The sum of the second."""
        return torch.stack([layer(x).tanh() for layer in self.after]).sum(0)


class Copying(Branches):
    """Branches that need two copies of (rows, WIDTH) only later, or not at all."""

    def __init__(self) -> None:
        super().__init__(nn.Identity())

    def forward(self, x: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """What the second branches make of the first and of a batch on the host, and there, what the first made."""
        middle = self.first(x)
        return self.second(middle + batch.to(x.device, non_blocking=True)), middle.cpu()


BETWEEN: Mapping[str, Callable[[Tensor], Tensor]] = {
    "a number": lambda x: x / (1 + x.abs().max().item()),
    "a branch on data": lambda x: x / 2 if x.mean() > 0 else -x,
    "an op on the CPU": lambda x: x + x.mean(0).cpu().flip(0).to(x.device),
    "a shape that depends on data": lambda x: x + x[x.sum(1).nonzero()[:, 0]].sum(0),
}
"""What no CUDA graph can hold."""

COPIES = "copies from the host and to it"

MODELS: Mapping[str, Callable[[], Branches]] = {
    **{name: partial(Branches, between) for name, between in BETWEEN.items()},
    COPIES: Copying,
}
"""By what they hold that no CUDA graph can."""


def inputs(name: str, rows: int, device: torch.device | str) -> tuple[Tensor, ...]:
    """A batch for a model; what it copies itself is on the host, pinned if there is a device, and four times as large.

    Smaller ones take the host less than the launches that they are to run beside.
    """
    if name != COPIES:
        return (torch.randn(rows, WIDTH, device=device),)
    x, batch = torch.randn(4 * rows, WIDTH, device=device), torch.randn(4 * rows, WIDTH)
    return x, batch if x.device.type == "cpu" else batch.pin_memory()


@torch.no_grad()
def row(name: str) -> dict[str, Any]:
    """One model: the share, and median µs of a call as it is and optimized."""
    torch.manual_seed(0)
    device = torch.device("cuda", torch.cuda.current_device())
    model, args = MODELS[name]().to(device), inputs(name, ROWS, device)
    fast = autostream.optimize(model)
    torch.testing.assert_close(fast(*args), model(*args), rtol=1e-3, atol=1e-3)
    for _ in range(SETTLED):
        fast(*args)

    def calls() -> None:
        for _ in range(CALLS):
            fast(*args)

    share = share_in_graphs(profiled(calls, str(device)))
    ways = {"eager": partial(model, *args), "autostream": partial(fast, *args)}
    times = interleaved(ways, clock_of(device), lambda turn: None)
    return {
        "between": name,
        "captured_share": round(share, 4),
        **{f"{way}_us": round(median(of.call_us), 2) for way, of in times.items()},
    }


def table(rows: list[dict[str, Any]]) -> str:
    """A line for each model."""
    lines = [[row["between"], f"{row['captured_share']:.0%}", row["eager_us"], row["autostream_us"]] for row in rows]
    headers = ["in between", "captured", "eager, µs", "autostream, µs"]
    return tabulate(lines, headers, tablefmt="github", floatfmt=".1f")


if __name__ == "__main__":
    sys.exit(main())
