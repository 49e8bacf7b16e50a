"""A contest in a process of its own: a mode that crashes, hangs or loses the device costs only its own cell."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from autostream.errors import AutostreamError, first_line
from benchmarks.harness.contest import Cell, Contest, Status, hold

MakeContest = Callable[[], Contest]
"""Picklable: it is called in the process that holds the contest."""

_MAKING = ""
"""The phase before any mode's."""

_END_S = 10.0
"""How long a process that is done may take to clean up after itself."""


@dataclass(slots=True)
class Outcome:
    """What became of a contest.

    Attributes:
        cells: by mode.
        failure: why there was no contest at all.
    """

    cells: dict[str, Cell] = field(default_factory=dict)
    failure: str = ""


def hold_isolated(
    make: MakeContest, modes: Sequence[str], timeout_s: float, note: Callable[[str], None] = lambda mode: None
) -> Outcome:
    """Hold a contest in another process; where a mode brings that down, hold it again without this mode.

    Args:
        make: makes the contest, there.
        modes: names that it knows.
        timeout_s: the longest that one mode may take at a time.
        note: is told the name of each mode before anything is done with it.
    """
    outcome = Outcome()
    while remaining := [mode for mode in modes if mode not in outcome.cells]:
        attempt = _attempted(make, remaining, timeout_s, note)
        if attempt.outcome:
            outcome.cells |= attempt.outcome.cells
            outcome.failure = attempt.outcome.failure
            break
        if attempt.mode == _MAKING:
            outcome.failure = f"{attempt.status}: {attempt.reason}"
            break
        outcome.cells[attempt.mode] = Cell(attempt.status, attempt.reason)
    outcome.cells = {mode: outcome.cells[mode] for mode in modes if mode in outcome.cells}
    return outcome


@dataclass(frozen=True, slots=True)
class _Attempt:
    """What a process came to: an outcome, or the mode that ended it and how."""

    outcome: Outcome | None
    mode: str = _MAKING
    status: Status = "crashed"
    reason: str = ""


def _attempted(make: MakeContest, modes: list[str], timeout_s: float, note: Callable[[str], None]) -> _Attempt:
    context = multiprocessing.get_context("spawn")  # a forked process cannot use the device
    ours, theirs = context.Pipe(duplex=False)
    # Processes that compilers have started may still write there.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        said = Path(folder) / "said"
        child = context.Process(target=_child, args=(theirs, Path(folder), make, modes))
        mode = _MAKING
        try:
            _start(child)
            theirs.close()  # so that the pipe ends when the child does
            while ours.poll(timeout_s):
                message = ours.recv()
                if isinstance(message, Outcome):
                    child.join(_END_S)
                    return _Attempt(message)
                mode = message
                note(mode)
            return _Attempt(None, mode, "timed out", f"no sign of life for {timeout_s:g} s")
        except EOFError:
            child.join()
            return _Attempt(None, mode, "crashed", f"exit code {child.exitcode}{_last_words(said)}")
        finally:
            if child.pid is not None:  # it may not have come to that
                child.kill()
                child.join()


def _start(child: BaseProcess) -> None:
    """Start a process that no interrupt reaches, from its first moment on: this one, which gets the same, ends it."""
    resource_tracker.ensure_running()  # starting it lets interrupts through
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited
    try:
        child.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _child(pipe: Connection, folder: Path, make: MakeContest, modes: list[str]) -> None:
    # Libraries take locks as they would in any process: a spawned one's have names, which leak if it is ended.
    multiprocessing.set_start_method(None, force=True)
    # What an earlier contest has compiled would make the first result of this one come sooner.
    os.environ |= {name: str(folder / name) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
    with (folder / "said").open("w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
        try:
            contest = make()
        except Exception as error:
            pipe.send(Outcome(failure=str(error) if isinstance(error, AutostreamError) else first_line(error)))
        else:
            pipe.send(Outcome(hold(contest, modes, pipe.send)))


def _last_words(said: Path) -> str:
    """The last line that names an error, else the last one: CUDA's errors end in general advice."""
    lines = [line.strip() for line in said.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return f": {(errors or lines)[-1]}" if lines else ""
