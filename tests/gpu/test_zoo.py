"""All inference benchmarks in fused kernels, in half precision: eager results, from several streams and threads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import autostream
from autostream.errors import TargetError
from benchmarks.harness.inference import Subject
from benchmarks.zoo import INFERENCE, SEED, prepare
from tests.agreement import check_calls, check_streams, check_threads, examples_of, lanes
from tests.gpu.common import FUSED, GPU, STREAMS, fused_kernels

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),  # as errors, Inductor's own would make it fall back
]


def prepared(name: str) -> Subject:
    """A benchmark; skips the test if the package that the model is from is not installed."""
    try:
        return prepare(INFERENCE[name], 1, GPU, torch.float16)
    except (ModuleNotFoundError, TargetError) as error:
        missing = error.__cause__ if isinstance(error, TargetError) else error
        if not isinstance(missing, ModuleNotFoundError):
            raise
        pytest.skip(f"{name} needs {missing.name}, which is not installed")


def other_inputs(name: str, subject: Subject) -> tuple[Tensor, ...]:
    """Inputs that differ from both that the benchmark is prepared with."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(SEED + 1)
        inputs = INFERENCE[name].inputs(1)
    return tuple(new.to(old.device, old.dtype) for new, old in zip(inputs, subject.args, strict=True))


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("name", INFERENCE)
def test_fused_kernels_compute_the_results_of_eager(name: str) -> None:
    """Changing inputs, on one stream, two streams, and in three threads; each replay starts with an arena of NaN."""
    subject = prepared(name)
    examples = examples_of(subject.model, [subject.args, subject.others, other_inputs(name, subject)])
    fast = autostream.optimize(subject.model, **STREAMS, **FUSED)
    check_calls(fast, examples)
    check_streams(fast, examples, lanes(GPU, 2))
    check_threads(fast, examples, lanes(GPU, 3))

    (report,) = fast.reports
    assert not report.refusals
    assert report.mode == "cuda graph"
    assert fused_kernels(report)
