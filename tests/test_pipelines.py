"""The example of a split model, which ``torch.distributed.pipelining`` runs in processes of their own, over gloo."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent

LIMIT_S = 120


def torchrun(processes: int, script: str, *args: str) -> str:
    """What the processes print; they are ended if they take too long."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, *launcher, str(ROOT / script), *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
    ) as started:
        try:
            printed, _ = started.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(started.pid, signal.SIGKILL)
            raise
    assert started.returncode == 0, printed
    return printed


def test_the_example_prints_the_predicted_and_the_measured_time_of_a_step() -> None:
    example = "examples/pipeline.py"
    assert f"torchrun --nproc-per-node 2 {example}" in (ROOT / example).read_text()
    printed = torchrun(2, example)
    assert re.search(r"^A step by 1F1B takes [\d,.]+ µs\.", printed, re.MULTILINE)
    assert re.search(r"^measured  [\d,.]+ µs, loss \d\.\d{4}$", printed, re.MULTILINE)
