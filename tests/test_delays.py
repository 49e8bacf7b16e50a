"""Delays reveal missing waits, and do no harm if none is missing; on the CPU, where streams are threads."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.delays import symptoms, without_inner_waits
from tests.planned import Cells, Planned, planned


@pytest.fixture(scope="module")
def cells() -> Planned:
    torch.manual_seed(0)
    return planned(Cells(), [(torch.randn(4, 8),) for _ in range(2)])


@pytest.mark.parametrize(("policy", "lanes"), [("critical_path", 3), ("scattered", 3)])
def test_delays_do_no_harm(cells: Planned, policy: str, lanes: int) -> None:
    schedule = cells.schedule(policy, lanes, captured=False)
    assert schedule.streams == lanes
    assert list(symptoms(cells, schedule, cells.expected(), range(10), runs=20)) == [""] * 20


def test_consecutive_runs_have_different_arguments() -> None:
    """Fifteen runs with ten seeds: each seed has one or two runs."""
    model = planned(nn.ReLU(), [(torch.full((2,), float(at)),) for at in (1, 2)])
    expected = model.expected()
    schedule = model.schedule("sequential", 1, captured=False)
    assert list(symptoms(model, schedule, expected, range(10), runs=15)) == [""] * 15
    wrong = list(symptoms(model, schedule, expected[::-1], range(2), runs=4))
    assert wrong == [f"seed {seed}: wrong numbers for arguments {at}" for seed in (0, 1) for at in (0, 1)]


def test_every_missing_inner_wait_is_revealed(cells: Planned) -> None:
    expected, schedule = cells.expected(), cells.schedule("scattered", 3, captured=False)
    changed = list(without_inner_waits(schedule))
    assert 5 < len(changed) < schedule.wait_count
    for broken in changed:
        assert broken.wait_count == schedule.wait_count - 1
        assert any(symptoms(cells, broken, expected, range(40), runs=40))


def test_a_model_must_be_deterministic_and_depend_on_its_arguments() -> None:
    noise = planned(nn.Dropout(0.5), [(torch.ones(100),)])
    with pytest.raises(AssertionError, match="does not compute the same twice"):
        noise.expected()
    constant = planned(nn.ReLU(), [(-torch.ones(2),), (-torch.full((2,), 2.0),)])
    with pytest.raises(AssertionError, match="stale result"):
        constant.expected()
