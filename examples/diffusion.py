"""Diffusion: a denoiser of points in the plane, and the average of its weights, updated by one scheduled graph.

    python examples/diffusion.py --steps 300

The points form eight clusters on a circle. Times and noise are drawn in the update, and gradients are clipped. Two
equal denoisers are trained, one by the update as it is written and one by its graph. It prints the time of an update of
each, how far their weights are apart in the first ten updates, and the distance between points that the averages
generate and real ones before and after training.
"""

from __future__ import annotations

import argparse
import copy
import math
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autostream


def turned(points: Tensor, noise: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """Points that are turned to noise, which a share of 1 makes them, and how they change: their velocity."""
    angle = 0.5 * math.pi * share
    return angle.cos() * points + angle.sin() * noise, angle.cos() * noise - angle.sin() * points


class Denoiser(nn.Module):
    """Predicts the velocities of noisy points."""

    def __init__(self, width: int) -> None:
        super().__init__()
        hidden = nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU()
        self.layers = nn.Sequential(nn.Linear(8, width), nn.SiLU(), *hidden, nn.Linear(width, 2))

    def forward(self, points: Tensor, share: Tensor) -> Tensor:
        """Velocities, given the share of the noise in the points."""
        waves = [wave(k * math.pi * share) for k in (0.5, 1, 2) for wave in (torch.cos, torch.sin)]
        velocity: Tensor = self.layers(torch.cat([points, *waves], -1))
        return velocity


class Diffusion(nn.Module):
    """What is trained, and the update."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.denoiser = Denoiser(width)
        self.average = copy.deepcopy(self.denoiser).requires_grad_(False)
        self.adam = torch.optim.AdamW(self.denoiser.parameters(), lr=1e-2)

    def update(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """One step of the denoiser, which the average follows. Returns the loss, and the norm of its gradient."""
        share = torch.rand(len(points), 1, device=points.device)
        noisy, velocity = turned(points, torch.randn_like(points), share)
        loss = F.mse_loss(self.denoiser(noisy, share), velocity)
        self.adam.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(self.denoiser.parameters(), 1.0)
        self.adam.step()
        self.adam.zero_grad()  # a graph would have to copy the gradients that are left
        with torch.no_grad():
            torch._foreach_lerp_(list(self.average.parameters()), list(self.denoiser.parameters()), 0.02)
        return loss, norm


def clusters(count: int, random: np.random.Generator, device: torch.device) -> Tensor:
    """Points of eight clusters on a circle."""
    angle = math.pi / 4 * random.integers(8, size=count)
    points = np.stack([np.cos(angle), np.sin(angle)], 1) + random.normal(0, 0.05, (count, 2))
    return torch.tensor(points, dtype=torch.float32, device=device)


@torch.no_grad()
def distance(denoiser: nn.Module, device: torch.device) -> float:
    """The energy distance between real points and generated ones, which is zero if both are distributed alike."""
    torch.manual_seed(0)
    real = clusters(1024, np.random.default_rng(0), device)
    points, steps = torch.randn_like(real), 40
    for left in range(steps, 0, -1):
        velocity = denoiser(points, torch.full_like(points[:, :1], left / steps))
        points, _ = turned(points, velocity, torch.tensor(-1 / steps))
    across, *within = (torch.cdist(*pair).mean() for pair in ((real, points), (real, real), (points, points)))
    return float(2 * across - sum(within))


def main() -> None:
    """Train, and print what came of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()
    device, random = torch.device(arguments.device), np.random.default_rng(1)
    torch.manual_seed(0)
    plain, fast = Diffusion(64).to(device), Diffusion(64).to(device)
    fast.load_state_dict(plain.state_dict())
    update = autostream.step(optimizers=[fast.adam])(fast.update)
    before, apart, seconds = distance(plain.average, device), 0.0, np.zeros((2, arguments.steps))
    for at in range(arguments.steps):
        points = clusters(256, random, device)
        for which in range(2):
            torch.manual_seed(at)
            start = time.perf_counter()
            (update if which else plain.update)(points)[0].item()  # waits for the device
            seconds[which, at] = time.perf_counter() - start
        if at < 10:
            weights = zip(plain.state_dict().values(), fast.state_dict().values(), strict=True)
            apart = max(apart, *(float((one - other).abs().max()) for one, other in weights))
    print(autostream.explain(update, ops=5))
    for how, model, median in zip(("as written", "as one graph"), (plain, fast), np.median(seconds, 1), strict=True):
        after = distance(model.average, device)
        print(f"{how:13} {1e6 * median:8.0f} µs an update, {before:.3f} from real points before, {after:.3f} after")
        assert after < before or arguments.steps < 100, "it learns"
    print(f"weights are at most {apart:.1e} apart in the first ten updates")
    assert apart < 1e-4 or device.type != "cpu", "it learns the same"


if __name__ == "__main__":
    main()
