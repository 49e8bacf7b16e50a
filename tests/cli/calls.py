"""A model that commands are given, and how they fail."""

from __future__ import annotations

import pytest

from autostream import cli

MODEL = """
import torch
from torch import nn

class Diamond(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        x = x.relu()
        return self.left(x) + self.right(x)

class Branching(nn.Module):
    def forward(self, x):
        return x + 1 if x.sum() > 0 else x

def with_inputs():
    return Diamond().eval(), (torch.ones(4, 64),)
"""


def error_of(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line that a command which cannot run leaves on stderr."""
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("autostream: error: ")
    return err.removeprefix("autostream: error: ").rstrip("\n")
