"""The benchmark of data-parallel training: two processes over gloo, and what is said of times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from autostream.runtime.profiled_kernels import Kernel
from benchmarks import data_parallel
from benchmarks.data_parallel import main, sums_of, table
from benchmarks.zoo import TrainingWorkload
from tests.distributed.processes import outcomes

SMALL = TrainingWorkload(
    "small",
    lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)),
    lambda batch: (torch.randn(batch, 8), torch.randn(batch, 4)),
    lambda model, x, y: F.mse_loss(model(x), y),
)


def measured(rank: int, processes: int, group: dist.ProcessGroup) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(data_parallel.TRAINING, "small", SMALL)  # type: ignore[arg-type]
        row = data_parallel.row(
            "small", ["alone", "autostream", "any_memory", "all_reduce"], torch.device("cpu"), rounds=1
        )
    assert (row["workload"], row["failed"], row["exposed"]) == ("small", {}, {})  # only a GPU's kernels are profiled
    assert [*row["us"]] == ["alone", "autostream", "any_memory", "all_reduce"]
    assert row["us"]["autostream"] > 0.0
    assert [*row["schedules"]] == ["alone", "autostream", "any_memory"]
    assert "aten kernels" in row["schedules"]["autostream"]
    times: list[Any] = [None] * processes
    dist.all_gather_object(times, row["us"])
    assert times == [row["us"]] * processes


def test_two_processes_measure_together() -> None:
    assert outcomes({"measured": measured}, 2) == {"measured": ["", ""]}


def test_a_command_starts_processes_and_saves_what_they_measure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mode that captures nothing: modes are measured above."""
    monkeypatch.setenv("TORCH_NCCL_HIGH_PRIORITY", "1")
    argv = ["--world", "1", "--device", "cpu", "--workloads", "train_mlp12", "--rounds", "1", "--out", str(tmp_path)]
    assert main([*argv, "--modes", "ddp"]) == 0
    result = json.loads((tmp_path / "data_parallel-1.json").read_text())
    assert result["variables"]["TORCH_NCCL_HIGH_PRIORITY"] == "1"
    (row,) = result["rows"]
    assert (result["world"], row["workload"], row["failed"], [*row["us"]]) == (1, "train_mlp12", {}, ["ddp"])
    assert (tmp_path / "data_parallel-1.md").read_text() == table([row]) + "\n"


def test_ratios_and_shares_follow_from_times() -> None:
    us = {"alone": 1000.0, "autostream": 1010.0, "ddp": 2020.0, "all_reduce": 200.0}
    row = {
        "workload": "net",
        "batch": 4,
        "us": us,
        "exposed": {"autostream": 0.031},
        "waiting_us": {"autostream": 12.5},
        "failed": {"ddp_compiled": "no"},
    }
    cells = [cell.strip() for cell in table([row]).splitlines()[2].strip("|").split("|")]
    assert cells == ["net", "4", "1,000", "1,010", "", "2,020", "failed", "200", "2.00×", "", "+1.0%", "5%", "3%", "12"]


def replay(start_us: float, end_us: float, computes_us: float = 6.0) -> list[Kernel]:
    return [Kernel(("gemm",), 1, 0.0, computes_us), Kernel(("ncclDevKernel_AllReduce",), 2, start_us, end_us)]


def test_waiting_for_another_process_is_no_part_of_a_sum() -> None:
    """The first process waits 500 us. Nothing hides the last of the 5 of the sum::

    first   gemm ······ sum          clocks differ
    second         gemm sum
    """
    first, second = sums_of([[replay(2.0, 507.0, 506.0)], [replay(2.0, 7.0)]])
    assert first == (0.2, 1.0, 5.0, 500.0)
    assert second == (0.2, 1.0, 5.0, 0.0)


def test_the_median_of_replays_counts() -> None:
    runs = [replay(2.0, end) for end in (7.0, 502.0, 7.0)]
    assert sums_of([runs]) == [(0.2, 1.0, 5.0, 0.0)]


def test_sums_of_a_replay_add_up_and_wait_for_one_another() -> None:
    """Each process comes last to one of two sums of 4 us, the second of which nothing hides."""
    first = [*replay(5.0, 9.0, 9.0), *replay(14.0, 28.0)]
    second = [*replay(1.0, 9.0, 9.0), *replay(24.0, 28.0)]
    assert sums_of([[first], [second]]) == [(0.5, 4.0, 8.0, 10.0), (0.5, 4.0, 8.0, 4.0)]


def test_without_kernels_of_nccl_that_belong_together_there_are_no_sums() -> None:
    alone = [Kernel(("gemm",), 1, 0.0, 6.0)]
    assert sums_of([[alone]] * 2) == sums_of([[], []]) == []
    assert sums_of([[replay(2.0, 7.0)], [replay(2.0, 7.0)] * 2]) == []  # a replay is lost
    assert sums_of([[replay(2.0, 7.0)], [alone]]) == []  # a kernel is
    assert sums_of([[replay(2.0, 2.0)]] * 2) == []


def test_sums_alone_are_those_of_the_step(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--device", "cpu", "--modes", "alone", "all_reduce"])
    assert "all_reduce takes the sums of autostream" in capsys.readouterr().err


def test_more_processes_than_gpus_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--world", "64"])
    assert "GPUs here for 64 processes" in capsys.readouterr().err
