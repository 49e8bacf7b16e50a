"""``autostream schedule --world``, as its users meet it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from autostream import cli
from tests.cli.calls import error_of

SOURCE = """
import os

import autostream
import torch
from torch import nn

def layers():
    return nn.Sequential(*(nn.Linear(512, 512) for _ in range(6)))

def model():
    return layers(), (torch.ones(8, 512),)

def trained():
    model = layers()
    adamw = torch.optim.AdamW(model.parameters())
    return autostream.train_step(model, adamw, nn.MSELoss()), (torch.ones(64, 512), torch.ones(64, 512))

def loaded():
    step, batch = trained()
    return step, list(batch)  # as a DataLoader returns it

def written(group=None):
    model = layers()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)

    @autostream.step(optimizers=[sgd], data_parallel=group)
    def update(x):
        sgd.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        sgd.step()
        sgd.zero_grad()
        return loss

    return update, (torch.ones(4096, 512),)

def wrapped():
    model = nn.parallel.DistributedDataParallel(layers())
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    return autostream.train_step(model, sgd, nn.MSELoss()), (torch.ones(8, 512), torch.ones(8, 512))

def synchronized():
    model = nn.Sequential(nn.Linear(8, 8), nn.SyncBatchNorm(8))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    return autostream.train_step(model, sgd, nn.MSELoss()), (torch.ones(4, 8), torch.ones(4, 8))

def failing():
    sgd = torch.optim.SGD(layers().parameters(), lr=0.1)

    @autostream.step(optimizers=[sgd])
    def update(x):
        raise RuntimeError("no such rows")

    return update, (torch.ones(4, 8),)

def launched():
    return int(os.environ["LOCAL_RANK"])

def initialized():
    torch.distributed.init_process_group("gloo")

def parallel():
    return written(torch.distributed.group.WORLD)

def sharded(written=False, processes=None):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512))
    mesh = init_device_mesh("cpu", (processes or torch.distributed.get_world_size(),))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    adamw = torch.optim.AdamW(model.parameters())
    if not written:
        return autostream.train_step(model, adamw, nn.MSELoss()), (torch.ones(64, 512), torch.ones(64, 512))

    @autostream.step(optimizers=[adamw])
    def update(x):
        loss = model(x).square().mean()
        loss.backward()
        adamw.step()
        adamw.zero_grad()
        return loss

    return update, (torch.ones(64, 512),)

def sharded_as_written():
    return sharded(written=True)

def sharded_over_four():
    return sharded(processes=4)
"""

MIB = 2**20


@pytest.fixture(autouse=True)
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "steps.py").write_text(SOURCE)


def planned(capsys: pytest.CaptureFixture[str], step: str, *argv: str) -> dict[str, Any]:
    assert cli.main(["schedule", f"steps.py:{step}", "--json", *argv]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_more_processes_and_slower_links_are_less_efficient(capsys: pytest.CaptureFixture[str]) -> None:
    efficiencies, collectives = [], []
    for world in (8, 64):
        data = planned(capsys, "trained", "--device", "h200", "--world", str(world))
        assert (data["device"], data["processes"]) == ("NVIDIA H200", world)
        assert data["message_bytes"] == 6 * (MIB + 512 * 4)
        assert [run["interconnect"] for run in data["runs"]] == ["nvlink", "infiniband"]
        for run in data["runs"]:
            assert 0 <= run["exposed_us"] <= run["communication_us"] + 1e-6
            assert run["efficiency"] == pytest.approx(data["alone_us"] / run["step_us"])
            for value, (low, high) in (("step_us", run["range_us"]), ("efficiency", run["efficiency_range"])):
                assert low <= run[value] <= high
        efficiencies += [run["efficiency"] for run in data["runs"]]
        collectives += [run["collectives"] for run in data["runs"]]
    of_8, network_of_8, of_64, network_of_64 = efficiencies
    assert 1 > of_8 > of_64 > network_of_64
    assert of_8 > network_of_8 > network_of_64
    assert 1 == min(collectives) == collectives[-1]  # each takes long to start over many machines
    assert not torch.distributed.is_initialized()


def test_what_the_memory_budget_costs_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    world = ("--device", "h200", "--world", "8", "--interconnect", "nvlink", "--memory-budget")
    (within,), (beyond,) = (planned(capsys, "trained", *world, budget)["runs"] for budget in ("12000000", "inf"))
    assert beyond["step_us"] == beyond["unbudgeted_us"]
    assert beyond["step_us"] <= within["unbudgeted_us"] < within["step_us"]


@pytest.mark.parametrize("step", ["written", "parallel", "loaded"])
def test_steps_may_name_the_processes_or_not(capsys: pytest.CaptureFixture[str], step: str) -> None:
    data = planned(capsys, step, "--device", "h200", "--world", "8", "--interconnect", "infiniband")
    (run,) = data["runs"]
    assert run["interconnect"] == "infiniband"
    assert 1 <= run["collectives"] <= 3


@pytest.mark.parametrize("step", ["sharded", "sharded_as_written"])
def test_a_tensor_parallel_step_communicates_what_it_does_by_itself(
    capsys: pytest.CaptureFixture[str], step: str
) -> None:
    """The output's partial sums, and no gradients: each process has its own weights."""
    data = planned(capsys, step, "--device", "h200", "--world", "8", "--interconnect", "nvlink")
    assert [run["collectives"] for run in data["runs"]] == [1]
    assert data["message_bytes"] == 64 * 512 * 4


def test_processes_on_this_machines_cpu_talk_over_its_loopback(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["schedule", "steps.py:trained", "--device", "cpu", "--world", "2"]) == 0
    said = capsys.readouterr().out
    assert "6.3 MB in the collectives of a step" in said
    assert "\nloopback " in said
    assert "off by 35%" in said


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["model", "--world", "8"], "steps.py:model is a model: --world plans a training step, (step, batch)"),
        (["trained", "--stages", "2", "--world", "8"], "--stages plans a pipeline, and --world processes that train"),
        (["trained", "--interconnect", "nvlink"], "say how many, as in --stages 4 or --world 8"),
        (["trained", "--world", "8", "--interconnect", "rings"], "interconnect='rings' is not allowed"),
        (["trained", "--world", "0"], "world=0 is not allowed: use a whole number of processes from 1"),
        (["wrapped", "--world", "8"], "over its processes: give the step the model itself (its .module)"),
        (["synchronized", "--world", "8"], "itself fails at this batch (ValueError: SyncBatchNorm expected"),
        (["sharded_over_four", "--world", "8"], "it has collectives of 4 processes: make its groups and meshes of 8"),
        (["failing", "--world", "8"], "(RuntimeError: no such rows): a plan takes one run, so give a step and a batch"),
        (["failing"], "update itself fails at this batch (RuntimeError: no such rows)"),
        (["launched", "--world", "8"], "--world makes the processes itself: call no init_process_group"),
        (["initialized", "--world", "8"], "--world makes the processes itself: call no init_process_group"),
    ],
)
def test_what_makes_no_sense_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, argv: list[str], said: str
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    step, *more = argv
    assert said in error_of(capsys, "schedule", f"steps.py:{step}", "--device", "h200", *more)


def test_a_version_without_fake_processes_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.testing._internal.distributed.fake_pg", None)
    assert "this version of PyTorch plans for no processes: " in error_of(
        capsys, "schedule", "steps.py:trained", "--world", "8"
    )
