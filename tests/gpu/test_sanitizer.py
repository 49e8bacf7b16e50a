"""PyTorch's stream sanitizer over runs on real streams, in a process of its own: its callbacks stay as long as that."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.zoo import INFERENCE

pytestmark = pytest.mark.gpu


def sanitized(*arguments: str) -> list[dict[str, Any]]:
    """What ``python -m tests.sanitizer`` prints; it must find nothing."""
    command = [sys.executable, "-m", "tests.sanitizer", *arguments]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=600, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    found = "\n".join(json.dumps(line) for line in lines if line["finding"])
    assert done.returncode == 0, found or done.stderr[-3000:]
    return lines


def test_each_wait_that_is_missing_is_reported_and_else_nothing() -> None:
    """Ops of ATen in two models, none of whose waits is for a view that begins elsewhere than what it looks at."""
    wanted = ["--policies", "critical_path", "scattered", "--streams", "3", "--removed", "12"]
    found = sanitized("--models", "towers8", "googlenet", "--kernels", "eager", *wanted)
    assert len(found) == 4
    for line in found:
        assert line["streams"] == 3
        assert line["launches_seen"] >= line["ops"]
        assert line["reported"] == line["removed"] > 0, line


def test_fused_kernels_and_what_is_seen_of_them() -> None:
    """Products are seen, Triton's kernels are not."""
    (line,) = sanitized("--models", "towers8", "--kernels", "inductor", "--streams", "4")
    assert line["launches_seen"] > 0
    assert line["streams"] == 4


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["eager", "inductor"])
@pytest.mark.parametrize("name", INFERENCE)
def test_the_zoo(name: str, kernels: str) -> None:
    for line in sanitized("--models", name, "--kernels", kernels, "--policies", "critical_path", "scattered"):
        assert line["launches_seen"] > 0 or kernels == "inductor"
