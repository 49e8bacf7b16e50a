"""The stream sanitizer, told of lanes that are only numbers: it reports what lacks a wait, and nothing else."""

from __future__ import annotations

import json
from contextlib import nullcontext

import pytest
import torch
import torch.cuda._sanitizer as csan
from torch import Tensor, nn

from tests.planned import Cells, Planned, planned
from tests.sanitizer import EmulatedSanitizer, checked, finding, main, without_some_waits
from tests.scheduling.mistakes import without_a_wait


@pytest.fixture
def cells() -> Planned:
    return planned(Cells(), [(torch.randn(4, 8),)])


@pytest.mark.parametrize("policy", ["critical_path", "scattered"])
def test_each_wait_that_is_missing_is_reported_and_else_nothing(cells: Planned, policy: str) -> None:
    """Those of fork and join among them: the caller writes inputs before, and reads outputs after."""
    schedule = cells.schedule(policy, 3, captured=False)
    assert schedule.streams == 3
    result = checked(EmulatedSanitizer(), cells, schedule, most=1000)
    assert result["finding"] == ""
    assert result["reported"] == result["removed"] == schedule.wait_count
    assert result["launches_seen"] > result["ops"] == len(cells.graph.ops)


def test_what_was_reported_is_over_when_the_next_run_begins(cells: Planned) -> None:
    sanitizer, schedule = EmulatedSanitizer(), cells.schedule("scattered", 3, captured=False)
    for broken in without_a_wait(schedule):
        assert "possible data race" in finding(sanitizer, cells, broken)
        assert not finding(sanitizer, cells, schedule)


@pytest.mark.parametrize(("elements", "reported"), [(0, False), (1, True)])
def test_what_has_no_memory_cannot_be_raced_for(elements: int, reported: bool) -> None:
    sanitizer = EmulatedSanitizer()
    with sanitizer, pytest.raises(csan.CUDASanitizerErrors) if reported else nullcontext():
        x = torch.zeros(elements)
        sanitizer.lane = 1
        x.add_(1)


class Halves(nn.Module):
    """
    x ─▶ sin ─┬▶ first half ─▶ cos ──╮
              ╰▶ second half ─▶ exp ─┴▶ product
    """

    def forward(self, x: Tensor) -> Tensor:
        y = x.sin()
        return y[:2].cos() * y[2:].exp()


def test_memory_that_overlaps_but_begins_elsewhere_escapes_it() -> None:
    """What is read of the first half is where the writing began; of the second, it is not."""
    halves = planned(Halves(), [(torch.randn(4),)])
    schedule = halves.schedule("scattered", 3, captured=False)
    result = checked(EmulatedSanitizer(), halves, schedule, most=1000)
    assert not result["finding"]
    assert 0 < result["reported"] < result["removed"]


def test_some_waits_are_from_all_over_a_schedule(cells: Planned) -> None:
    schedule = cells.schedule("scattered", 3, captured=False)
    assert schedule.wait_count > 5
    assert list(without_some_waits(schedule, 0)) == []
    assert list(without_some_waits(schedule, 1000)) == list(without_a_wait(schedule))
    some = list(without_some_waits(schedule, 3))
    assert 1 < len(some) <= 3
    assert some[0] == next(without_a_wait(schedule))


def test_the_command_says_what_it_saw(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--device", "cpu", "--models", "towers8", "--kernels", "eager", "--streams", "3", "--removed", "2"]
    assert main(arguments) == 0
    line = json.loads(capsys.readouterr().out)
    assert (line["model"], line["kernels"], line["policy"], line["streams"]) == ("towers8", "eager", "critical_path", 3)
    assert line["finding"] == ""
    assert line["reported"] == line["removed"] > 0


def test_the_command_fails_on_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = Planned.schedule
    monkeypatch.setattr(
        Planned, "schedule", lambda *args, **kwargs: [*without_a_wait(s := lacking(*args, **kwargs)), s][0]
    )
    assert main(["--device", "cpu", "--models", "towers8", "--kernels", "eager", "--streams", "3"]) == 1
