"""Distillation: a student follows a frozen teacher and the average of its own weights, updated by one scheduled graph.

    python examples/distillation.py --steps 200

A wide network first learns to tell the arms of a spiral apart, by `autostream.train_step`. The student is a small one
and sees no labels: it follows that teacher, and a mean teacher, which is the moving average of the student. Two equal
students are trained, one by the update as it is written and one by its graph. It prints the time of an update of each,
how far their weights are apart in the first ten updates, and how many points are classified right before and after.
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

ARMS, BATCH, TEMPERATURE = 3, 256, 2.0


def classifier(width: int, dropout: float) -> nn.Sequential:
    """From points to the logits of arms."""
    layers = nn.Linear(2, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU()
    return nn.Sequential(*layers, nn.Dropout(dropout), nn.Linear(width, ARMS))


class Distillation(nn.Module):
    """A student with its two teachers, and the update."""

    def __init__(self, teacher: nn.Module) -> None:
        super().__init__()
        self.teacher, self.student = teacher, classifier(32, 0.1)
        self.average = copy.deepcopy(self.student).requires_grad_(False).eval()
        self.sgd = torch.optim.SGD(self.student.parameters(), lr=0.2, momentum=0.9, weight_decay=1e-4)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.sgd, 0.995)

    def update(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """One step of the student, which its average follows."""
        with torch.no_grad():
            taught = F.log_softmax(self.teacher(points) / TEMPERATURE, -1)
            averaged = self.average(points + 0.05 * torch.randn_like(points)).softmax(-1)
        logits = self.student(points + 0.05 * torch.randn_like(points))
        learned = F.log_softmax(logits / TEMPERATURE, -1)
        teacher_loss = F.kl_div(learned, taught, reduction="batchmean", log_target=True) * TEMPERATURE**2
        average_loss = F.mse_loss(logits.softmax(-1), averaged)
        self.sgd.zero_grad()
        (teacher_loss + average_loss).backward()  # type: ignore[no-untyped-call]
        self.sgd.step()
        self.sgd.zero_grad()  # a graph would have to copy the gradients that are left
        with torch.no_grad():
            torch._foreach_lerp_(list(self.average.parameters()), list(self.student.parameters()), 0.02)
        return teacher_loss, average_loss


def spiral(count: int, random: np.random.Generator, device: torch.device) -> tuple[Tensor, Tensor]:
    """Points near the arms of a spiral, and the numbers of their arms."""
    radius, noise = random.uniform(0.1, 1.5, count), random.normal(0, 0.3, count)
    arm = random.integers(ARMS, size=count)
    angle = 2 * math.pi / ARMS * arm + 3 * radius + noise
    points = np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1)
    return torch.tensor(points, dtype=torch.float32, device=device), torch.tensor(arm, device=device)


@torch.no_grad()
def accuracy(classify: nn.Module, device: torch.device) -> float:
    """The share of 2048 points that are classified right."""
    points, arms = spiral(2048, np.random.default_rng(0), device)
    was_training = classify.training
    right = (classify.eval()(points).argmax(1) == arms).float().mean()
    classify.train(was_training)
    return float(right)


def main() -> None:
    """Train, and print what came of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    device, random = torch.device(arguments.device), np.random.default_rng(1)
    torch.manual_seed(0)
    teacher = classifier(96, 0.0).to(device)
    teach = autostream.train_step(teacher, torch.optim.Adam(teacher.parameters(), lr=3e-3), nn.CrossEntropyLoss())
    for _ in range(200):
        teach(*spiral(BATCH, random, device))
    teacher.requires_grad_(False).eval()
    plain, fast = Distillation(teacher).to(device), Distillation(teacher).to(device)
    fast.load_state_dict(plain.state_dict())
    update = autostream.step(optimizers=[fast.sgd])(fast.update)
    before, apart, seconds = accuracy(plain.student, device), 0.0, np.zeros((2, arguments.steps))
    for at in range(arguments.steps):
        points, _ = spiral(BATCH, random, device)
        for which in range(2):
            torch.manual_seed(at)
            start = time.perf_counter()
            (update if which else plain.update)(points)[0].item()  # waits for the device
            seconds[which, at] = time.perf_counter() - start
            (fast if which else plain).scheduler.step()
        if at < 10:
            weights = zip(plain.state_dict().values(), fast.state_dict().values(), strict=True)
            apart = max(apart, *(float((one - other).abs().max()) for one, other in weights))
    print(autostream.explain(update, ops=5))
    print(f"right: {accuracy(teacher, device):.1%} by the teacher, {before:.1%} by students before training")
    for how, model, median in zip(("as written", "as one graph"), (plain, fast), np.median(seconds, 1), strict=True):
        student, average = accuracy(model.student, device), accuracy(model.average, device)
        print(f"{how:13} {1e6 * median:8.0f} µs an update, {student:.1%} by the student, {average:.1%} by its average")
        assert min(student, average) > before or arguments.steps < 100, "it learns"
    print(f"weights are at most {apart:.1e} apart in the first ten updates")
    assert apart < 1e-4 or device.type != "cpu", "it learns the same"


if __name__ == "__main__":
    main()
