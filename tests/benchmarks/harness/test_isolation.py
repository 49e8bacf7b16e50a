"""Comparisons in a process of their own, which some modes end, and what becomes of the others.

A process takes seconds to start, so each test starts as few as it can.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from autostream.errors import TargetError
from benchmarks.harness import isolation
from benchmarks.harness.comparison import Cell, Comparison, PreparedMode
from benchmarks.harness.isolation import Outcome, compare_isolated, with_caches

CPU = torch.device("cpu")


@dataclass
class ByHand:
    """A comparison of modes that do what their names say."""

    device: torch.device = CPU
    allowed_error: float = 0.1
    modes: tuple[str, ...] = ("works", "raises", "caches", "exits", "errs", "hangs")

    def prepare(self, mode: str) -> PreparedMode:
        if mode == "raises":
            raise ValueError("no kernel")
        if mode == "exits":
            print("about to go\n\ntorch.OutOfMemoryError: full\nSome advice\n", file=sys.stderr, flush=True)
            os._exit(3)
        if mode == "caches":
            raise ValueError(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        if mode == "hangs":
            time.sleep(600)
        return PreparedMode(lambda: time.sleep(1e-3), lambda: 1.0 if mode == "errs" else 0.0)


def by_hand() -> Comparison:
    return ByHand()


def no_comparison(error: type[Exception], text: str) -> Comparison:
    raise error(text)


def no_process() -> Comparison:
    os._exit(5)


def too_late() -> Comparison:
    time.sleep(20)
    raise AssertionError("it was waited for")


def statuses(outcome: Outcome) -> dict[str, tuple[str, str]]:
    return {mode: (cell.status, cell.reason) for mode, cell in outcome.cells.items()}


def test_a_mode_that_ends_its_process_costs_only_its_own_cell() -> None:
    """Two processes: in the first, one mode raises and the next one exits; the second goes without the latter."""
    notes: list[str] = []
    outcome = compare_isolated(by_hand, ["works", "raises", "exits", "errs", "caches"], 60.0, notes.append)
    assert outcome.failure == ""
    _, caches = statuses(outcome).pop("caches")[1].split("ValueError: ")
    assert caches != os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    assert not Path(caches).exists(), "they end with the comparison"
    outcome.cells.pop("caches")
    assert statuses(outcome) == {
        "works": ("ok", ""),
        "raises": ("failed", "ValueError: no kernel"),
        "exits": ("crashed", "exit code 3: torch.OutOfMemoryError: full"),
        "errs": ("wrong", "error 1.0e+00, 1.0e-01 allowed"),
    }
    assert len(outcome.cells["works"].call_us) >= 9
    assert notes[:6] == ["works", "raises", "caches", "exits", "works", "raises"]
    assert set(notes[8:]) == {"works"}
    assert multiprocessing.active_children() == []


def test_caches_that_are_asked_for_are_those_of_all_runs(tmp_path: Path) -> None:
    outcome = compare_isolated(partial(with_caches, tmp_path, by_hand), ["caches"], 60.0)
    _, caches = statuses(outcome)["caches"][1].split("ValueError: ")
    assert tmp_path in Path(caches).parents


@pytest.mark.parametrize(
    ("make", "failure"),
    [
        pytest.param(partial(no_comparison, TargetError, "no such\nmodel"), "no such\nmodel", id="our error, in full"),
        pytest.param(no_process, "crashed: exit code 5", id="a crash"),
    ],
)
def test_a_contest_that_cannot_be_made_has_no_cells(make: Callable[[], Comparison], failure: str) -> None:
    assert compare_isolated(make, ["a", "b"], 60.0) == Outcome({}, failure)


def test_a_contest_that_is_made_too_late_has_no_cells() -> None:
    assert compare_isolated(too_late, ["a"], 1.0) == Outcome({}, "timed out: no sign of life for 1 s")
    assert multiprocessing.active_children() == []


class Interrupted:
    """Makes a comparison never; an interrupt comes before its process runs any code of ours."""

    def __call__(self) -> Comparison:
        with multiprocessing.RLock():
            return too_late()

    def __setstate__(self, state: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    def __getstate__(self) -> object:
        return 1


def test_a_process_that_is_ended_says_nothing_and_takes_no_interrupts(tmp_path: Path) -> None:
    """In a program of its own, since what tracks locks is started once, and speaks when the program ends."""
    program = (
        "from benchmarks.harness.isolation import compare_isolated\n"
        "from tests.benchmarks.harness.test_isolation import Interrupted\n"
        "if __name__ == '__main__': print(compare_isolated(Interrupted(), ['a'], 6.0).failure)\n"
    )
    (tmp_path / "program.py").write_text(program)
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, str(tmp_path / "program.py")],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(root)},
        check=True,
    )
    assert (done.stdout, done.stderr) == ("timed out: no sign of life for 6 s\n", "")


@pytest.fixture
def interruptible() -> Iterator[None]:
    """As in a terminal: what a shell starts in the background ignores interrupts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_while_the_process_starts_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it comes before there is something to end, or at once after."""
    start = multiprocessing.get_context("spawn").Process.start

    def interrupted(process: Any) -> None:
        # To this thread: another, which blocks nothing, might have it handled where errors are ignored.
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        start(process)

    monkeypatch.setattr(multiprocessing.get_context("spawn").Process, "start", interrupted)
    notes: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        compare_isolated(by_hand, ["hangs"], 6.0, notes.append)
    assert notes == [], "and no longer"
    assert multiprocessing.active_children() == []
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


# Without a process


def scripted(monkeypatch: pytest.MonkeyPatch, *attempts: isolation._Attempt) -> list[list[str]]:
    """Attempts that come to this, one after the other; returns the modes that each was asked for."""
    asked: list[list[str]] = []
    left = iter(attempts)

    def attempted(make: object, modes: list[str], timeout_s: float, note: object) -> isolation._Attempt:
        asked.append(modes)
        return next(left)

    monkeypatch.setattr(isolation, "_attempted", attempted)
    return asked


def test_each_attempt_goes_without_the_modes_that_ended_those_before(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = scripted(
        monkeypatch,
        isolation._Attempt(None, "c", "timed out", "late"),
        isolation._Attempt(None, "a", "crashed", "dead"),
        isolation._Attempt(Outcome({"b": Cell("ok"), "d": Cell("ok")})),
    )
    outcome = compare_isolated(by_hand, ["a", "b", "c", "d"], 1.0)
    assert asked == [["a", "b", "c", "d"], ["a", "b", "d"], ["b", "d"]]
    assert list(outcome.cells) == ["a", "b", "c", "d"]
    assert [cell.status for cell in outcome.cells.values()] == ["crashed", "ok", "timed out", "ok"]
