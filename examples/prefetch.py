"""Prefetching: batches are copied into the static inputs of a training step while the step before runs.

python examples/prefetch.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import autostream

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The mean squared error."""
    return F.mse_loss(model(x), y)


def main() -> None:
    """Fit a line, twice over all samples."""
    torch.manual_seed(0)
    x = torch.randn(512, 8)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=64, pin_memory=DEVICE == "cuda")
    model = nn.Linear(8, 1).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = autostream.train_step(model, optimizer, loss_fn, tuning_seconds=2.0)

    batches = autostream.prefetch(loader, DEVICE, into=step)
    losses = [step(*batch) for _ in range(2) for batch in batches]
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    print(autostream.explain(step, ops=5))
    assert losses[-1] < losses[0] / 10


if __name__ == "__main__":
    main()
