"""Models with so many calls left, on a GPU, where one run too many is an assertion of the device: it ends the process.

Each in a process of its own. A run too many shows as an error in all that comes after it, the comparison included.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import autostream
from benchmarks.harness.comparison import compare_modes
from benchmarks.harness.inference import Inference, subject_of
from tests.alone import alone
from tests.wearing import WEARING, batch, check_calls, check_given, plain_step, steps, worn

pytestmark = pytest.mark.gpu

GPU = "cuda:0"
NEAR = 1e-3
"""What fused kernels, and products of matrices in TF32, are apart."""

KERNELS = ("eager", "inductor", "auto")


def check_alive() -> None:
    """An assertion of the device is told by whatever comes after it."""
    torch.cuda.synchronize()
    assert torch.ones(2, device=GPU).sum().item() == 2


@pytest.mark.parametrize("left", [1, 3])
@pytest.mark.parametrize("name", WEARING)
@pytest.mark.parametrize("kernels", KERNELS)
@alone
@torch.no_grad()
def test_every_call_that_is_left_is_the_callers(kernels: str, name: str, left: int) -> None:
    """As users call it, "auto", and at each level; costs are measured."""
    made: list[Any] = []

    def optimized(model: torch.nn.Module) -> autostream.OptimizedModule:
        made.append(autostream.optimize(model, kernels=kernels))  # type: ignore[arg-type]
        return made[0]  # type: ignore[no-any-return]

    check_calls(optimized, worn(name, left, GPU), left, tolerance=NEAR)
    check_alive()
    (report,) = made[0].reports
    assert report.mode != "plain", report.refusals
    assert name == "mask" or report.mode == "cuda graph", report.refusals


@pytest.mark.parametrize("options", [{"cuda_graph": False}, {"policy": "critical_path", "streams": 2}])
@pytest.mark.parametrize("name", WEARING)
@alone
@torch.no_grad()
def test_so_it_is_with_any_options(name: str, options: dict[str, Any]) -> None:
    check_calls(partial(autostream.optimize, **options), worn(name, 2, GPU), 2, tolerance=NEAR)
    check_alive()


@pytest.mark.parametrize("kernels", KERNELS)
@alone
@torch.no_grad()
def test_so_it_is_where_what_is_written_is_the_callers(kernels: str) -> None:
    check_given(partial(autostream.optimize, kernels=kernels), GPU, NEAR)
    check_alive()


@pytest.mark.parametrize("name", ["ring", "counter"])
@alone
@torch.no_grad()
def test_so_it_is_where_a_graph_is_captured_again(name: str) -> None:
    """Weights have moved, once before the last call."""
    model = worn(name, 3, GPU)
    fast = autostream.optimize(model, kernels="eager")
    calls: list[int] = []

    def moving(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) > 1:
            for parameter in model.parameters():
                parameter.data = parameter.data.clone()
        return fast(x)  # type: ignore[no-any-return]

    check_calls(lambda model: moving, model, 3, tolerance=NEAR)
    check_alive()


@pytest.mark.parametrize("name", ["ring", "counter"])
@alone
def test_so_it_is_with_gradients(name: str) -> None:
    check_calls(autostream.optimize, worn(name, 2, GPU), 2, tolerance=NEAR)
    check_alive()


@pytest.mark.parametrize("name", ["ring", "counter"])
@alone
def test_so_it_is_in_training(name: str) -> None:
    """The first step makes the optimizer's state, the second is scheduled, the fourth is the last."""
    ours, theirs = (partial(steps, step_of=step_of) for step_of in (autostream.train_step, plain_step))
    check_calls(ours, worn(name, 4, GPU), 4, theirs, tolerance=NEAR)
    check_alive()


@pytest.mark.parametrize("name", ["ring", "counter"])
@alone
def test_modes_are_timed_on_the_state_that_there_was(name: str) -> None:
    model = worn(name, 1, GPU).eval()
    comparison = Inference(subject_of(model, (batch(0, GPU),)))
    comparison.require_checkable()
    cells = compare_modes(comparison, ["eager", "cuda_graph", "autostream"])
    assert [(cell.status, cell.reason) for cell in cells.values()] == [("ok", "")] * 3
    check_alive()
