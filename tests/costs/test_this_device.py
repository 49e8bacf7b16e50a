"""Profiles and costs of this machine: from the cache, else measured and cached, and never measured twice."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from autostream import optimize
from autostream import store as stores
from autostream.costs import measured, this_device
from autostream.costs.cache import load, save
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
    """An empty cache, in a process that has logged no warning yet."""
    folder = tmp_path / "costs"
    monkeypatch.setenv("AUTOSTREAM_CACHE_DIR", str(folder))
    stores._warn_once.cache_clear()
    return folder


# Profiles


class _Device:
    """The GPU of this machine: its profile without measuring, and how often it was measured."""

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


Install = Callable[[DeviceProfile], _Device]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    def install(looked_up: DeviceProfile) -> _Device:
        device = _Device(looked_up)
        monkeypatch.setattr(this_device, "profile_of", lambda name: looked_up)
        monkeypatch.setattr(this_device, "measure_profile", device.measure)
        return device

    return install


def test_the_profile_of_a_cpu_is_not_cached(folder: Path) -> None:
    folder.write_text("a file in place of the folder")
    assert profile_here("cpu") == (profile_of("cpu"), ())


def test_a_known_gpu_is_measured_only_if_asked(install: Install, folder: Path) -> None:
    device = install(H200)
    assert profile_here(GPU) == (H200, ())
    assert device.measurements == 0
    assert not folder.exists()
    assert profile_anew(GPU) == profile_anew(GPU) == profile_here(GPU)
    assert (profile_here(GPU)[0].source, device.measurements) == ("measured", 2)


def test_an_unknown_gpu_is_measured_once_by_each_method(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    device = install(UNKNOWN)
    save(Measurements(device.context, records={"relu": {"warm_us": 2.5}}))
    assert profile_here(GPU) == profile_here(GPU) == (MEASURED, ())
    assert device.measurements == 1
    assert load(device.context) == (Measurements(device.context, MEASURED, {"relu": {"warm_us": 2.5}}), ())
    monkeypatch.setattr(this_device, "METHOD", METHOD + 1)
    profile_here(GPU)
    assert device.measurements == 2


@pytest.mark.parametrize("error", [RuntimeError("CUDA error: a word\nand more"), torch.OutOfMemoryError("a word")])
def test_if_measuring_fails_the_profile_is_guessed_with_a_note(install: Install, error: Exception) -> None:
    install(UNKNOWN).error = error
    profile, (note,) = profile_here(GPU)
    assert profile is UNKNOWN
    assert note.choice == "not measured"
    assert note.reason.startswith("the profile of NVIDIA Z1 is guessed from its properties: measuring failed: ")
    assert "a word" in note.reason
    assert "\n" not in note.reason
    with pytest.raises(type(error), match="a word"):
        profile_anew(GPU)


def test_a_gpu_that_is_not_on_this_machine_is_refused() -> None:
    for profile in (profile_here, profile_anew):
        with pytest.raises(TargetError, match="'cuda:97' is not on this machine"):
            profile("cuda:97")


# Costs


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The expected times of all ops that are timed, µs."""
    timed: list[float] = []

    def timer(call: Callable[[], Any], restore: Restore, expected_us: float) -> Record:
        timed.append(expected_us)
        return {"warm_us": 2.5}

    monkeypatch.setattr(measured, "_time_calls", timer)
    return timed


def _costs(name: str, budget_s: float = 1000.0) -> tuple[Costs, list[str]]:
    case = sample(name)
    costs, notes = costs_here(case.program, case.graph, profile_of("cpu"), case.args(), budget_s)
    return costs, [note.choice for note in notes]


def _records() -> dict[str, Record]:
    return dict(load(context_of("cpu", profile_of("cpu"), METHOD))[0].records)


def test_ops_are_timed_once_for_all_programs(timed: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    costs, notes = _costs("normalized", budget_s=0.0)
    assert ({cost.source for cost in costs.values()}, notes, timed) == ({"roofline"}, [], [])
    costs, notes = _costs("normalized")
    assert ({cost.duration_us for cost in costs.values()}, notes) == ({2.5}, [])
    before = _records()
    assert list(before.values()) == [{"warm_us": 2.5}] * len(timed)
    timed.clear()
    assert _costs("normalized") == (costs, [])
    assert timed == []
    _costs("several")
    assert len(timed) == len(_records()) - len(before)
    assert before.items() <= _records().items()
    timed.clear()
    monkeypatch.setattr(this_device, "METHOD", METHOD + 1)
    _costs("normalized")
    assert len(timed) == len(before)


def test_if_measuring_fails_costs_are_estimates_with_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> None:
        raise TypeError("no key for this")

    monkeypatch.setattr(this_device, "measure", fails)
    case = sample("towers")
    costs, (note,) = costs_here(case.program, case.graph, profile_of("cpu"), case.args(), 1000.0)
    assert costs == price(case.graph, profile_of("cpu"))
    assert note.choice == "not measured"
    assert note.reason == "costs are estimates, for measuring failed: TypeError: no key for this"


# Whole models


def _optimized(model: Towers) -> None:
    with torch.no_grad():
        fast = optimize(model.eval(), costs="measured")
        fast(torch.ones(2, 8))
    (report,) = fast.reports
    assert {cost.source for cost in report.costs.values()} == {"measured"}


def _optimize_in_another_process(folder: Path) -> None:
    os.environ["AUTOSTREAM_CACHE_DIR"] = str(folder)
    timed: list[Any] = []
    measured._time_calls = lambda *args: timed.append(args) or {}  # type: ignore[func-returns-value]
    _optimized(Towers())
    assert timed == []


def test_a_model_is_measured_once_for_all_processes(timed: list[float], folder: Path) -> None:
    _optimized(Towers())
    assert timed
    timed.clear()
    _optimized(Towers(width=8, layers=1))
    assert timed == [], "a model of the same ops"
    process = multiprocessing.get_context("spawn").Process(target=_optimize_in_another_process, args=(folder,))
    process.start()
    process.join()
    assert process.exitcode == 0
