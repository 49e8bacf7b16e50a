"""Diffusion: a denoiser of points in the plane, and the average of its weights, updated by one scheduled graph.

    python examples/diffusion.py --steps 300

The points form eight clusters. Two equal denoisers are trained, one by the update as it is written.
"""

import copy
import math

import numpy as np
import torch
import torch.nn.functional as F
from comparison import compare, mlp, options
from torch import Tensor, nn


def turned(points: Tensor, noise: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """Points that are turned to noise, which a share of 1 makes them, and how they change: their velocity."""
    angle = 0.5 * math.pi * share
    return angle.cos() * points + angle.sin() * noise, angle.cos() * noise - angle.sin() * points


class Denoiser(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = mlp(8, width, width, 2, between=nn.SiLU)

    def forward(self, points: Tensor, share: Tensor) -> Tensor:
        """Velocities, given the share of the noise in the points."""
        waves = [wave(k * math.pi * share) for k in (0.5, 1, 2) for wave in (torch.cos, torch.sin)]
        velocity: Tensor = self.layers(torch.cat([points, *waves], -1))
        return velocity


class Diffusion(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.denoiser = Denoiser(width)
        self.average = copy.deepcopy(self.denoiser).requires_grad_(False)
        self.optimizers = [torch.optim.AdamW(self.denoiser.parameters(), lr=1e-2)]

    def update(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """One step of the denoiser, which the average follows. Returns the loss, and the norm of its gradient."""
        (adam,) = self.optimizers
        share = torch.rand(len(points), 1, device=points.device)
        noisy, velocity = turned(points, torch.randn_like(points), share)
        loss = F.mse_loss(self.denoiser(noisy, share), velocity)
        adam.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(self.denoiser.parameters(), 1.0)
        adam.step()
        adam.zero_grad()  # a graph would have to copy the gradients that are left
        with torch.no_grad():
            torch._foreach_lerp_(list(self.average.parameters()), list(self.denoiser.parameters()), 0.02)
        return loss, norm


def batch(random: np.random.Generator, device: torch.device, count: int = 256) -> list[Tensor]:
    angle = math.pi / 4 * random.integers(8, size=count)
    points = np.stack([np.cos(angle), np.sin(angle)], 1) + random.normal(0, 0.05, (count, 2))
    return [torch.tensor(points, dtype=torch.float32, device=device)]


@torch.no_grad()
def scores(model: Diffusion, device: torch.device) -> dict[str, float]:
    """The energy distance of real points and those that the average generates: zero if both are distributed alike."""
    torch.manual_seed(0)
    (real,) = batch(np.random.default_rng(0), device, 1024)
    points, steps = torch.randn_like(real), 40
    for left in range(steps, 0, -1):
        velocity = model.average(points, torch.full_like(points[:, :1], left / steps))
        points, _ = turned(points, velocity, torch.tensor(-1 / steps))
    across, *within = (torch.cdist(*pair).mean() for pair in ((real, points), (real, real), (points, points)))
    return {"distance": float(2 * across - sum(within))}


if __name__ == "__main__":
    compare(lambda: Diffusion(64), batch, scores, *options(steps=300), rise=False)
