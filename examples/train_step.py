"""Training a small convolutional network to classify shapes, in eager and with ``autostream.train_step``.

python examples/train_step.py
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autostream

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = ("horizontal bar", "vertical bar", "square", "cross")
SIZE, BATCH, STEPS, ACCURACY = 12, 32, 30, 0.9


def samples(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Noisy images of shapes at random positions, ``(count, 1, SIZE, SIZE)``, and their classes in ``SHAPES``."""
    images = 0.3 * torch.randn(count, 1, SIZE, SIZE, generator=generator)
    kinds = torch.randint(len(SHAPES), (count,), generator=generator)
    positions = torch.randint(1, SIZE - 6, (count, 2), generator=generator)
    for image, kind, (row, column) in zip(images[:, 0], kinds.tolist(), positions.tolist(), strict=True):
        patch = image[row : row + 5, column : column + 5]
        if kind == 2:
            patch[[0, -1]] += 1
            patch[1:-1, [0, -1]] += 1
        if kind in (0, 3):
            patch[2] += 1
        if kind in (1, 3):
            patch[:, 2] += 1
    return images.to(DEVICE), kinds.to(DEVICE)


def network() -> nn.Module:
    """Two convolutions with batch norms, dropout, and a linear layer."""
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveMaxPool2d(1)),
        *(nn.Flatten(), nn.Dropout(0.1), nn.Linear(16, len(SHAPES))),
    ).to(DEVICE)


def loss_fn(model: nn.Module, images: Tensor, kinds: Tensor) -> Tensor:
    """The loss of a batch."""
    return F.cross_entropy(model(images), kinds)


def eager_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., Tensor]:
    """The training step in eager."""

    def step(images: Tensor, kinds: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_fn(model, images, kinds)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    return step


def train(step: Callable[..., Tensor], optimizer: torch.optim.Optimizer) -> Iterator[float]:
    """The losses of all steps, with a learning rate schedule."""
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)  # of the dropout
    for _ in range(STEPS):
        yield step(*samples(BATCH, generator)).item()
        scheduler.step()


def accuracy(model: nn.Module) -> float:
    """The accuracy on new images."""
    images, kinds = samples(512, torch.Generator().manual_seed(1))
    model.eval()
    with torch.no_grad():
        return float((model(images).argmax(1) == kinds).float().mean())


def main() -> None:
    """Train two copies of a model, one in eager and one with ``train_step``."""
    torch.manual_seed(0)
    model = network()
    copied = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.02) for each in (model, copied)]
    fast = autostream.train_step(copied, optimizers[1], loss_fn, tuning_seconds=2.0)
    accuracies = {}
    for name, step, optimizer in (
        ("eager", eager_step(model, optimizers[0]), optimizers[0]),
        ("autostream", fast, optimizers[1]),
    ):
        start = time.perf_counter()
        losses = list(train(step, optimizer))
        right = accuracies[name] = accuracy({"eager": model, "autostream": copied}[name])
        seconds = time.perf_counter() - start
        print(f"{name:10}  loss {losses[0]:.3f} -> {losses[-1]:.3f}, {right:.1%} right, {seconds:.1f} s in all")
    print()
    print(autostream.explain(fast, ops=5))
    assert min(accuracies.values()) >= ACCURACY, f"{accuracies} is less than {ACCURACY:.0%}"


if __name__ == "__main__":
    main()
