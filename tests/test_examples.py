"""The examples run with the command in their docstrings, and print a report."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.distributed.processes import torchrun

FOLDER = Path(__file__).parent.parent / "examples"
EXAMPLES = sorted(path for path in FOLDER.glob("*.py") if path.name not in ("pipeline.py", "comparison.py"))
"""All but the one of several processes, which tests/test_pipelines.py runs, and what those of steps share."""

CHOSEN = ("µs as it is", "nothing to gain on a CPU")
"""Why the model itself runs what could be scheduled."""

RUN = """
import sys, torch
from autostream.cli.zoo import import_without_compiled_ops
import_without_compiled_ops("torchvision")  # which transformers imports
paths, sys.argv = sys.argv[1:], ["example"]
for path in paths:
    print("EXAMPLE", flush=True)
    torch._dynamo.reset()
    exec(compile(open(path).read(), path, "exec"))
"""
"""Runs all examples in one process, as importing torch takes seconds; in ``__main__``, where Dynamo finds globals."""


def test_all_examples_run() -> None:
    assert len(EXAMPLES) >= 2
    for example in EXAMPLES:
        assert f"python examples/{example.name}" in example.read_text()
    environment = {**os.environ, "PYTHONPATH": f"{FOLDER.parent}{os.pathsep}{FOLDER}"}
    command = [sys.executable, "-c", RUN, *map(str, EXAMPLES)]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert ended.returncode == 0, ended.stderr
    printed = ended.stdout.split("EXAMPLE\n")[1:]
    for example, text in zip(EXAMPLES, printed, strict=True):
        assert "runs as" in text, example
        refused = "the plain model" in text and not any(reason in text for reason in CHOSEN)
        assert not refused, f"{example}: all of it can be scheduled"


def test_data_parallel_training_runs_over_two_processes() -> None:
    """By the command of its docstring: both ways end with the same weights."""
    example = FOLDER / "ddp.py"
    assert "torchrun --nproc-per-node 2 examples/ddp.py" in example.read_text()
    status, told = torchrun(example, 2)
    assert status == 0, told
    assert "and with DistributedDataParallel" in told
