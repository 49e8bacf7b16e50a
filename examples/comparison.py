"""What the examples of steps share: two equal models, one trained by an update as it is written, one by its graph."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

import autostream

Trained = TypeVar("Trained", bound=nn.Module)


def mlp(*widths: int, between: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Linear layers with an activation between them."""
    layers = [layer for sizes in pairwise(widths) for layer in (nn.Linear(*sizes), between())]
    return nn.Sequential(*layers[:-1])


def options(steps: int) -> tuple[torch.device, int]:
    """``--device`` and ``--steps`` of the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=steps)
    given = parser.parse_args()
    return torch.device(given.device), given.steps


def compare(
    make: Callable[[], Trained],
    batch: Callable[[np.random.Generator, torch.device], Sequence[Tensor]],
    scores: Callable[[Trained, torch.device], Mapping[str, float]],
    device: torch.device,
    steps: int,
    *,
    rise: bool,
    between: Callable[[Trained], object] = lambda model: None,
) -> None:
    """Train two models, and print the time of an update, the scores before and after, and how far weights are apart.

    Args:
        make: makes a model with its ``update`` and its ``optimizers``.
        batch: draws a batch.
        scores: of a model, by name.
        device: where they are trained.
        steps: how many updates there are.
        rise: whether a model learns if its scores rise; else they fall.
        between: what is done with a model between two steps, such as another learning rate.
    """
    torch.manual_seed(0)
    models: Any = make().to(device), make().to(device)
    plain, fast = models
    fast.load_state_dict(plain.state_dict())
    step = autostream.step(optimizers=fast.optimizers)(fast.update)
    before, apart, seconds = scores(plain, device), 0.0, np.zeros((2, steps))
    random = np.random.default_rng(1)
    for at in range(steps):
        arguments = batch(random, device)
        for which, (model, update) in enumerate(zip(models, (plain.update, step), strict=True)):
            torch.manual_seed(at)
            start = time.perf_counter()
            update(*arguments)[0].item()  # waits for the device
            seconds[which, at] = time.perf_counter() - start
            between(model)
        if at < 10:
            weights = zip(plain.state_dict().values(), fast.state_dict().values(), strict=True)
            apart = max(apart, *(float((one - other).abs().max()) for one, other in weights))
    print(autostream.explain(step, ops=5))
    for how, model, median in zip(("as written", "as one graph"), models, np.median(seconds, 1), strict=True):
        after = scores(model, device)
        told = ", ".join(f"{name} {before[name]:.3f} before, {after[name]:.3f} after" for name in before)
        print(f"{how:13} {1e6 * median:8.0f} µs an update; {told}")
        assert all((after[name] > before[name]) == rise for name in before) or steps < 100, "it learns"
    print(f"weights are at most {apart:.1e} apart in the first ten updates")
    assert apart < 1e-4 or device.type != "cpu", "it learns the same"
