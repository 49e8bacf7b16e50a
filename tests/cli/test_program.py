"""All commands: their help, and what ends them."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from autostream import cli
from autostream.cli.command import Argument, Command, Parser, add
from autostream.cli.program import COMMANDS


def names_of(taken: Argument | tuple[Argument, ...]) -> tuple[str, ...]:
    return taken.names if isinstance(taken, Argument) else ()


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_help_shows_an_example_that_is_one(capsys: pytest.CaptureFixture[str], command: Command) -> None:
    with pytest.raises(SystemExit) as raised:
        cli.main([command.name, "--help"])
    assert raised.value.code == 0
    out = capsys.readouterr().out
    assert f"example: autostream {command.name} " in out
    assert ("TARGET RUNS CODE" in out) == ("target" in {name for each in command.arguments for name in names_of(each)})
    parser = Parser(prog="autostream")
    add(COMMANDS, parser)
    assert parser.parse_args(command.example.split()).run is command.run


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    out = capsys.readouterr().out
    assert "example: autostream schedule " in out
    assert re.findall(r"^    (\w+) ", out, re.MULTILINE) == [command.name for command in COMMANDS]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        cli.main(["--version"])
    assert raised.value.code == 0
    assert capsys.readouterr().out.startswith("autostream 0.")


def test_a_reader_that_leaves_early_is_no_error() -> None:
    command = [sys.executable, "-m", "autostream", "env"]
    buffered = os.environ | {"PYTHONUNBUFFERED": ""}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=buffered) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0
