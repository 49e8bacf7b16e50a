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


def test_only_the_stages_of_tuning_count_against_its_time() -> None:
    stopwatch = Stopwatch({"trace": 5.0, "fuse": 50.0, "schedule": 1.0} | dict.fromkeys(TUNING, 1.0))
    assert stopwatch.left(Options(tuning_seconds=10.0)) == 10.0 - len(TUNING)
    assert stopwatch.left(Options(tuning_seconds=1.0)) == 0.0
