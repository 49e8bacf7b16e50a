"""Every mode returns what the model returns, and leaves alone what it is prepared with."""

from __future__ import annotations

import itertools
from typing import get_args

import pytest
import torch
from torch import Tensor, nn

from autostream.cli.modes import captured
from autostream.options import KernelLevel, PolicyName
from benchmarks.harness.modes import CPU, CUDA


class Pair(nn.Module):
    """Two branches, one for each input, that meet in a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        left, right = self.left(x).relu(), self.right(y).relu()
        return left + right, {"product": left * right}


@pytest.fixture
def pair() -> Pair:
    torch.manual_seed(0)
    return Pair().eval()


def inputs(seed: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, 8, generator=generator).to(device), torch.randn(4, 8, generator=generator).to(device)


# Names

LEVELS, POLICIES = set(get_args(KernelLevel)) - {"auto"}, set(get_args(PolicyName)) - {"auto"}


def test_autostream_is_there_at_each_level_and_with_each_policy() -> None:
    names = {f"autostream_{level}_{policy}" for level, policy in itertools.product(LEVELS, POLICIES)}
    assert len(names) > 4
    others = {"autostream", "autostream_inductor", "autostream_any_memory"}
    assert {name for name in CUDA if name.startswith("autostream")} == others | names


# Values


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("mode", ["autostream_eager_sequential", "autostream_eager_path_cover"])
def test_a_mode_of_the_cpu_computes_what_the_model_does(pair: Pair, mode: str) -> None:
    given = inputs(0)
    with torch.no_grad():
        call = CPU[mode](pair, given)
        for seed in (0, 1, 0):
            torch.testing.assert_close(call(*inputs(seed)), pair(*inputs(seed)))
    torch.testing.assert_close(given, inputs(0), rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.filterwarnings("ignore:TensorFloat32", "ignore:The CUDA Graph is empty")  # Inductor's own
@pytest.mark.parametrize("mode", [mode for mode in CUDA if mode != "compile_max_autotune"])
def test_a_mode_of_the_gpu_computes_what_the_model_does_and_writes_to_nothing(pair: Pair, mode: str) -> None:
    pair.cuda()
    given, weights = inputs(0, "cuda"), [weight.clone() for weight in pair.parameters()]
    with torch.no_grad():
        call = CUDA[mode](pair, given)
        for seed in (0, 1, 0):
            torch.testing.assert_close(call(*inputs(seed, "cuda")), pair(*inputs(seed, "cuda")))
    torch.testing.assert_close(given, inputs(0, "cuda"), rtol=0, atol=0)
    torch.testing.assert_close(list(pair.parameters()), weights, rtol=0, atol=0, check_stride=False)
    assert all(weight.requires_grad for weight in pair.parameters())


# Captured by hand


@pytest.mark.gpu
def test_a_captured_function_reads_its_arguments_and_returns_new_memory() -> None:
    call = captured(lambda x: 2 * x, [torch.ones(3, device="cuda")])
    first, second = call(torch.full((3,), 5.0, device="cuda")), call(torch.full((3,), 7.0, device="cuda"))
    assert first.tolist() == [10.0] * 3
    assert second.tolist() == [14.0] * 3
    assert first.data_ptr() != second.data_ptr()


@pytest.mark.gpu
@pytest.mark.parametrize("several", [1, 2])
def test_arguments_and_outputs_of_a_captured_function_may_be_nested(several: int) -> None:
    """With one tensor, in one list, there is but one argument, and it is no tensor."""

    def function(images: list[Tensor]) -> dict[str, object]:
        return {"sum": sum(images), "count": len(images), "none": None}

    def images(value: float) -> list[Tensor]:
        return [torch.full((2,), value, device="cuda") for _ in range(several)]

    call = captured(function, [images(1.0)])
    found = call(images(3.0))
    assert found["sum"].tolist() == [3.0 * several] * 2
    assert (found["count"], found["none"]) == (several, None)
