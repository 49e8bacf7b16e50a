"""What ``AUTOSTREAM_LOG`` prints, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import logging, torch, autostream
logging.basicConfig(level="DEBUG", format="root: %(message)s")
with torch.no_grad():
    autostream.optimize(torch.nn.ReLU())(torch.ones(2))
"""


def printed(level: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env={**os.environ, "AUTOSTREAM_LOG": level}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return [line for line in done.stderr.splitlines() if "autostream." in line]


def test_each_stage_is_told_once_on_the_standard_error() -> None:
    lines = printed("debug")
    assert {"trace", "schedule", "verify"} <= {line.split(": ")[1] for line in lines if line.count(": ") == 2}
    assert len([line for line in lines if "trace: " in line]) == 1
    assert not [line for line in lines if line.startswith("root: ")]


@pytest.mark.parametrize("level", ["error", "warning"])
def test_what_is_below_the_level_is_not_told(level: str) -> None:
    assert printed(level) == []


def test_a_level_that_does_not_exist_is_named() -> None:
    with pytest.raises(AssertionError, match="AUTOSTREAM_LOG is 'loud': use debug"):
        printed("loud")
