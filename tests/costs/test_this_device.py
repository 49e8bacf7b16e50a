"""What the device that is here is and costs: known from earlier, or measured and kept, and never measured twice."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from torch import nn

from autostream import optimize
from autostream import store as keeping
from autostream.costs import measured
from autostream.costs import this_device as here
from autostream.costs.cache import load, path_of, save
from autostream.costs.device import profile_named, profile_of
from autostream.costs.measured import METHOD
from autostream.costs.records import Context, Measurements, Record, context_of
from autostream.costs.roofline import price
from autostream.costs.this_device import costs_here, profile_anew, profile_here
from autostream.errors import TargetError
from autostream.ir import Costs, DeviceProfile
from autostream.runtime.restore import Restore
from tests.runtime.programs import Towers, sample

GPU = "cuda:0"
H200 = profile_named("h200")
UNKNOWN = replace(H200, name="NVIDIA Z1", source="properties")
MEASURED = replace(UNKNOWN, bandwidth=1e6, source="measured")


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache, in a process that has warned of nothing yet."""
    folder = tmp_path / "costs"
    monkeypatch.setenv("AUTOSTREAM_CACHE_DIR", str(folder))
    keeping._warn_once.cache_clear()
    return folder


def _obstruct(folder: Path) -> None:
    folder.write_text("a file in its place")


# Profiles


class _Device:
    """The GPU of this machine, as it is looked up, and how often it was measured."""

    def __init__(self, looked_up: DeviceProfile) -> None:
        self.looked_up = looked_up
        self.measurements = 0
        self.error: Exception | None = None

    @property
    def context(self) -> Context:
        return context_of(GPU, self.looked_up, METHOD)

    def measure(self, device: str, looked_up: DeviceProfile) -> DeviceProfile:
        assert (device, looked_up) == (GPU, self.looked_up)
        self.measurements += 1
        if self.error:
            raise self.error
        return replace(looked_up, bandwidth=1e6, source="measured")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Callable[[DeviceProfile], _Device]:
    def put_in(looked_up: DeviceProfile) -> _Device:
        device = _Device(looked_up)
        monkeypatch.setattr(here, "profile_of", lambda name: looked_up)
        monkeypatch.setattr(here, "measure_profile", device.measure)
        return device

    return put_in


PutIn = Callable[[DeviceProfile], _Device]


def test_a_cpu_is_looked_up(folder: Path) -> None:
    _obstruct(folder)
    assert profile_here("cpu") == (profile_of("cpu"), ())


def test_a_known_gpu_has_its_datasheet(device: PutIn, folder: Path) -> None:
    known = device(H200)
    assert profile_here(GPU) == (H200, ())
    assert known.measurements == 0
    assert not folder.exists()


def test_an_unknown_gpu_is_measured_once(device: PutIn) -> None:
    unknown = device(UNKNOWN)
    assert profile_here(GPU) == profile_here(GPU) == (MEASURED, ())
    assert unknown.measurements == 1


def test_a_known_gpu_is_measured_when_that_is_asked_for_and_then_that_counts(device: PutIn) -> None:
    known = device(H200)
    assert profile_anew(GPU) == profile_anew(GPU) == profile_here(GPU)
    assert (profile_here(GPU)[0].source, known.measurements) == ("measured", 2)


def test_a_profile_is_kept_beside_what_ops_take(device: PutIn) -> None:
    context = device(UNKNOWN).context
    save(Measurements(context, records={"relu": {"warm_us": 2.5}}))
    profile_here(GPU)
    assert load(context) == (Measurements(context, MEASURED, {"relu": {"warm_us": 2.5}}), ())


def test_a_profile_that_was_measured_in_another_way_does_not_count(
    device: PutIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    unknown = device(UNKNOWN)
    profile_here(GPU)
    monkeypatch.setattr(here, "METHOD", METHOD + 1)
    profile_here(GPU)
    assert unknown.measurements == 2


@pytest.mark.parametrize(
    "error", [RuntimeError("CUDA error: a word\nand more"), torch.OutOfMemoryError("a word"), ValueError("a word")]
)
def test_a_gpu_that_cannot_be_measured_is_guessed_and_that_is_reported(device: PutIn, error: Exception) -> None:
    unknown = device(UNKNOWN)
    unknown.error = error
    profile, (decision,) = profile_here(GPU)
    assert profile is UNKNOWN
    assert decision.choice == "not measured"
    assert decision.reason.startswith("the profile of NVIDIA Z1 is guessed from its properties: measuring failed: ")
    assert "a word" in decision.reason
    assert "\n" not in decision.reason
    with pytest.raises(type(error), match="a word"):
        profile_anew(GPU)


def test_a_gpu_that_is_not_here_is_refused() -> None:
    for profile in (profile_here, profile_anew):
        with pytest.raises(TargetError, match="'cuda:97' is not on this machine"):
            profile("cuda:97")


@pytest.mark.parametrize(("looked_up", "profile"), [(H200, H200), (UNKNOWN, MEASURED)])
def test_what_was_wrong_with_the_cache_is_told(
    device: PutIn, folder: Path, looked_up: DeviceProfile, profile: DeviceProfile
) -> None:
    context = device(looked_up).context
    path_of(context).parent.mkdir(parents=True)
    path_of(context).write_text("half of a fi")
    found, (decision,) = profile_here(GPU)
    assert (found, decision.choice) == (profile, "cache rebuilt")
    assert profile_here(GPU) == (profile, ())


def test_a_profile_that_cannot_be_saved_though_the_cache_can_be_read_is_reported(
    device: PutIn, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = device(UNKNOWN).context
    folder.mkdir()
    monkeypatch.setattr(keeping, "_PATIENCE_S", 0.0)
    with FileLock(f"{path_of(context).parent}.lock"):
        profile, (decision,) = profile_here(GPU)
    assert (profile, decision.choice) == (MEASURED, "not cached")


def test_what_cannot_be_kept_is_measured_each_time(device: PutIn, folder: Path) -> None:
    unknown = device(UNKNOWN)
    _obstruct(folder)
    for _ in range(2):
        profile, decisions = profile_here(GPU)
        assert profile == MEASURED
        assert {decision.choice for decision in decisions} == {"not cached"}
    assert unknown.measurements == 2


# Costs


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What ops were expected to take whenever one was timed, µs."""
    timed: list[float] = []

    def timer(call: Callable[[], Any], restore: Restore, expected_us: float) -> Record:
        timed.append(expected_us)
        return {"warm_us": 2.5}

    monkeypatch.setattr(measured, "_time_calls", timer)
    return timed


def _costs(name: str, budget_s: float = 1000.0) -> tuple[Costs, list[str]]:
    case = sample(name)
    costs, remarks = costs_here(case.program, case.graph, profile_of("cpu"), case.args(), budget_s)
    return costs, [decision.choice for decision in remarks]


def test_what_was_timed_is_kept_and_not_timed_again(timed: list[float]) -> None:
    costs, remarks = _costs("towers")
    assert ({cost.duration_us for cost in costs.values()}, remarks) == ({2.5}, [])
    kept, _ = load(context_of("cpu", profile_of("cpu"), METHOD))
    assert list(kept.records.values()) == [{"warm_us": 2.5}] * len(timed)
    timed.clear()
    assert _costs("towers") == (costs, [])
    assert timed == []


def test_another_program_times_only_what_is_new_in_it(timed: list[float]) -> None:
    _costs("normalized")
    context = context_of("cpu", profile_of("cpu"), METHOD)
    before = load(context)[0].records
    timed.clear()
    _costs("several")
    after = load(context)[0].records
    assert len(timed) == len(after) - len(before)
    assert before.items() <= after.items()


def test_what_was_measured_in_another_way_does_not_count(timed: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    _costs("views")
    once = len(timed)
    monkeypatch.setattr(here, "METHOD", METHOD + 1)
    _costs("views")
    assert len(timed) == 2 * once


def test_what_there_was_no_time_for_is_timed_the_next_time(timed: list[float]) -> None:
    costs, remarks = _costs("views", budget_s=0.0)
    assert ({cost.source for cost in costs.values()}, remarks, timed) == ({"roofline"}, [], [])
    assert {cost.source for cost in _costs("views")[0].values()} == {"measured"}


def test_where_measuring_fails_costs_are_estimates_and_that_is_told(
    timed: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any) -> None:
        raise TypeError("no key for this")

    monkeypatch.setattr(here, "measure", fails)
    case = sample("towers")
    costs, (remark,) = costs_here(case.program, case.graph, profile_of("cpu"), case.args(), 1000.0)
    assert costs == price(case.graph, profile_of("cpu"))
    assert remark.choice == "not measured"
    assert remark.reason == "costs are estimates, for measuring failed: TypeError: no key for this"


def test_costs_that_cannot_be_kept_are_measured_each_time(timed: list[float], folder: Path) -> None:
    _obstruct(folder)
    costs, remarks = _costs("views")
    once = len(timed)
    assert set(remarks) == {"not cached"}
    assert _costs("views") == (costs, remarks)
    assert len(timed) == 2 * once


# Whole models


def _optimized(model: nn.Module) -> None:
    with torch.no_grad():
        fast = optimize(model.eval(), costs="measured")
        fast(torch.ones(2, 8))
    (report,) = fast.reports
    assert {cost.source for cost in report.costs.values()} == {"measured"}


def test_the_second_optimize_of_a_model_measures_nothing(timed: list[float]) -> None:
    _optimized(Towers())
    assert timed
    timed.clear()
    _optimized(Towers())
    assert timed == []
    _optimized(Towers(width=8, layers=1))
    assert timed == [], "nor does a model of the same ops"


def _optimize_what_is_known(folder: Path) -> None:
    os.environ["AUTOSTREAM_CACHE_DIR"] = str(folder)
    timed: list[Any] = []
    measured._time_calls = lambda *args: timed.append(args) or {}  # type: ignore[func-returns-value]
    _optimized(Towers())
    assert timed == []


def test_nor_does_another_process(timed: list[float], folder: Path) -> None:
    _optimized(Towers())
    process = multiprocessing.get_context("spawn").Process(target=_optimize_what_is_known, args=(folder,))
    process.start()
    process.join()
    assert process.exitcode == 0
