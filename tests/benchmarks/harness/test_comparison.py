"""Comparisons made by hand: who is timed, and what a cell says of the others."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import nn

import autostream
from autostream.reporting.report import Report
from autostream.runtime.clock import HostClock, Times
from benchmarks.harness.comparison import Cell, PreparedMode, compare_modes

CPU = torch.device("cpu")


@dataclass
class ByHand:
    """Modes by name: each is an error, or an exception to raise instead."""

    modes: dict[str, float | Exception]
    device: torch.device = CPU
    allowed_error: float = 0.1
    reports: tuple[Report, ...] = ()
    log: list[str] = field(default_factory=list)

    def prepare(self, mode: str) -> PreparedMode:
        self.log.append(f"prepare {mode}")
        error = self.modes[mode]
        if isinstance(error, Exception):
            raise error
        return PreparedMode(lambda: self.log.append(mode), lambda: error, lambda: self.reports)


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each measurement is the number of the round, and takes no time."""

    def measure(self: HostClock, call: Callable[[], object], times: Times, runs: int) -> None:
        call()
        times.call_us.append(len(times.call_us) + 1.504)
        times.device_us.append(len(times.device_us) + 2.0)
        times.host_us.append(len(times.host_us) + 3.0)
        times.latency_us.append(len(times.latency_us) + 4.0)

    monkeypatch.setattr(HostClock, "measure", measure)
    monkeypatch.setattr(HostClock, "once_us", lambda self, call: 1.0)


def statuses(cells: dict[str, Cell]) -> dict[str, str]:
    return {mode: cell.status for mode, cell in cells.items()}


# Who is timed


def test_what_is_right_is_timed_in_all_rounds() -> None:
    cell = compare_modes(ByHand({"a": 0.05}), ["a"])["a"]
    assert (cell.status, cell.reason, cell.error) == ("ok", "", 0.05)
    assert cell.call_us == [at + 1.5 for at in range(25)]
    assert cell.device_us == [at + 2.0 for at in range(25)]
    assert cell.host_us == {"q1": 8.5, "median": 15.0, "q3": 21.5}
    assert cell.latency_us == {"q1": 9.5, "median": 16.0, "q3": 22.5, "p99": 27.76}
    assert cell.first_s is not None
    assert cell.first_s >= 0


def test_a_mode_that_fails_leaves_the_others() -> None:
    cells = compare_modes(ByHand({"a": 0.0, "b": ValueError("\nno kernel\nlong story"), "c": 0.0}), ["a", "b", "c"])
    assert statuses(cells) == {"a": "ok", "b": "failed", "c": "ok"}
    assert cells["b"].dump() == {"status": "failed", "reason": "ValueError: no kernel"}
    assert len(cells["a"].call_us) == len(cells["c"].call_us) == 25


def test_a_mode_that_is_wrong_is_not_timed_and_says_by_how_much() -> None:
    by_hand = ByHand({"a": 0.0, "b": 0.25})
    cells = compare_modes(by_hand, ["a", "b"])
    assert statuses(cells) == {"a": "ok", "b": "wrong"}
    assert (cells["b"].error, cells["b"].reason) == (0.25, "error 2.5e-01, 1.0e-01 allowed")
    assert set(cells["b"].dump()) == {"status", "reason", "error", "first_s"}
    assert by_hand.log.count("b") == 1


class Souring(ByHand):
    """Its mode is right so many times that it is looked at, and wrong, or broken, from then on."""

    def __init__(self, times: int, then: float | Exception = 0.25) -> None:
        super().__init__({"sour": 0.0, "sweet": 0.0})
        self._then = then
        self._left = times

    def prepare(self, mode: str) -> PreparedMode:
        prepared = super().prepare(mode)
        return prepared if mode == "sweet" else replace(prepared, error=self._error)

    def _error(self) -> float:
        self._left -= 1
        if self._left >= 0:
            return 0.0
        if isinstance(self._then, Exception):
            raise self._then
        return self._then


@pytest.mark.parametrize(
    ("times", "when"), [(1, "once the others were prepared"), (2, "after it was timed")], ids=["prepared", "timed"]
)
def test_a_mode_that_turns_wrong_later_gets_no_time(times: int, when: str) -> None:
    """As a graph does whose memory a later one was given."""
    by_hand = Souring(times)
    cells = compare_modes(by_hand, ["sour", "sweet"])
    assert statuses(cells) == {"sour": "wrong", "sweet": "ok"}
    assert cells["sour"].reason == f"{when}: error 2.5e-01, 1.0e-01 allowed"
    assert not cells["sour"].call_us
    assert cells["sweet"].call_us
    assert (by_hand.log.count("sour") > 1) == (times == 2)


def test_a_mode_that_breaks_later_has_failed() -> None:
    cells = compare_modes(Souring(2, RuntimeError("lost")), ["sour", "sweet"])
    assert statuses(cells) == {"sour": "failed", "sweet": "ok"}
    assert cells["sour"].reason == "after it was timed: RuntimeError: lost"
    assert not cells["sour"].call_us


def test_only_the_modes_that_are_asked_for_are_prepared_in_the_contests_order_and_before_any_is_timed() -> None:
    by_hand, notes = ByHand({"a": 0.0, "b": 0.0, "c": 0.0}), []
    assert list(compare_modes(by_hand, ["c", "a"], notes.append)) == ["a", "c"]
    assert by_hand.log[:5] == ["prepare a", "a", "prepare c", "c", "a"]
    assert notes[:4] == ["a", "c", "a", "c"]


def test_garbage_is_collected_between_turns_only() -> None:
    enabled = []

    class Watched(ByHand):
        def prepare(self, mode: str) -> PreparedMode:
            return PreparedMode(lambda: enabled.append(gc.isenabled()), lambda: 0.0)

    compare_modes(Watched({"a": 0.0}), ["a"])
    assert enabled[0]
    assert not any(enabled[1:])
    assert gc.isenabled()


# What a cell says


def scheduled_report() -> Report:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
    with torch.no_grad():
        return autostream.optimize(model, (torch.ones(1, 4),), policy="sequential").reports[0]


def test_a_cell_has_what_autostream_chose() -> None:
    report = scheduled_report()
    assert report.chosen
    schedule = compare_modes(ByHand({"a": 0.0}, reports=(report,)), ["a"])["a"].schedule
    assert schedule == {
        "mode": report.mode, "ops": 2, "policy": "sequential", "streams": 1, "waits": 0,
        "predicted_us": round(report.chosen.predicted_us, 2),
        "given_bytes": 4 * (16 + 4 + 4), "planned_bytes": 2 * 16,
        "seconds": {stage: round(seconds, 2) for stage, seconds in report.seconds.items()},
        **({"refusals": schedule["refusals"]} if report.refusals else {}),
    }  # fmt: skip
    json.dumps(schedule)


@pytest.mark.gpu
def test_memory_is_that_of_the_mode_alone() -> None:
    """The first mode holds 64 MiB; a call of the second allocates 32 MiB for a moment."""
    held: list[Any] = []

    class Hungry(ByHand):
        def prepare(self, mode: str) -> PreparedMode:
            if mode == "holds":
                held.append(torch.empty(64 * 2**20, dtype=torch.uint8, device="cuda:0"))
                return PreparedMode(lambda: None, lambda: 0.0)
            return PreparedMode(lambda: torch.empty(32 * 2**20, dtype=torch.uint8, device="cuda:0"), lambda: 0.0)

    def use(modes: Sequence[str]) -> list[tuple[int | None, int | None]]:
        cells = compare_modes(Hungry(dict.fromkeys(modes, 0.0), torch.device("cuda:0"), allowed_error=-1.0), modes)
        return [(cell.allocated_bytes, cell.reserved_bytes) for cell in cells.values()]

    assert use(["holds", "uses"]) == [(64 * 2**20, 64 * 2**20), (32 * 2**20, 32 * 2**20)]
