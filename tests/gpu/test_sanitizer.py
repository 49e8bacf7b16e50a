"""PyTorch's stream sanitizer over runs on streams, each in a new process: its callbacks stay in a process."""

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
    """Run ``python -m tests.sanitizer``, which must find nothing; returns what it prints."""
    command = [sys.executable, "-m", "tests.sanitizer", *arguments]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=600, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    findings = "\n".join(json.dumps(line) for line in lines if line["finding"])
    assert done.returncode == 0, findings or done.stderr[-3000:]
    return lines


def test_every_missing_wait_is_reported_and_nothing_else() -> None:
    """ATen ops of two models, none of whose waits is for a view that starts elsewhere than its base."""
    options = ["--policies", "critical_path", "scattered", "--streams", "3", "--removed", "12"]
    lines = sanitized("--models", "towers8", "googlenet", "--kernels", "eager", *options)
    assert len(lines) == 4
    for line in lines:
        assert line["streams"] == 3
        assert line["launches_seen"] >= line["ops"]
        assert line["reported"] == line["removed"] > 0, line


def test_fused_kernels_have_no_race() -> None:
    """The sanitizer sees products, not Triton kernels."""
    (line,) = sanitized("--models", "towers8", "--kernels", "inductor", "--streams", "4")
    assert line["launches_seen"] > 0
    assert line["streams"] == 4


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["eager", "inductor"])
@pytest.mark.parametrize("name", INFERENCE)
def test_no_benchmark_has_a_race(name: str, kernels: str) -> None:
    for line in sanitized("--models", name, "--kernels", kernels, "--policies", "critical_path", "scattered"):
        assert line["launches_seen"] > 0 or kernels == "inductor"
