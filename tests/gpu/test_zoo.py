"""All inference workloads in fused kernels: what the model computes, for changing inputs, from streams and threads.

In half precision, as they are measured. Each is compiled: ``-n 6`` takes two minutes and a half on an H200.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import autostream
from autostream.errors import TargetError
from benchmarks.harness.inference import Subject
from benchmarks.zoo import INFERENCE, SEED, prepare
from tests.agreement import check_calls, check_streams, check_threads, examples_of, lanes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),  # as errors, Inductor's own would make it fall back
]


def prepared(name: str) -> Subject:
    """A workload in half precision; skips the test where a package that it comes from is not installed."""
    try:
        return prepare(INFERENCE[name], 1, torch.device("cuda"), torch.float16)
    except (ModuleNotFoundError, TargetError) as error:
        missing = error.__cause__ if isinstance(error, TargetError) else error
        if not isinstance(missing, ModuleNotFoundError):
            raise
        pytest.skip(f"{name} needs {missing.name}, which is not installed")


def other_inputs(name: str, subject: Subject) -> tuple[Tensor, ...]:
    """Inputs that differ from both that the workload is prepared with."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(SEED + 1)
        drawn = INFERENCE[name].inputs(1)
    return tuple(new.to(old.device, old.dtype) for new, old in zip(drawn, subject.args, strict=True))


@pytest.mark.parametrize("name", INFERENCE)
def test_fused_kernels_compute_what_the_model_does(name: str) -> None:
    subject = prepared(name)
    examples = examples_of(subject.model, [subject.args, subject.others, other_inputs(name, subject)])
    options = {"policy": "critical_path", "streams": 4, "memory_budget": math.inf, "costs": "roofline"}
    fast = autostream.optimize(subject.model, kernels="inductor", **options)
    check_calls(fast, examples)
    check_streams(fast, examples, lanes(subject.args[0].device, 2))
    check_threads(fast, examples, lanes(subject.args[0].device, 3))

    (report,) = fast.reports
    assert not report.refusals
    assert report.mode == "cuda graph"
    assert report.graph
    assert any(op.target.startswith("triton_") for op in report.graph.ops.values())
