"""Samplers of diffusion models on a GPU: the host waits for nothing between two steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autostream
from tests.gpu.common import GPU

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("aten_ops", "fresh_dynamo"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),  # from PyTorch, where it is switched on
]

STEPS = 30
WIDTH = 32


def embedded(time: Tensor) -> Tensor:
    """Times (N) to sines and cosines (N, WIDTH)."""
    angles = time[:, None] * torch.logspace(0, -4, WIDTH // 2, device=time.device)
    return torch.cat([angles.sin(), angles.cos()], dim=1)


class UNet(nn.Module):
    """Latents (N, 4, H, W) and times (N) to noise, over two resolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Linear(WIDTH, WIDTH)
        self.first, self.last = nn.Conv2d(4, WIDTH, 3, padding=1), nn.Conv2d(2 * WIDTH, 4, 3, padding=1)
        self.down, self.up = nn.Conv2d(WIDTH, WIDTH, 2, stride=2), nn.ConvTranspose2d(WIDTH, WIDTH, 2, stride=2)
        self.norm = nn.GroupNorm(4, WIDTH)

    def forward(self, latents: Tensor, time: Tensor) -> Tensor:
        fine = self.first(latents)
        coarse = self.norm(self.down(fine)) + self.time(embedded(time))[:, :, None, None]
        return self.last(torch.cat([fine, self.up(F.silu(coarse))], dim=1))


class DiT(nn.Module):
    """Latents (N, 4, H, W) and times (N) to noise, by attention over patches, scaled and shifted by the time."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.noise = nn.Linear(16, WIDTH), nn.Linear(WIDTH, 16)
        self.time, self.qkv, self.out = (
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)

    def forward(self, latents: Tensor, time: Tensor) -> Tensor:
        x = self.patches(F.pixel_unshuffle(latents, 2).flatten(2).transpose(1, 2))
        scale, shift = self.time(embedded(time))[:, None].chunk(2, dim=2)
        q, k, v = self.qkv(self.norm(x) * (1 + scale) + shift).unflatten(2, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return F.pixel_shuffle(self.noise(x).transpose(1, 2).unflatten(2, (latents.shape[2] // 2, -1)), 2)


@contextmanager
def no_waits() -> Iterator[None]:
    """Ops for which the host waits raise."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def sampled(denoise: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Latents after all steps of DDIM (Song et al., 2021); after the first step, the host may not wait."""
    share = torch.linspace(0.99, 0.0, STEPS + 1, device=GPU).cos()  # of the image in the latents
    times = torch.linspace(999, 0, STEPS, device=GPU)
    latents = torch.randn(2, 4, 16, 16, generator=torch.Generator().manual_seed(1)).to(GPU)

    def step(at: int) -> Tensor:
        noise = denoise(latents, times[at].expand(2))
        image = (latents - (1 - share[at] ** 2).sqrt() * noise) / share[at]
        return share[at + 1] * image + (1 - share[at + 1] ** 2).sqrt() * noise

    latents = step(0)
    with no_waits():
        for at in range(1, STEPS):
            latents = step(at)
    return latents


@torch.no_grad()
@pytest.mark.parametrize("make", [UNet, DiT])
def test_thirty_steps_make_the_host_wait_for_nothing(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = make().to(GPU).eval()
    fast = autostream.optimize(model, tuning_seconds=1.0)
    torch.testing.assert_close(sampled(fast), sampled(model), rtol=1e-3, atol=1e-3)
    (report,) = fast.reports
    assert report.mode == "cuda graph"


@torch.no_grad()
def test_a_sampler_that_reads_a_number_back_is_noticed() -> None:
    with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
        sampled(lambda latents, time: latents * time[0].item())
