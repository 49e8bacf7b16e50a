"""The zoo: real models without downloads, alike in every process."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from autostream.cli import zoo
from autostream.cli.zoo import build
from autostream.errors import TargetError


def test_weights_and_inputs_are_the_same_each_time_and_the_random_state_stays() -> None:
    name = "squeezenet1_1"
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first, (image,) = build(name)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    second, (again,) = build(name)
    assert torch.equal(image, again)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("inception_v3", [(1, 3, 299, 299)]),
        ("raft_small", [(1, 3, 224, 224)] * 2),
        ("r3d_18", [(1, 3, 16, 224, 224)]),
        ("test_byobnet.r160_in1k", [(1, 3, 160, 160)]),
        ("lraspp_mobilenet_v3_large", [(1, 3, 224, 224)]),  # whose backbone is not downloaded
    ],
)
def test_inputs_are_those_of_the_model(name: str, shapes: list[tuple[int, ...]]) -> None:
    _, args = zoo.uncalibrated(name)
    assert [tuple(arg.shape) for arg in args] == shapes


def test_a_misspelt_name_is_answered_with_near_ones() -> None:
    with pytest.raises(TargetError, match=r"no zoo model 'googlenett' \(did you mean 'googlenet' or .*package.module:"):
        build("googlenett")
    with pytest.raises(TargetError, match="no zoo model '~': write a name from torchvision"):
        build("~")


@pytest.mark.parametrize(("library", "name"), [("torchvision", "googlenet"), ("timm", "test_byobnet.r160_in1k")])
def test_a_missing_library_names_the_extra(library: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(
        TargetError, match=rf"needs {library}, which is not installed: pip install \"autostream\[zoo\]\""
    ):
        build(name)


def test_activations_have_a_mean_square_of_one_after_calibrated_norms() -> None:
    """The second norm must see what the first one, once calibrated, lets through: conv -> norm -> conv -> norm."""
    from torchvision.ops import FrozenBatchNorm2d

    torch.manual_seed(0)
    first, second = nn.BatchNorm2d(4), FrozenBatchNorm2d(5)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), first, nn.Conv2d(4, 5, 3), second).eval()
    samples = 1e3 + 1e3 * torch.randn(16, 3, 16, 16)
    assert zoo.calibrated(model, (samples,)) is model
    assert not model.training
    for outputs in (model[:2](samples), model(samples)):
        squares = outputs.square().mean((0, 2, 3))
        assert squares.tolist() == pytest.approx([1.0] * len(squares), abs=1e-3)
    assert not first.running_mean.any()
    statistics = first.running_var.clone()
    model(2 * samples)
    assert torch.equal(first.running_var, statistics), "later calls are not observed"


@pytest.mark.parametrize("name", ["mobilenet_v2", "vit_b_16"])
def test_outputs_are_neither_nothing_nor_alike_where_fp16_can_tell(name: str) -> None:
    """Without calibrated norms the first one's vanish, and the second one's last layer begins with zeros."""
    model, (image,) = build(name)
    with torch.no_grad():
        one, other = model(image), model(image.flip(3))
    assert one.half().isfinite().all()
    assert one.abs().mean() > 0.01
    assert (one - other).norm() > 0.01 * one.norm()
