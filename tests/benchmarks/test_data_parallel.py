"""The benchmark of data-parallel training: two processes over gloo, and what is said of times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.data_parallel import main, table


def test_two_processes_measure_all_that_is_asked_for(tmp_path: Path) -> None:
    modes = ["autostream", "all_reduce"]
    argv = ["--world", "2", "--device", "cpu", "--workloads", "train_mlp12", "--rounds", "1", "--out", str(tmp_path)]
    assert main([*argv, "--modes", *modes]) == 0
    result = json.loads((tmp_path / "data_parallel-2.json").read_text())
    (row,) = result["rows"]
    assert (result["world"], row["workload"], row["failed"]) == (2, "train_mlp12", {})
    assert [*row["us"]] == modes
    assert row["us"]["autostream"] > 0.0
    assert [*row["schedules"]] == ["autostream"]
    assert "aten kernels" in row["schedules"]["autostream"]
    assert (tmp_path / "data_parallel-2.md").read_text() == table([row]) + "\n"


def test_ratios_and_the_exposed_share_follow_from_times() -> None:
    us = {"alone": 1000.0, "autostream": 1010.0, "ddp": 2020.0, "all_reduce": 200.0}
    row = {"workload": "net", "batch": 4, "us": us, "failed": {"ddp_compiled": "no compiler"}}
    cells = [cell.strip() for cell in table([row]).splitlines()[2].strip("|").split("|")]
    assert cells == ["net", "4", "1,000", "1,010", "2,020", "failed", "200", "2.00×", "", "+1.0%", "5%"]


def test_more_processes_than_gpus_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--world", "64"])
    assert "GPUs here for 64 processes" in capsys.readouterr().err
