"""Models that support a limited number of calls: one run too many is an assertion of the GPU, which ends the process.

Each test runs in a new process. A run too many shows as an error in everything after it, the comparison included.
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
"""The tolerance for fused kernels, and for products of matrices in TF32."""

KERNELS = ("eager", "inductor", "auto")
NAMES = ("ring", "counter")


def check_alive() -> None:
    """An assertion of the GPU is raised by the next operation that waits for it."""
    torch.cuda.synchronize()
    assert torch.ones(2, device=GPU).sum().item() == 2


@pytest.mark.parametrize("name", WEARING)
@alone
@torch.no_grad()
def test_compiling_uses_up_no_call(name: str) -> None:
    """With one call left and with three, for all kernels; costs are measured. With two calls left, on streams."""
    for kernels in KERNELS:
        for left in (1, 3):
            torch._dynamo.reset()
            compiled: list[Any] = []

            def optimized(model: torch.nn.Module, kernels: Any = kernels, compiled: list[Any] = compiled) -> Any:
                compiled.append(autostream.optimize(model, kernels=kernels))
                return compiled[0]

            check_calls(optimized, worn(name, left, GPU), left, tolerance=NEAR)
            check_alive()
            (report,) = compiled[0].reports
            assert report.mode != "plain", report.refusals
            assert name == "mask" or report.mode == "cuda graph", report.refusals
    options: list[dict[str, Any]] = [{"cuda_graph": False}, {"policy": "critical_path", "streams": 2}]
    for each in options:
        torch._dynamo.reset()
        check_calls(partial(autostream.optimize, **each), worn(name, 2, GPU), 2, tolerance=NEAR)
        check_alive()


@alone
@torch.no_grad()
def test_compiling_leaves_inputs_that_the_model_mutates() -> None:
    for kernels in KERNELS:
        check_given(partial(autostream.optimize, kernels=kernels), GPU, NEAR)
        check_alive()


@alone
@torch.no_grad()
def test_capturing_again_uses_up_no_call() -> None:
    """Weights have moved before each call but the first."""
    for name in NAMES:
        model = worn(name, 3, GPU)
        fast = autostream.optimize(model, kernels="eager")
        calls: list[int] = []

        def moving(x: torch.Tensor, model: Any = model, fast: Any = fast, calls: list[int] = calls) -> Any:
            calls.append(1)
            if len(calls) > 1:
                for parameter in model.parameters():
                    parameter.data = parameter.data.clone()
            return fast(x)

        check_calls(lambda model, moving=moving: moving, model, 3, tolerance=NEAR)  # type: ignore[misc]
        check_alive()


@alone
def test_training_uses_up_no_call() -> None:
    """Calls that record gradients, and steps: the first one creates the optimizer's state, the fourth is the last."""
    ours, theirs = (partial(steps, step_of=step_of) for step_of in (autostream.train_step, plain_step))
    for name in NAMES:
        check_calls(autostream.optimize, worn(name, 2, GPU), 2, tolerance=NEAR)
        check_alive()
        check_calls(ours, worn(name, 4, GPU), 4, theirs, tolerance=NEAR)
        check_alive()


@alone
def test_benchmarks_time_each_mode_from_the_same_state() -> None:
    for name in NAMES:
        model = worn(name, 1, GPU).eval()
        comparison = Inference(subject_of(model, (batch(0, GPU),)))
        comparison.require_checkable()
        cells = compare_modes(comparison, ["eager", "cuda_graph", "autostream"])
        assert [(cell.status, cell.reason) for cell in cells.values()] == [("ok", "")] * 3
        check_alive()
