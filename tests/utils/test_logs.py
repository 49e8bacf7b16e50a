"""The log of ``AUTOSTREAM_LOG``, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from autostream.errors import OptionError
from autostream.utils.logs import start

PROGRAM = """
import logging, torch, autostream
logging.basicConfig(level="DEBUG", format="root: %(message)s")
with torch.no_grad():
    autostream.optimize(torch.nn.ReLU())(torch.ones(2))
"""


@pytest.mark.parametrize("level", ["debug", "warning"])
def test_stages_are_logged_once_on_standard_error_from_the_level_that_is_set(level: str) -> None:
    environment = {**os.environ, "AUTOSTREAM_LOG": level}
    process = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    lines = [line for line in process.stderr.splitlines() if "autostream: " in line]
    assert process.returncode == 0, process.stderr
    if level == "debug":
        assert {"trace", "schedule", "verify"} <= {line.split(": ")[1] for line in lines if line.count(": ") == 2}
        assert len([line for line in lines if "trace: " in line]) == 1
        assert all(line.startswith("autostream: ") for line in lines), "and not with root, which has a handler, too"
    else:
        assert lines == []


def test_a_level_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOSTREAM_LOG", "loud")
    with pytest.raises(OptionError, match="AUTOSTREAM_LOG is 'loud': use debug"):
        start()


def test_warnings_say_who_speaks() -> None:
    program = "import torch, autostream; autostream.optimize(torch.nn.ReLU())(torch.ones(2).to_sparse())"
    process = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True)
    assert process.stderr.startswith("autostream: "), process.stderr
