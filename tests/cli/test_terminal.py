"""What is shown, and where."""

from __future__ import annotations

import io
import re
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from autostream import cli
from autostream.cli.terminal import progress, show
from autostream.reporting.text import render
from tests.reporting.reports import REPORT


@pytest.mark.parametrize("said", ["No space left on device", "it is closed"])
def test_an_answer_that_cannot_be_written_is_one_line_and_no_failed_check(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stdout", None if said == "it is closed" else full)
        assert cli.main(["env", "--json"]) == 2
        assert said == "it is closed" or full.closed, "else Python writes what is left when the process ends, and fails"
    assert capsys.readouterr().err == f"autostream: error: stdout: {said}: name a file that can be written\n"


class Terminal(io.StringIO):
    """A terminal, as far as programs ask."""

    def __init__(self) -> None:
        super().__init__()
        self.told = threading.Event()

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.told.set()
        return super().write(text)


def opened(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """In the place of both streams; not by a fixture, for capturing begins anew after those."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    return terminal


def test_a_terminal_shows_keys_titles_and_the_chosen_candidate_in_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = opened(monkeypatch)
    show(render(REPORT), report=True)
    shown = terminal.getvalue()
    assert "\033[1mruns as\033[0m  " in shown
    assert "\n\n\033[1mCandidates\033[0m\n" in shown
    (chosen,) = re.findall(r"\033\[32m\* .*", shown)
    assert "critical_path" in chosen
    assert re.sub(r"\033\[\d+m", "", shown) == f"{render(REPORT)}\n", "but for colours, the same"


@pytest.mark.parametrize("variable", [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_no_colours_where_they_are_not_wanted(monkeypatch: pytest.MonkeyPatch, variable: tuple[str, str]) -> None:
    terminal = opened(monkeypatch)
    monkeypatch.setenv(*variable)
    show(render(REPORT), report=True)
    assert terminal.getvalue() == f"{render(REPORT)}\n"


def test_what_takes_long_is_told_on_a_terminal_and_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = opened(monkeypatch)
    with progress("planning net", every_s=1e-3):
        assert terminal.told.wait(60)
    shown = terminal.getvalue()
    assert shown.startswith("\r\033[Kplanning net: 0 s")
    assert shown.endswith("\r\033[K")


def test_without_stderr_the_answer_is_the_same(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: str, planned: SimpleNamespace
) -> None:
    assert cli.main(["trace", model]) == 0
    printed = capsys.readouterr().out
    monkeypatch.setattr(sys, "stderr", None)
    assert cli.main(["trace", model]) == 0
    assert cli.main(["trace", "net.py:no_such"]) == 2
    assert capsys.readouterr().out == printed
