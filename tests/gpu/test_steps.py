"""Training steps of several losses, optimizers and averages: 200 of them end where eager ones do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import autostream
from benchmarks.harness.steps import StepSubject
from tests.gpu.common import GPU
from tests.spread import excess, trained

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:TensorFloat32", "ignore:The CUDA Graph is empty"),  # Inductor's own
    pytest.mark.filterwarnings("ignore:This instance was constructed with capturable"),  # said of the eager step
]

COUNT = 200

EAGER_RUNS = 12
"""More than for few steps: some runs end far from all others. Of three more eager runs of the diffusion step, two were
farther from each of five than these are from each other."""

BATCHES = {"sac": 32, "td3": 32, "ppo": 32, "dqn": 32, "dcgan": 16, "byol": 4, "diffusion": 8}


@pytest.mark.parametrize("name", BATCHES)
def test_many_steps_end_within_the_spread_of_eager_runs(name: str) -> None:
    steps = list[autostream.training.StepFunction]()

    def kept(subject: StepSubject) -> Callable[..., Any]:
        steps.append(autostream.step(optimizers=subject.optimizers)(subject.update))
        return steps[-1]

    eager = [
        trained(name, lambda subject: subject.update, seed, GPU, BATCHES[name], COUNT) for seed in range(EAGER_RUNS)
    ]
    assert excess(trained(name, kept, EAGER_RUNS, GPU, BATCHES[name], COUNT), eager) <= 1
    assert "plain" not in {report.mode for report in steps[0].reports}
