"""The stream sanitizer on emulated streams reports each missing wait, and nothing else."""

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


@pytest.fixture(scope="module")
def cells() -> Planned:
    return planned(Cells(), [(torch.randn(4, 8),)])


@pytest.mark.parametrize("policy", ["critical_path", "scattered"])
def test_each_missing_wait_is_reported_and_nothing_else(cells: Planned, policy: str) -> None:
    """Including those for fork and join: the caller writes inputs before, and reads outputs after."""
    schedule = cells.schedule(policy, 3, captured=False)
    assert schedule.streams == 3
    result = checked(EmulatedSanitizer(), cells, schedule, most=1000)
    assert result["finding"] == ""
    assert result["reported"] == result["removed"] == schedule.wait_count
    assert result["launches_seen"] > result["ops"] == len(cells.graph.ops)


def test_a_race_is_not_reported_for_the_next_run(cells: Planned) -> None:
    sanitizer, schedule = EmulatedSanitizer(), cells.schedule("scattered", 3, captured=False)
    for broken in without_some_waits(schedule, 3):
        assert "possible data race" in finding(sanitizer, cells, broken)
        assert not finding(sanitizer, cells, schedule)


@pytest.mark.parametrize(("elements", "reported"), [(0, False), (1, True)])
def test_tensors_without_memory_have_no_races(elements: int, reported: bool) -> None:
    sanitizer = EmulatedSanitizer()
    with sanitizer, pytest.raises(csan.CUDASanitizerErrors) if reported else nullcontext():
        x = torch.zeros(elements)
        sanitizer.stream = 1
        x.add_(1)


class Halves(nn.Module):
    """
    x ─▶ sin ─┬▶ first half ─▶ cos ──╮
              ╰▶ second half ─▶ exp ─┴▶ product
    """

    def forward(self, x: Tensor) -> Tensor:
        y = x.sin()
        return y[:2].cos() * y[2:].exp()


def test_accesses_that_overlap_but_start_at_different_addresses_are_missed() -> None:
    """A read of the first half starts where the write did, a read of the second half does not."""
    halves = planned(Halves(), [(torch.randn(4),)])
    result = checked(EmulatedSanitizer(), halves, halves.schedule("scattered", 3, captured=False), most=1000)
    assert not result["finding"]
    assert 0 < result["reported"] < result["removed"]


def test_the_command_prints_findings_and_fails_on_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--device", "cpu", "--models", "towers8", "--kernels", "eager", "--streams", "3"]
    assert main([*arguments, "--removed", "2"]) == 0
    line = json.loads(capsys.readouterr().out)
    assert (line["model"], line["kernels"], line["policy"], line["streams"]) == ("towers8", "eager", "critical_path", 3)
    assert line["finding"] == ""
    assert line["reported"] == line["removed"] > 0
    schedule = Planned.schedule
    monkeypatch.setattr(
        Planned, "schedule", lambda *args, **options: [*without_a_wait(s := schedule(*args, **options)), s][0]
    )
    assert main(arguments) == 1
