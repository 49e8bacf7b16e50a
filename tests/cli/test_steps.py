"""Commands on training steps: the plan of a step, for a GPU that is not here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autostream.cli.program import main

SOURCE = """
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


@pytest.mark.parametrize(
    ("command", "factory", "said"),
    [
        (["schedule", "--device", "h200"], "branching", "if loss.item() > 3"),
        (["bench"], "twins", "is a training step, and bench times models"),
    ],
)
def test_what_a_command_cannot_do_is_said(
    command: list[str], factory: str, said: str, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command[0], f"{target}:{factory}", *command[1:]]) == 2
    assert said in capsys.readouterr().err
