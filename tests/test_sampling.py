"""Samplers of diffusion models: steps of a U-Net and of a transformer are one graph, whatever the time is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autostream
from autostream.cli.zoo import import_without_compiled_ops
from benchmarks.nets import Denoiser, Guided

STEPS = 30


def _diffusers() -> Any:
    import_without_compiled_ops("torchvision")  # which diffusers imports
    import diffusers

    return diffusers


def unet() -> nn.Module:
    kinds = {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D")}
    kinds |= {"up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")}
    sizes = {"block_out_channels": (8, 16), "layers_per_block": 1, "cross_attention_dim": 8, "norm_num_groups": 4}
    return Denoiser(_diffusers().UNet2DConditionModel(sample_size=8, attention_head_dim=2, **sizes, **kinds))


def dit() -> nn.Module:
    sizes = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "sample_size": 8, "out_channels": 4}
    return Denoiser(_diffusers().DiTTransformer2DModel(**sizes))


CONDITIONS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "dit": (dit, lambda: torch.tensor([3, 7])),
    "guided unet": (lambda: Guided(unet(), one_batch=False), lambda: torch.randn(2, 2, 5, 8)),
}


def sampled(denoise: Callable[..., Tensor], condition: Tensor) -> Tensor:
    """Latents after all steps of DDIM (Song et al., 2021), which read nothing back."""
    share = torch.linspace(0.99, 0.0, STEPS + 1).cos()  # of the image in the latents
    times = torch.linspace(999, 0, STEPS).long()
    latents = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    for at in range(STEPS):
        noise = denoise(latents, times[at].expand(2), condition)
        image = (latents - (1 - share[at] ** 2).sqrt() * noise) / share[at]
        latents = share[at + 1] * image + (1 - share[at + 1] ** 2).sqrt() * noise
    return latents


@torch.no_grad()
@pytest.mark.parametrize("name", CONDITIONS)
def test_thirty_steps_are_the_eager_ones_by_one_graph(name: str) -> None:
    torch.manual_seed(0)
    make, condition = CONDITIONS[name]
    model, given = make().eval(), condition()
    fast = autostream.optimize(model, kernels="eager", costs="roofline", policy="sequential")
    torch.testing.assert_close(sampled(fast, given), sampled(model, given))
    (report,) = fast.reports
    assert report.mode != "plain"
    assert report.chosen is not None
