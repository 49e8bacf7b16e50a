"""Speedup by prefetching: a loop whose copies take about as long as its work, in several variants.

    python -m benchmarks.prefetching --out benchmarks/results/latest

All batches are in pinned memory. The work on a batch is a number of matrix products that take as long as its copy, so
the bound of the speedup is 2. As a captured graph, the work reads a copy of each batch (`graph`), or the batch where it
was prefetched to (`graph into`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

import autostream
from autostream.runtime.clock import clock_of
from benchmarks.stamp import save, saving_parser, stamp

MIB = 2**20
SIZES = (1, 8, 64)
"""MiB of a batch."""

BATCHES = 60
"""In one loop; the first copy cannot overlap."""

ROUNDS = 7

WIDTH = 1024
"""Width of the products: each takes the device longer than the host."""

VARIANTS = ("copy", "work", "synchronous", "non_blocking", "prefetch", "graph", "graph_into")
"""Variants of the loop; the first two are copy and work alone."""


def main(argv: list[str] | None = None) -> int:
    """Measure, save and print the results."""
    parser = saving_parser("prefetching", __doc__)
    parser.add_argument("--mib", type=int, nargs="+", default=SIZES, help="of a batch (default: %(default)s)")
    parser.add_argument("--depth", type=int, default=2, help="of prefetch (default: %(default)s)")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device here: on the CPU nothing is copied")
    device = torch.device("cuda", 0)
    rows = [row(size, options.depth, device) for size in options.mib]
    result: dict[str, Any] = {"schema": 1, "stamp": stamp(), "batches": BATCHES, "depth": options.depth, "rows": rows}
    save("prefetching", result, table(rows), options.out)
    return 0


def row(mib: int, depth: int, device: torch.device) -> dict[str, Any]:
    """Median µs for a batch by variant, in interleaved rounds."""
    clock, pinned = clock_of(device), torch.ones(mib * MIB // 4).pin_memory()
    target, weight = torch.empty_like(pinned, device=device), torch.full((WIDTH, WIDTH), 1 / WIDTH, device=device)
    copy_us = clock.once_us(lambda: target.copy_(pinned, non_blocking=True))
    products = Work(weight, 20)  # a single one would be bound by the host
    product_us = clock.once_us(lambda: products(target)) / products.products
    calls = loops([pinned] * BATCHES, depth, device, weight, max(1, round(copy_us / product_us)))
    rounds = [{name: clock.once_us(call) / BATCHES for name, call in calls.items()} for _ in range(1 + ROUNDS)]
    return {"mib": mib, **{f"{name}_us": round(median(each[name] for each in rounds[1:]), 2) for name in calls}}


class Work(nn.Module):
    """A chain of products, and the first number of the batch."""

    def __init__(self, weight: Tensor, products: int) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.products = products

    def forward(self, batch: Tensor) -> Tensor:
        """The first number of the batch, after the products."""
        result = weight = self.get_buffer("weight")
        for _ in range(self.products):
            result = torch.mm(weight, result)
        return batch[0] + 0 * result[0, 0]


def loops(
    batches: Sequence[Tensor], depth: int, device: torch.device, weight: Tensor, products: int
) -> Mapping[str, Callable[[], Tensor]]:
    """The variants of the loop. Each returns the sum of the first numbers of all batches."""
    result, total = torch.empty_like(weight), torch.zeros((), device=device)

    def work(loader: Iterable[Tensor]) -> Tensor:
        total.zero_()
        for batch in loader:
            for _ in range(products):
                torch.mm(weight, weight, out=result)
            total.add_(batch[0])
        return total

    fast = autostream.optimize(Work(weight, products), policy="sequential", kernels="eager")

    @torch.no_grad()
    def replays(loader: Iterable[Tensor]) -> Tensor:
        total.zero_()
        for batch in loader:
            total.add_(fast(batch))
        return total

    def copies() -> Tensor:
        for batch in batches:
            total.copy_(batch.to(device, non_blocking=True)[0])
        return total

    on_device = batches[0].to(device)
    return {
        "copy": copies,
        "work": lambda: work([on_device] * len(batches)),
        "synchronous": lambda: work(batch.to(device) for batch in batches),
        "non_blocking": lambda: work(batch.to(device, non_blocking=True) for batch in batches),
        "prefetch": partial(work, autostream.prefetch(batches, device, depth)),
        "graph": partial(replays, autostream.prefetch(batches, device, depth)),
        "graph_into": partial(replays, autostream.prefetch(batches, device, depth, into=fast)),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """A line for each size: µs, speedup over the synchronous loop, and the share of the bound."""
    lines = []
    for measured in rows:
        us = {name: measured[f"{name}_us"] for name in VARIANTS}
        times, share = us["synchronous"] / us["prefetch"], max(us["copy"], us["work"]) / us["prefetch"]
        lines.append([measured["mib"], *us.values(), f"{times:.2f}×", f"{share:.2f}"])
    headers = ["MiB", *(f"{name.replace('_', ' ')}, µs" for name in VARIANTS), "gain", "of what is possible"]
    return tabulate(lines, headers, tablefmt="github")


if __name__ == "__main__":
    sys.exit(main())
