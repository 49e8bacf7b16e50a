"""Whether losses over many training steps differ from eager ones by no more than eager runs from each other.

    python -m benchmarks.losses --workloads train_encoder6,train_dlrm --out benchmarks/results/latest

Rounding in another order gives other losses, more so with each step. So eager runs are repeated with the rows of the
batch in other orders, and with gradients accumulated over parts of it: equal in exact arithmetic. The spread is the
largest distance of one of these runs from the mean of the others; ``autostream`` should be as near to the mean of all.
Weights are in bfloat16, or in float32 under autocast.

The optimizer's kernels are the fused ones, which compute an update in float32 and round once, as a scheduled step does.
In bfloat16 the others round after every operation, which changes losses by more than another order of sums.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

from autostream.cli.arguments import names
from benchmarks import zoo
from benchmarks.harness.training import Step, TrainingSubject, eager, scheduled
from benchmarks.stamp import earlier_rows, save, saving_parser, stamp

STEPS, WINDOW = 200, 10
"""Losses are compared as means over windows of steps."""

ORDERS = 2
"""Number of orders of the rows of a batch, the original one included."""

PARTS = (1, 2, 4)
"""Numbers of equal parts of a batch, over which gradients are accumulated."""

AUTOCAST = "bfloat16 autocast"
PRECISIONS = {"bfloat16": torch.bfloat16, AUTOCAST: torch.float32}
"""Precisions, with the dtype of weights."""


def main(argv: list[str] | None = None) -> int:
    """Train, save and print the results."""
    parser = saving_parser("losses", __doc__)
    parser.add_argument("--workloads", type=names, default=list(zoo.TRAINING), metavar="A,B", help="only these")
    options = parser.parse_args(argv)
    if unknown := [name for name in options.workloads if name not in zoo.TRAINING]:
        parser.error(f"there is no workload {unknown[0]}: use {', '.join(zoo.TRAINING)}")
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device here")
    device, now = torch.device("cuda", torch.cuda.current_device()), stamp()
    for name, optimizer, precision in product(options.workloads, zoo.OPTIMIZERS, PRECISIONS):
        found = row(zoo.TRAINING[name], optimizer, precision, device)
        earlier = earlier_rows("losses", options.out, now)  # read late: another process may have written
        rows = list({_key(row): row for row in (*earlier, found)}.values())
        save("losses", {"schema": 1, "stamp": now, "rows": rows}, table(rows), options.out)
    return 0


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["workload"], row["optimizer"], row["precision"]


def row(workload: zoo.TrainingWorkload, optimizer: str, precision: str, device: torch.device) -> dict[str, Any]:
    """One workload with one optimizer: relative spread of eager runs, and distance of autostream."""
    batch = workload.batches[0]

    def subject() -> TrainingSubject:
        made = zoo.prepare_training(workload, batch, optimizer, device, PRECISIONS[precision])
        return replace(made, loss=partial(_autocast, made.loss)) if precision == AUTOCAST else made

    orders = [torch.arange(batch)]
    orders += [torch.randperm(batch, generator=torch.Generator().manual_seed(run)) for run in range(1, ORDERS)]
    parts = [count for count in PARTS if count == 1 or not _normalizes_batches(subject().model)]
    plain = [losses(in_parts(subject(), count), eager, order) for count, order in product(parts, orders)]
    ours = losses(subject(), scheduled, orders[0])
    return {
        "workload": workload.name,
        "batch": batch,
        "optimizer": optimizer,
        "precision": precision,
        "steps": STEPS,
        "first": round(float(plain[0][0]), 5),
        "last": round(float(plain[0][-1]), 5),
        "spread": _rounded(spread(plain)),
        "autostream": _rounded(distance(ours, plain)),
    }


def _rounded(share: float) -> float:
    return float(f"{share:.3g}")


def _autocast(loss: Callable[..., Tensor], model: nn.Module, *data: Tensor) -> Tensor:
    with torch.autocast(data[0].device.type, torch.bfloat16):
        return loss(model, *data)


def in_parts(subject: TrainingSubject, count: int) -> TrainingSubject:
    """The subject with the loss averaged over equal parts of a batch."""
    return replace(subject, loss=partial(_mean_loss, subject.loss, count))


def _mean_loss(loss: Callable[..., Tensor], count: int, model: nn.Module, *data: Tensor) -> Tensor:
    parts = zip(*(tensor.chunk(count) for tensor in data), strict=True)
    return torch.stack([loss(model, *part) for part in parts]).mean()


def _normalizes_batches(model: nn.Module) -> bool:
    """Whether it has a batch norm, whose statistics are other ones for a part."""
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())


def losses(subject: TrainingSubject, mode: Callable[[TrainingSubject], Step], order: Tensor) -> Tensor:
    """The mean loss of each window of steps, with the batch's rows in this order."""
    step, data = mode(subject), [tensor[order.to(tensor.device)] for tensor in subject.data]
    losses = torch.stack([step(*data).detach().double() for _ in range(STEPS)])
    return losses.view(-1, WINDOW).mean(1).cpu()


def spread(curves: Sequence[Tensor]) -> float:
    """The largest distance of a curve from the mean of the others.

    Example:
        >>> spread([torch.tensor([2.0, 1.0]), torch.tensor([2.0, 1.0]), torch.tensor([2.0, 1.5])])
        0.25
    """
    others = ([other for other in curves if other is not curve] for curve in curves)
    return max(map(distance, curves, others))


def distance(curve: Tensor, curves: Sequence[Tensor]) -> float:
    """The largest distance of a curve from the mean of others, relative to the largest value of the mean.

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
            row["precision"],
            f"{row['first']:.4f} to {row['last']:.4f}",
            f"{row['spread']:.2g}",
            f"{row['autostream']:.2g}",
        ]
        for row in rows
    ]
    headers = ["workload", "in", f"loss over {STEPS} steps", "eager runs differ by", "autostream from them by"]
    return tabulate(lines, headers, tablefmt="github", disable_numparse=True)


if __name__ == "__main__":
    sys.exit(main())
