"""Do losses over many training steps follow eager ones, as closely as eager ones follow each other?

    python -m benchmarks.losses --workloads train_encoder6,train_dlrm --out benchmarks/results/latest

Steps round, and what is rounded in another order comes out differently, more so with each step. So eager steps are done
several times, each time with the rows of the batch in another order: the same sums in exact arithmetic. How far one of
these runs is at most from the mean of the others is the spread; ``autostream`` is to be as near to that mean.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor

from autostream.arguments import names
from autostream.bench.training import Step, TrainingSubject, eager
from autostream.training import train_step
from benchmarks import zoo
from benchmarks.stamp import RESULTS, save, stamp

STEPS, WINDOW = 200, 10
"""Losses are compared as means of so many steps."""

RUNS = 6
"""Of eager steps."""


def main(argv: list[str] | None = None) -> int:
    """Train, save and print the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.losses", description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", type=names, default=list(zoo.TRAINING), metavar="A,B", help="only these")
    parser.add_argument("--out", type=Path, default=RESULTS / "latest", help="folder for the JSON and the table")
    options = parser.parse_args(argv)
    if unknown := [name for name in options.workloads if name not in zoo.TRAINING]:
        parser.error(f"there is no workload {unknown[0]}: use {', '.join(zoo.TRAINING)}")
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device here")
    device, rows = torch.device("cuda", torch.cuda.current_device()), []
    for name in options.workloads:
        rows += [row(zoo.TRAINING[name], optimizer, device, torch.bfloat16) for optimizer in zoo.OPTIMIZERS]
        save("losses", {"schema": 1, "stamp": stamp(), "rows": rows}, table(rows), options.out)
    return 0


def row(workload: zoo.TrainingWorkload, optimizer: str, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """One workload with one optimizer: how far runs are from eager ones, relative to the largest loss."""
    batch = workload.batches[0]
    make = partial(zoo.prepare_training, workload, batch, optimizer, device, dtype)
    orders = [torch.arange(batch)]
    orders += [torch.randperm(batch, generator=torch.Generator().manual_seed(run)) for run in range(1, RUNS)]
    plain = [losses(make(), eager, order) for order in orders]
    ours = losses(make(), _autostream, orders[0])
    return {
        "workload": workload.name,
        "batch": batch,
        "optimizer": optimizer,
        "steps": STEPS,
        "first": round(float(plain[0][0]), 5),
        "last": round(float(plain[0][-1]), 5),
        "spread": _handy(spread(plain)),
        "autostream": _handy(distance(ours, plain)),
    }


def _handy(share: float) -> float:
    return float(f"{share:.3g}")


def _autostream(subject: TrainingSubject) -> Step:
    return train_step(subject.model, subject.optimizer, subject.loss)


def losses(subject: TrainingSubject, way: Callable[[TrainingSubject], Step], order: Tensor) -> Tensor:
    """Of each window of steps the mean loss, with the batch's rows in this order."""
    step, data = way(subject), [tensor[order.to(tensor.device)] for tensor in subject.data]
    found = torch.stack([step(*data).detach().double() for _ in range(STEPS)])
    return found.view(-1, WINDOW).mean(1).cpu()


def spread(curves: Sequence[Tensor]) -> float:
    """How far one of these curves is at most from the mean of the others.

    Example:
        >>> spread([torch.tensor([2.0, 1.0]), torch.tensor([2.0, 1.0]), torch.tensor([2.0, 1.5])])
        0.25
    """
    others = ([other for other in curves if other is not curve] for curve in curves)
    return max(map(distance, curves, others))


def distance(curve: Tensor, curves: Sequence[Tensor]) -> float:
    """How far a curve is at most from the mean of others, relative to the largest value of that.

    Raises:
        ValueError: a loss is not finite.

    Example:
        >>> distance(torch.tensor([2.0, 1.0]), [torch.tensor([2.0, 1.0]), torch.tensor([2.0, 2.0])])
        0.25
    """
    mean = torch.stack(list(curves)).mean(0)
    if not (curve.isfinite().all() and mean.isfinite().all()):
        raise ValueError("a loss is not finite")
    return float((curve - mean).abs().max() / mean.abs().max())


def table(rows: list[dict[str, Any]]) -> str:
    """A line for each row."""
    lines = [
        [
            f"{row['workload']} ×{row['batch']} {row['optimizer']}",
            f"{row['first']:.4f} to {row['last']:.4f}",
            f"{row['spread']:.2g}",
            f"{row['autostream']:.2g}",
        ]
        for row in rows
    ]
    headers = ["workload", f"loss over {STEPS} steps", "eager runs differ by", "autostream from them by"]
    return tabulate(lines, headers, tablefmt="github", disable_numparse=True)


if __name__ == "__main__":
    sys.exit(main())
