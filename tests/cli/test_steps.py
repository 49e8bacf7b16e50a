"""Commands on training steps: the plan of a step, for a GPU that is not here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autostream.cli import step_modes
from autostream.cli.program import main

SOURCE = """
import os

import autostream
import torch
from torch import nn


def twins():
    critics = nn.ModuleList(nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 1)) for _ in range(2))
    sgd = torch.optim.SGD(critics.parameters(), lr=0.1)

    @autostream.step(optimizers=[sgd])
    def update(x):
        losses = [critic(x).square().mean() for critic in critics]
        sgd.zero_grad()
        (losses[0] + losses[1]).backward()
        sgd.step()
        sgd.zero_grad()
        return losses[0]

    return update, (torch.ones(16, 8),)


def trained():
    model = nn.Linear(8, 4)
    return autostream.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss()), (
        torch.ones(16, 8),
        torch.ones(16, 4),
    )


def branching():
    model = nn.Linear(8, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)

    @autostream.step(optimizers=[sgd])
    def update(x):
        loss = model(x).mean()
        if loss.item() > 3:
            loss = loss * 2
        sgd.zero_grad()
        loss.backward()
        sgd.step()
        return loss

    return update, (torch.ones(16, 8),)


def dropping():
    model = nn.Sequential(nn.Linear(8, 4), nn.Dropout(0.5))
    return autostream.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss()), (
        torch.ones(16, 8),
        torch.ones(16, 4),
    )


def silent():
    update, batch = twins()
    return autostream.step(optimizers=update._optimizers)(lambda x: None), batch


def differing():
    update, (x,) = twins()
    return update, (x * (1 + int.from_bytes(os.urandom(4)) / 2**30),)
"""


@pytest.fixture
def target(tmp_path: Path) -> str:
    path = tmp_path / "steps.py"
    path.write_text(SOURCE)
    return str(path)


@pytest.mark.parametrize("factory", ["twins", "trained"])
def test_a_step_is_planned_for_a_gpu_that_is_not_here(
    factory: str, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["schedule", f"{target}:{factory}", "--device", "h200", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["profile"]["name"] == "NVIDIA H200"
    assert "on cuda:0" in report["signature"]
    ops = report["graph"]["ops"]
    targets = [op["target"] for op in (ops.values() if isinstance(ops, dict) else ops)]
    assert "aten.add_.Tensor" in targets, "the update is part of the graph"
    assert report["chosen"]


def test_the_code_of_a_step_is_shown(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", f"{target}:twins", "--device", "h200", "--streams", "2", "--code"]) == 0
    code = capsys.readouterr().out
    assert code.count("aten.add_.Tensor(") == 8
    assert "streams_wait" in code


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo reads it
@pytest.mark.parametrize(
    ("factory", "modes"),
    [
        ("twins", ["eager", "compile_default", "autostream"]),
        ("trained", ["eager", "autostream"]),
        ("dropping", ["eager", "autostream"]),
    ],
)
def test_a_step_is_timed_in_all_modes(
    factory: str, modes: list[str], target: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autostream.runtime.clock.ROUND_US", 1.0)
    assert main(["bench", f"{target}:{factory}", "--device", "cpu", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert {mode: cell.get("reason", "ok") for mode, cell in row["cells"].items()} == dict.fromkeys(modes, "ok")
    assert all("call_us" in cell for cell in row["cells"].values())


def test_a_step_that_computes_something_else_is_not_timed(
    target: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autostream.runtime.clock.ROUND_US", 1.0)
    wrong = lambda step: lambda *batch: step(*batch) * 1.5  # noqa: E731
    monkeypatch.setitem(step_modes.MODES, "autostream", wrong)  # type: ignore[arg-type]
    assert main(["bench", f"{target}:trained", "--device", "cpu", "--json"]) == 1
    cell = json.loads(capsys.readouterr().out)["cells"]["autostream"]
    assert (cell["status"], "call_us" in cell) == ("wrong", False)


@pytest.mark.parametrize(
    ("command", "factory", "said"),
    [
        (["schedule", "--device", "h200"], "branching", "if loss.item() > 3"),
        (["bench", "--device", "cpu"], "silent", "the step returns no tensors that could be checked"),
        (["bench", "--device", "cpu"], "differing", "make its models and its batch in the factory, each time anew"),
        (["bench", "--device", "cpu", "--modes", "compile_default"], "trained", "there is no mode 'compile_default'"),
    ],
)
def test_what_a_command_cannot_do_is_said(
    command: list[str], factory: str, said: str, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command[0], f"{target}:{factory}", *command[1:]]) == 2
    assert said in capsys.readouterr().err
