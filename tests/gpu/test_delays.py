"""Kernels that spin before random ops of random streams: results stay the same to the bit, captured or not."""

from __future__ import annotations

import pytest
import torch

from benchmarks.zoo import INFERENCE, prepare
from tests.delays import captured_symptoms, symptoms, without_inner_waits
from tests.gpu.common import GPU
from tests.planned import LEVELS, Planned, planned

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),  # as errors, Inductor's own would make it fall back
    pytest.mark.usefixtures("poisoned"),  # a read before the first write finds NaN, not the results of the last run
]

PLANS = [("critical_path", 4), ("scattered", 3)]
SHORT = [*((name, "eager") for name in ("googlenet", "bert_base", "moe8", "dlrm")), ("moe8", "inductor")]
CASES = [
    *((name, level, 5, 4) for name, level in SHORT),
    *(pytest.param(name, level, 200, 50, marks=pytest.mark.slow) for level in LEVELS for name in INFERENCE),
]
"""Names of models, kernels, runs without and with a CUDA graph, and seeds: in the long form, each graph is replayed
four times, at both arguments in turn."""


def prepared(name: str, level: str) -> Planned:
    subject = prepare(INFERENCE[name], 1, GPU, torch.float16)
    return planned(subject.model, [subject.args, subject.others], level)


@pytest.mark.parametrize(("name", "level", "runs", "seeds"), CASES)
def test_delays_change_no_bit(name: str, level: str, runs: int, seeds: int) -> None:
    model = prepared(name, level)
    expected = model.expected()
    for run, captured in ((symptoms, False), (captured_symptoms, True)):
        if captured and not model.capturable:
            continue
        for at, (policy, streams) in enumerate(PLANS):
            share, schedule = (runs + 1 - at) // 2, model.schedule(policy, streams, captured=captured)
            errors = list(run(model, schedule, expected, range(at, seeds, 2), share))
            assert len(errors) == share
            assert not any(errors), (policy, captured, *filter(None, errors))


@pytest.mark.parametrize("level", LEVELS)
def test_a_missing_wait_shows(level: str) -> None:
    """Without a wait from the middle or the end of a schedule, one of 80 delayed runs is wrong, captured or not."""
    model = prepared("googlenet", level)
    expected = model.expected()
    for run, captured in ((symptoms, False), (captured_symptoms, True)):
        schedule = model.schedule("critical_path", 4, captured=captured)
        assert not any(run(model, schedule, expected, range(2), runs=4))
        broken = list(without_inner_waits(schedule))
        assert len(broken) >= 2
        for each in (broken[len(broken) // 2], broken[-1]):
            assert any(run(model, each, expected, range(40), runs=80)), (captured, each)
