"""Distillation: a student follows a frozen teacher and the average of its own weights, updated by one scheduled graph.

    python examples/distillation.py --steps 200

The teacher learns to tell the arms of a spiral apart, by `autostream.train_step`; the student sees no labels. Two equal
students are trained, one by the update as it is written.
"""

import copy
import math

import numpy as np
import torch
import torch.nn.functional as F
from comparison import compare, mlp, options
from torch import Tensor, nn

import autostream

ARMS, TEMPERATURE = 3, 2.0


class Distillation(nn.Module):
    """A student with its two teachers, and the update."""

    def __init__(self, teacher: nn.Module) -> None:
        super().__init__()
        self.teacher, self.student = teacher, mlp(2, 32, 32, ARMS, between=nn.SiLU)
        self.average = copy.deepcopy(self.student).requires_grad_(False)
        self.optimizers = [torch.optim.SGD(self.student.parameters(), lr=0.2, momentum=0.9)]
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizers[0], 0.995)

    def update(self, points: Tensor) -> tuple[Tensor, Tensor]:
        (sgd,) = self.optimizers
        with torch.no_grad():
            taught = F.log_softmax(self.teacher(points) / TEMPERATURE, -1)
            averaged = self.average(points + 0.05 * torch.randn_like(points)).softmax(-1)
        logits = self.student(points + 0.05 * torch.randn_like(points))
        learned = F.log_softmax(logits / TEMPERATURE, -1)
        teacher_loss = F.kl_div(learned, taught, reduction="batchmean", log_target=True) * TEMPERATURE**2
        average_loss = F.mse_loss(logits.softmax(-1), averaged)
        sgd.zero_grad()
        (teacher_loss + average_loss).backward()  # type: ignore[no-untyped-call]
        sgd.step()
        sgd.zero_grad()  # a graph would have to copy the gradients that are left
        with torch.no_grad():
            torch._foreach_lerp_(list(self.average.parameters()), list(self.student.parameters()), 0.02)
        return teacher_loss, average_loss


def spiral(random: np.random.Generator, device: torch.device, count: int = 256) -> list[Tensor]:
    """Points near the arms of a spiral, and the numbers of their arms."""
    radius, arm = random.uniform(0.1, 1.5, count), random.integers(ARMS, size=count)
    angle = 2 * math.pi / ARMS * arm + 3 * radius + random.normal(0, 0.3, count)
    points = np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1)
    return [torch.tensor(points, dtype=torch.float32, device=device), torch.tensor(arm, device=device)]


@torch.no_grad()
def scores(model: Distillation, device: torch.device) -> dict[str, float]:
    """The shares of 2048 points that the student and its average classify right."""
    points, arms = spiral(np.random.default_rng(0), device, 2048)
    classified = {"student": model.student(points), "average": model.average(points)}
    return {name: float((logits.argmax(1) == arms).float().mean()) for name, logits in classified.items()}


if __name__ == "__main__":
    device, steps = options(steps=200)
    torch.manual_seed(0)
    teacher, random = mlp(2, 96, 96, ARMS, between=nn.SiLU).to(device), np.random.default_rng(2)
    teach = autostream.train_step(teacher, torch.optim.Adam(teacher.parameters(), lr=3e-3), nn.CrossEntropyLoss())
    for _ in range(200):
        teach(*spiral(random, device))
    compare(
        lambda: Distillation(teacher.requires_grad_(False)),
        lambda random, device: spiral(random, device)[:1],  # without labels
        *(scores, device, steps),
        rise=True,
        between=lambda model: model.scheduler.step(),
    )
