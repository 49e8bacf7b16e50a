"""Training steps of several losses, optimizers and averages: 200 of them end where eager ones do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import autostream
from benchmarks.harness.steps import StepSubject
from benchmarks.steps import STEPS, prepare_step
from tests.gpu.common import GPU

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:TensorFloat32", "ignore:The CUDA Graph is empty"),  # Inductor's own
    pytest.mark.filterwarnings("ignore:This instance was constructed with capturable"),  # said of the eager step
]

COUNT = 200
OTHER_ROUNDING = 1e-6
"""By so much eager runs differ at first: about what another order of additions makes of a sum."""


def trained(name: str, as_run: Callable[[StepSubject], Callable[..., Any]], seed: int = 0) -> Tensor:
    """All trained and followed tensors as one vector, after all steps on the same sequence of batches."""
    subject = prepare_step(STEPS[name], 32, GPU, torch.float32, random=True)
    if seed:
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in subject.modules.parameters():
                parameter.mul_(1 + OTHER_ROUNDING * torch.randn_like(parameter))
    run, numbers = as_run(subject), torch.Generator(GPU).manual_seed(1)
    torch.manual_seed(2)
    for _ in range(COUNT):
        order = torch.randperm(32, device=GPU, generator=numbers)
        run(*(tensor[order[: len(tensor)]] for tensor in subject.data))
    return torch.cat([value.detach().flatten().double() for value in subject.modules.state_dict().values()])


@pytest.mark.parametrize("name", ["sac", "td3", "ppo", "dqn"])
def test_many_steps_end_within_the_spread_of_eager_runs(name: str) -> None:
    eager = trained(name, lambda subject: subject.update)
    spread = max(float((trained(name, lambda subject: subject.update, seed) - eager).norm()) for seed in (1, 2, 3))
    steps = list[autostream.training.StepFunction]()

    def kept(subject: StepSubject) -> Callable[..., Any]:
        steps.append(autostream.step(optimizers=subject.optimizers)(subject.update))
        return steps[-1]

    assert float((trained(name, kept) - eager).norm()) <= 2 * spread
    assert "plain" not in {report.mode for report in steps[0].reports}
