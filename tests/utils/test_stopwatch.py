"""Seconds by stage, and the remaining time for tuning."""

from __future__ import annotations

import pytest

from autostream.options import Options
from autostream.utils import stopwatch as module
from autostream.utils.stopwatch import TUNING, Stopwatch


def test_seconds_of_a_stage_add_up_also_if_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([10.0, 11.0, 20.0, 22.0, 30.0, 34.0])
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(now))
    stopwatch = Stopwatch()
    with stopwatch("a"):
        pass
    with stopwatch("b"):
        pass
    with pytest.raises(KeyError), stopwatch("a"):
        raise KeyError
    assert stopwatch.seconds == {"a": 1.0 + 4.0, "b": 2.0}


def test_a_stage_within_another_is_no_part_of_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 2.0, 5.0, 6.0, 8.0])
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(now))
    stopwatch = Stopwatch({"trace": 7.0, "inner": 10.0})
    with stopwatch("outer"), stopwatch("middle"), stopwatch("inner"):
        pass
    assert stopwatch.seconds == {"trace": 7.0, "inner": 10.0 + 3.0, "middle": 5.0 - 3.0, "outer": 8.0 - 5.0}


def test_only_the_stages_of_tuning_count_against_its_time() -> None:
    stopwatch = Stopwatch({"trace": 5.0, "fuse": 50.0, "schedule": 1.0} | dict.fromkeys(TUNING, 1.0))
    assert stopwatch.left(Options(tuning_seconds=10.0)) == 10.0 - len(TUNING)
    assert stopwatch.left(Options(tuning_seconds=1.0)) == 0.0
