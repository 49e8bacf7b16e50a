"""DCGAN: a generator and a discriminator, each with an Adam of its own, updated by one scheduled graph.

    python examples/dcgan.py --steps 120

The images are bright discs. Two equal GANs are trained, one by the update as it is written.
"""

import numpy as np
import torch
import torch.nn.functional as F
from comparison import compare, options
from torch import Tensor, nn

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
        self.optimizers = [torch.optim.Adam(network.parameters(), lr=2e-3, betas=(0.5, 0.999)) for network in networks]

    def update(self, real: Tensor) -> tuple[Tensor, Tensor]:
        """One step of both networks."""
        generator_adam, discriminator_adam = self.optimizers
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
        for adam in self.optimizers:  # a graph would have to copy the gradients that are left
            adam.zero_grad()
        return discriminator_loss, generator_loss


def batch(random: np.random.Generator, device: torch.device, count: int = 32) -> list[Tensor]:
    """Images of a disc with a soft edge, with values from -1 to 1."""
    row, column = torch.tensor(random.uniform(4, SIZE - 5, (2, count, 1, 1, 1)), dtype=torch.float32, device=device)
    pixels = torch.arange(SIZE, device=device)
    return [torch.tanh(2 * (3 - torch.hypot(pixels[:, None] - row, pixels - column)))]


@torch.no_grad()
def scores(gan: Gan, device: torch.device) -> dict[str, float]:
    """From a generated image to the nearest real one, and the other way round: the mean of both."""
    torch.manual_seed(0)
    (real,) = batch(np.random.default_rng(0), device, 512)
    fake = gan.eval().generator(torch.randn(512, LATENT, 1, 1, device=device))
    gan.train()
    distances = torch.cdist(fake.flatten(1), real.flatten(1))
    return {"distance": float(distances.amin(0).mean() + distances.amin(1).mean()) / 2}


if __name__ == "__main__":
    compare(lambda: Gan(8), batch, scores, *options(steps=120), rise=False)
