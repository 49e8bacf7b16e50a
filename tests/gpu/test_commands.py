"""Commands on a machine with a GPU, which measure on it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from autostream import cli

pytestmark = pytest.mark.gpu

MODEL = """
import torch
from torch import nn

class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.towers = nn.ModuleList(nn.Linear(512, 512) for _ in range(4))

    def forward(self, x):
        return torch.cat([tower(x).relu() for tower in self.towers], dim=-1)

def build():
    return Towers().eval(), (torch.ones(4, 512),)
"""
OPTIONS = ("--device", "cuda", "--kernels", "eager", "--tuning-seconds", "2")


def test_commands_say_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A trace has the ops of a measured run beside those of the predicted one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(MODEL)
    assert cli.main(["explain", "net.py:build", *OPTIONS]) == 0
    assert re.search(r"^measured +[\d.,]+ µs", capsys.readouterr().out, re.MULTILINE)

    assert cli.main(["trace", "net.py:build", *OPTIONS]) == 0
    out, err = capsys.readouterr()
    ops = [event for event in json.loads(out)["traceEvents"] if event["ph"] == "X" and event["cat"] == "op"]
    predicted, measured = ([event["name"] for event in ops if event["pid"] == pid] for pid in (1, 2))
    assert sorted(predicted) == sorted(measured)
    assert err == ""

    assert cli.main(["env"]) == 0
    assert torch.cuda.get_device_name(0) in capsys.readouterr().out
