"""Comparisons in another process, where a mode that crashes, hangs or loses the device loses only its own cell."""

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
from benchmarks.harness.comparison import Cell, Comparison, Status, compare_modes

MakeComparison = Callable[[], Comparison]
"""Picklable; it is called in the other process."""

_MAKING = ""
"""The phase before the first mode."""

_END_S = 10.0
"""Time limit for the process to exit after its result, s."""


@dataclass(slots=True)
class Outcome:
    """The result of a comparison.

    Attributes:
        cells: by mode.
        failure: why the comparison could not be made, or ``""``.
    """

    cells: dict[str, Cell] = field(default_factory=dict)
    failure: str = ""


def compare_isolated(
    make: MakeComparison, modes: Sequence[str], timeout_s: float, note: Callable[[str], None] = lambda mode: None
) -> Outcome:
    """Run a comparison in another process; if a mode ends the process, run it again without that mode.

    Args:
        make: makes the comparison, in that process.
        modes: names of its modes.
        timeout_s: time limit for each step of one mode.
        note: is called with the name of each mode before it is prepared or timed.
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


def with_caches(folder: Path, make: MakeComparison) -> Comparison:
    """The same comparison, with caches of compilers in a folder, for other runs too; they are empty otherwise."""
    _set_caches(folder)
    return make()


def _set_caches(folder: Path) -> None:
    os.environ |= {name: str(folder.absolute() / name) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}


@dataclass(frozen=True, slots=True)
class _Attempt:
    """The outcome of one process, or the mode that ended it and how."""

    outcome: Outcome | None
    mode: str = _MAKING
    status: Status = "crashed"
    reason: str = ""


def _attempted(make: MakeComparison, modes: list[str], timeout_s: float, note: Callable[[str], None]) -> _Attempt:
    context = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA
    ours, theirs = context.Pipe(duplex=False)
    # Processes of compilers may still write there.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        said = Path(folder) / "said"
        said.touch()  # a process may end before it writes
        child = context.Process(target=_child, args=(theirs, Path(folder), make, modes))
        mode = _MAKING
        try:
            _start(child)
            theirs.close()  # so that the pipe is closed when the child exits
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
            if child.pid is not None:  # it was started
                child.kill()
                child.join()


def _start(child: BaseProcess) -> None:
    """Start a process with SIGINT blocked from the beginning: this process gets the signal too, and ends it."""
    resource_tracker.ensure_running()  # starting it unblocks SIGINT
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited
    try:
        child.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _child(pipe: Connection, folder: Path, make: MakeComparison, modes: list[str]) -> None:
    # Locks of the spawn context are named and leak when the process is killed; use the default context's.
    multiprocessing.set_start_method(None, force=True)
    # Empty caches: kernels of an earlier comparison would shorten ``first_s``.
    _set_caches(folder)
    with (folder / "said").open("w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
        try:
            comparison = make()
        except Exception as error:
            pipe.send(Outcome(failure=str(error) if isinstance(error, AutostreamError) else first_line(error)))
        else:
            pipe.send(Outcome(compare_modes(comparison, modes, pipe.send)))


def _last_words(said: Path) -> str:
    """The last line that names an error, else the last line: CUDA's errors end in general advice."""
    lines = [line.strip() for line in said.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return f": {(errors or lines)[-1]}" if lines else ""
