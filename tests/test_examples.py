"""The examples run with the command in their docstrings, and print a report."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 2


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(example: Path) -> None:
    assert f"python examples/{example.name}" in example.read_text()
    ended = subprocess.run([sys.executable, str(example)], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "runs as" in ended.stdout
    assert "the plain model" not in ended.stdout, "all of it can be scheduled"
