"""Training steps over two GPUs, in microbatches; skipped where there is one."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autostream
from benchmarks.two_devices import Halves, loss_fn, watched

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("aten_ops"),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

DEVICES = ("cuda:0", "cuda:1")


def model(width: int = 64, dropout: float = 0.0) -> Halves:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(dropout)) for _ in range(6)]
    return Halves(layers, DEVICES)


def batch(seed: int, rows: int = 32, width: int = 64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, rows, width, generator=generator)
    return x.to(DEVICES[0]), y.to(DEVICES[1])


def eager(model: nn.Module, optimizer: torch.optim.Optimizer, count: int, x: Tensor, y: Tensor) -> Tensor:
    losses = []
    for part in zip(x.chunk(count), y.chunk(count), strict=True):
        loss = loss_fn(model, *part) / count
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.detach())
    optimizer.step()
    optimizer.zero_grad()
    return torch.stack(losses).sum()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize(("count", "dropout"), [(1, 0.0), (4, 0.0), (4, 0.25)])
def test_a_step_over_two_gpus_is_the_eager_one(kind: Any, count: int, dropout: float) -> None:
    """Also while the rate changes, while the host runs ahead, and after a weight has moved."""
    ours = model(dropout=dropout)
    theirs = copy.deepcopy(ours)
    optimizers = [kind(each.parameters(), lr=0.01) for each in (ours, theirs)]
    step = autostream.train_step(ours, optimizers[0], loss_fn, microbatches=count)
    ways = (step, partial(eager, theirs, optimizers[1], count))
    batches = [batch(seed) for seed in range(12)]
    losses: list[list[Tensor]] = [[], []]
    for way, found, optimizer, module in zip(ways, losses, optimizers, (ours, theirs), strict=True):
        for seed, each in enumerate(batches):
            optimizer.param_groups[0]["lr"] = 0.01 / (1 + seed)
            if seed == 8:
                weight = module.first[0][0].weight  # type: ignore[index, union-attr]
                weight.data = weight.data.clone()
            torch.cuda.manual_seed_all(seed)
            found.append(way(*each))
    torch.testing.assert_close(*losses)
    torch.testing.assert_close([*ours.parameters()], [*theirs.parameters()])
    (report,) = step.reports
    assert report.mode == "sections", report.refusals
    devices = {part.graph.device for part in report.parts if part.mode == "cuda graph" and part.graph is not None}
    assert devices == {*DEVICES}, [part.refusals for part in report.parts]


class OverwritesASkip(Halves):
    """Writes what it has sent to the second device."""

    def forward(self, x: Tensor) -> Tensor:
        here = self.first(x)
        skip = here.to(self.there)
        y: Tensor = self.second(self.first(nn.functional.relu_(here)).to(self.there)) + skip
        return y


def test_what_is_sent_is_what_it_was_then() -> None:
    torch.manual_seed(0)
    ours = OverwritesASkip([nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)], DEVICES)
    theirs = copy.deepcopy(ours)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in (ours, theirs)]
    step = autostream.train_step(ours, optimizers[0], loss_fn, microbatches=4)
    for seed in range(8):
        torch.testing.assert_close(step(*batch(seed)), eager(theirs, optimizers[1], 4, *batch(seed)))


def test_the_loss_falls() -> None:
    ours = model()
    step = autostream.train_step(ours, torch.optim.AdamW(ours.parameters(), lr=3e-3), loss_fn, microbatches=4)
    losses = [step(*batch(0)).item() for _ in range(60)]
    assert losses[-1] < 0.5 * losses[0]


def test_both_gpus_compute_at_once() -> None:
    """Of large layers, so that the host is not what both wait for."""
    ours = model(width=4096)
    step = autostream.train_step(ours, torch.optim.SGD(ours.parameters(), lr=1e-3), loss_fn, microbatches=8)
    run = partial(step, *batch(0, rows=8192, width=4096))
    for _ in range(4):
        run()
    assert watched(run) > 0.5
