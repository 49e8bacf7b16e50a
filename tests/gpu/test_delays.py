"""Spinning kernels before random ops of random streams: not a bit may change, captured or not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autostream.runtime import arena
from benchmarks.zoo import INFERENCE, prepare
from tests.delays import captured_symptoms, symptoms, without_inner_waits
from tests.planned import LEVELS, Planned, planned

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),  # as errors, Inductor's own would make it fall back
]

GPU = torch.device("cuda", 0)

SHORT = [
    *((name, "eager") for name in ("googlenet", "bert_base", "towers8", "moe8", "dlrm", "ensemble4")),
    *((name, "inductor") for name in ("towers8", "moe8")),
]
"""What the suite delays; the long form delays all, at both levels."""

PLANS = [("critical_path", 4), ("scattered", 3)]

LONG_RUNS = 200


@pytest.fixture(autouse=True)
def _rubbish_in_arenas(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read there before it is written is NaN, and not what the run before has left."""
    reserve = arena.reserve

    def filled(device: str, size: int) -> Tensor:
        return reserve(device, size).fill_(0xFF)

    monkeypatch.setattr(arena, "reserve", filled)


def prepared(name: str, level: str) -> Planned:
    subject = prepare(INFERENCE[name], 1, GPU, torch.float16)
    return planned(subject.model, [subject.args, subject.others], level)


def check(name: str, level: str, runs: int, seeds: int) -> None:
    """So many delayed runs without a CUDA graph, and as many replays of some; half of each by either policy."""
    model = prepared(name, level)
    expected = model.expected()
    for look, captured in ((symptoms, False), (captured_symptoms, True)):
        if captured and not model.capturable:
            continue
        for at, (policy, streams) in enumerate(PLANS):
            share, schedule = (runs + 1 - at) // 2, model.schedule(policy, streams, captured=captured)
            found = list(look(model, schedule, expected, range(at, seeds, 2), share))
            assert len(found) == share
            assert not any(found), (policy, captured, *filter(None, found))


@pytest.mark.parametrize(("name", "level"), SHORT)
def test_not_a_bit_changes(name: str, level: str) -> None:
    check(name, level, runs=5, seeds=4)


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", INFERENCE)
def test_not_a_bit_changes_in_two_hundred_runs(name: str, level: str) -> None:
    """From 25 seeds by each policy: each graph is replayed four times, at both arguments in turn."""
    check(name, level, runs=LONG_RUNS, seeds=50)


@pytest.mark.parametrize("level", LEVELS)
def test_a_missing_wait_shows(level: str) -> None:
    """Two of them, from the middle and the end of the schedule, each within 80 delayed runs, captured or not."""
    model = prepared("googlenet", level)
    expected = model.expected()
    for look, captured in ((symptoms, False), (captured_symptoms, True)):
        schedule = model.schedule("critical_path", 4, captured=captured)
        assert not any(look(model, schedule, expected, range(2), runs=4))
        broken = list(without_inner_waits(schedule))
        assert len(broken) >= 2
        for each in (broken[len(broken) // 2], broken[-1]):
            assert any(look(model, each, expected, range(40), runs=80)), (captured, each)
