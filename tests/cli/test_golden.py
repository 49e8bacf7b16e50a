"""What commands print, word for word, of a report made by hand.

A difference that is meant is taken over with ``python -m tests.cli.test_golden``; look at it before you commit it.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autostream import cli, pipeline
from tests.cli.calls import MODEL
from tests.reporting.reports import REPORT

GOLDEN = Path(__file__).parent / "golden"

CELLS: dict[str, Any] = {
    "eager": {"status": "ok", "call_us": [8.0, 8.5, 8.0]},
    "autostream": {"status": "ok", "call_us": [4.0, 4.5, 4.0]},
    "autostream_eager_search": {"status": "wrong", "reason": "output 0 is off by 3%"},
}
"""Of a benchmark."""

COMMANDS = {
    "inspect.txt": "inspect net.py:with_inputs",
    "inspect.json": "inspect net.py:with_inputs --json",
    "inspect.dot": "inspect net.py:with_inputs --dot",
    "trace.json": "trace net.py:with_inputs",
    "compare.txt": "compare before.json after.json --modes=",
    "compare.json": "compare before.json after.json --json",
}
"""By the file that has what they print."""


def write_inputs(folder: Path) -> None:
    """A model, and the benchmark of it before and after a change that made all but eager code slower."""
    slower = {**CELLS, "autostream": {"status": "ok", "call_us": [5.0, 5.5, 5.0]}}
    (folder / "net.py").write_text(MODEL)
    for name, cells in (("before", CELLS), ("after", slower)):
        row = {"device": "cpu", "baseline": "eager", "versions": {"torch": "2.11.0"}, "workload": "net", "cells": cells}
        (folder / f"{name}.json").write_text(json.dumps(row))


@pytest.mark.parametrize("file", COMMANDS)
def test_it_prints_what_it_printed(
    capsys: pytest.CaptureFixture[str], model: str, planned: SimpleNamespace, tmp_path: Path, file: str
) -> None:
    write_inputs(tmp_path)
    assert cli.main(COMMANDS[file].split()) == int(file.startswith("compare"))
    assert capsys.readouterr().out == (GOLDEN / file).read_text(encoding="utf-8")


def test_nothing_is_golden_that_no_command_prints() -> None:
    assert {path.name for path in GOLDEN.iterdir()} == set(COMMANDS)


if __name__ == "__main__":
    import tempfile

    GOLDEN.mkdir(exist_ok=True)
    pipeline.plan = lambda *_: REPORT
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        write_inputs(Path(folder))
        for name, command in COMMANDS.items():
            with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.redirect_stderr(io.StringIO()):
                cli.main(command.split())
            (GOLDEN / name).write_text(printed.getvalue(), encoding="utf-8")
    sys.exit(0)
