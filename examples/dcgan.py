"""DCGAN: a generator and a discriminator, each with an Adam of its own, updated by one scheduled graph.

    python examples/dcgan.py --steps 120

The images are bright discs at random positions. Two equal GANs are trained, one by the update as it is written and one
by its graph. It prints the time of an update of each, how far their weights are apart in the first ten updates, and the
distance between generated images and real ones before and after training.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autostream

SIZE, LATENT = 16, 16


class Gan(nn.Module):
    """What is trained, and the update."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            *(nn.ConvTranspose2d(LATENT, 2 * width, 4, bias=False), nn.BatchNorm2d(2 * width), nn.ReLU()),
            *(nn.ConvTranspose2d(2 * width, width, 4, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.ConvTranspose2d(width, 1, 4, 2, 1), nn.Tanh()),
        )
        self.discriminator = nn.Sequential(
            *(nn.Conv2d(1, width, 4, 2, 1), nn.LeakyReLU(0.2)),
            *(nn.Conv2d(width, 2 * width, 4, 2, 1, bias=False), nn.BatchNorm2d(2 * width), nn.LeakyReLU(0.2)),
            *(nn.Conv2d(2 * width, 1, 4), nn.Flatten()),
        )
        networks = self.generator, self.discriminator
        self.adams = [torch.optim.Adam(network.parameters(), lr=2e-3, betas=(0.5, 0.999)) for network in networks]

    def update(self, real: Tensor) -> tuple[Tensor, Tensor]:
        """One step of both networks."""
        generator_adam, discriminator_adam = self.adams
        fake = self.generator(torch.randn(len(real), LATENT, 1, 1, device=real.device))
        loss_of_real = F.softplus(-self.discriminator(real)).mean()
        discriminator_loss = loss_of_real + F.softplus(self.discriminator(fake.detach())).mean()
        discriminator_adam.zero_grad()
        discriminator_loss.backward()  # type: ignore[no-untyped-call]
        discriminator_adam.step()

        generator_loss = F.softplus(-self.discriminator(fake)).mean()
        generator_adam.zero_grad()
        generator_loss.backward()  # type: ignore[no-untyped-call]
        generator_adam.step()
        for adam in self.adams:  # a graph would have to copy the gradients that are left
            adam.zero_grad()
        return discriminator_loss, generator_loss


def discs(count: int, random: np.random.Generator, device: torch.device) -> Tensor:
    """Images of a disc with a soft edge, with values from -1 to 1."""
    row, column = torch.tensor(random.uniform(4, SIZE - 5, (2, count, 1, 1, 1)), dtype=torch.float32, device=device)
    pixels = torch.arange(SIZE, device=device)
    return torch.tanh(2 * (3 - torch.hypot(pixels[:, None] - row, pixels - column)))


@torch.no_grad()
def distance(gan: Gan, device: torch.device) -> float:
    """From a generated image to the nearest real one, and the other way round: the mean of both."""
    torch.manual_seed(0)
    real = discs(512, np.random.default_rng(0), device)
    fake = gan.eval().generator(torch.randn(512, LATENT, 1, 1, device=device))
    gan.train()
    distances = torch.cdist(fake.flatten(1), real.flatten(1))
    return float(distances.amin(0).mean() + distances.amin(1).mean()) / 2


def main() -> None:
    """Train, and print what came of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=120)
    arguments = parser.parse_args()
    device, random = torch.device(arguments.device), np.random.default_rng(1)
    torch.manual_seed(0)
    plain, fast = Gan(8).to(device), Gan(8).to(device)
    fast.load_state_dict(plain.state_dict())
    update = autostream.step(optimizers=fast.adams)(fast.update)
    before, apart, seconds = distance(plain, device), 0.0, np.zeros((2, arguments.steps))
    for at in range(arguments.steps):
        real = discs(32, random, device)
        for which in range(2):
            torch.manual_seed(at)
            start = time.perf_counter()
            (update if which else plain.update)(real)[0].item()  # waits for the device
            seconds[which, at] = time.perf_counter() - start
        if at < 10:
            weights = zip(plain.state_dict().values(), fast.state_dict().values(), strict=True)
            apart = max(apart, *(float((one - other).abs().max()) for one, other in weights))
    print(autostream.explain(update, ops=5))
    for how, gan, median in zip(("as written", "as one graph"), (plain, fast), np.median(seconds, 1), strict=True):
        after = distance(gan, device)
        print(f"{how:13} {1e6 * median:8.0f} µs an update, {before:.2f} from real images before, {after:.2f} after")
        assert after < before or arguments.steps < 100, "it learns"
    print(f"weights are at most {apart:.1e} apart in the first ten updates")
    assert apart < 1e-4 or device.type != "cpu", "it learns the same"


if __name__ == "__main__":
    main()
