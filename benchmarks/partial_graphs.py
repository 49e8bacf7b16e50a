"""The captured share of the device time of models with ops that cannot be captured in a CUDA graph.

    python -m benchmarks.partial_graphs --out benchmarks/results/latest

Each model has four branches, an op that cannot be captured, and four more branches; in the last model, a copy from the
host overlaps the first branches, and one to the host the second. The share is that of kernels and copies in replays of
CUDA graphs, by a profiler. The table also has the times of calls back to back.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

import autostream
from autostream.runtime.clock import clock_of, interleaved
from autostream.runtime.profiled_kernels import profiled, share_in_graphs
from benchmarks.stamp import save, saving_parser, stamp

WIDTH, ROWS, BRANCHES = 512, 1024, 4
CALLS = 10
"""Under the profiler."""

SETTLED = 200
"""Calls after which nothing is compiled or measured any more."""


def main(argv: list[str] | None = None) -> int:
    """Measure, save and print the results."""
    parser = saving_parser("partial_graphs", __doc__)
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device here: on the CPU nothing is captured")
    rows = [row(name) for name in MODELS]
    save("partial_graphs", {"schema": 1, "stamp": stamp(), "rows": rows}, table(rows), options.out)
    return 0


class Branches(nn.Module):
    """Parallel branches, a function, and as many branches again: (rows, WIDTH) to the same."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.before, self.after = (nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BRANCHES)) for _ in range(2))
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        """First branches, function, second branches."""
        return self.second(self.between(self.first(x)))

    def first(self, x: Tensor) -> Tensor:
        """The sum of the first branches."""
        return torch.stack([layer(x).relu() for layer in self.before]).sum(0)

    def second(self, x: Tensor) -> Tensor:
        """The sum of the second."""
        return torch.stack([layer(x).tanh() for layer in self.after]).sum(0)


class Copying(Branches):
    """Branches with a copy from the host that is needed late, and a copy to the host."""

    def __init__(self) -> None:
        super().__init__(nn.Identity())

    def forward(self, x: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """The output for a batch on the host, and the result of the first branches on the host."""
        middle = self.first(x)
        return self.second(middle + batch.to(x.device, non_blocking=True)), middle.cpu()


BETWEEN: Mapping[str, Callable[[Tensor], Tensor]] = {
    "a number": lambda x: x / (1 + x.abs().max().item()),
    "a branch on data": lambda x: x / 2 if x.mean() > 0 else -x,
    "an op on the CPU": lambda x: x + x.mean(0).cpu().flip(0).to(x.device),
    "a shape that depends on data": lambda x: x + x[x.sum(1).nonzero()[:, 0]].sum(0),
}
"""Functions that cannot be captured."""

COPIES = "copies from the host and to it"

MODELS: Mapping[str, Callable[[], Branches]] = {
    **{name: partial(Branches, between) for name, between in BETWEEN.items()},
    COPIES: Copying,
}
"""Models by what cannot be captured."""


def inputs(name: str, rows: int, device: torch.device | str) -> tuple[Tensor, ...]:
    """Inputs of a model; those that it copies are on the host, pinned if there is a GPU, and four times as large.

    Copies of smaller ones are shorter than the launches that they should overlap.
    """
    if name != COPIES:
        return (torch.randn(rows, WIDTH, device=device),)
    x, batch = torch.randn(4 * rows, WIDTH, device=device), torch.randn(4 * rows, WIDTH)
    return x, batch if x.device.type == "cpu" else batch.pin_memory()


@torch.no_grad()
def row(name: str) -> dict[str, Any]:
    """One model: the captured share, and median µs of a call in eager and optimized."""
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
    calls_by_mode = {"eager": partial(model, *args), "autostream": partial(fast, *args)}
    times = interleaved(calls_by_mode, clock_of(device), lambda mode: None)
    return {
        "between": name,
        "captured_share": round(share, 4),
        **{f"{mode}_us": round(median(of.call_us), 2) for mode, of in times.items()},
    }


def table(rows: list[dict[str, Any]]) -> str:
    """A line for each model."""
    lines = [[row["between"], f"{row['captured_share']:.0%}", row["eager_us"], row["autostream_us"]] for row in rows]
    headers = ["in between", "captured", "eager, µs", "autostream, µs"]
    return tabulate(lines, headers, tablefmt="github", floatfmt=".1f")


if __name__ == "__main__":
    sys.exit(main())
