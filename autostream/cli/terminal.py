"""Output of commands: the answer on stdout or in a file, everything else on stderr.

Colours and progress are for terminals; ``NO_COLOR`` (https://no-color.org) turns colours off.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from threading import Event, Thread
from typing import TextIO

from autostream.errors import TargetError
from autostream.options import colours

_BOLD, _GREEN, _PLAIN = "\033[1m", "\033[32m", "\033[0m"
_CLEAR = "\r\033[K"


def show(text: str, out: Path | None = None, *, report: bool = False) -> None:
    """Print an answer, or write it to a file.

    Args:
        text: the answer.
        out: the file; ``None`` is stdout.
        report: whether a terminal shows it in colours.

    Raises:
        BrokenPipeError: the reader has closed the pipe.
        TargetError: the file, or stdout, cannot be written.
    """
    if out is None:
        require_writable(out)
        # Names of a model may have characters that the terminal's encoding lacks.
        encoding = sys.stdout.encoding or "utf-8"
        shown = painted(text) if report and colours() and sys.stdout.isatty() else text
        with _writing("stdout"):
            _print(shown.encode(encoding, "replace").decode(encoding))
        return
    with _writing(f"--out {out}"):
        out.write_text(f"{text}\n", encoding="utf-8")


def dumped(value: object) -> str:
    """An answer as JSON, which has no NaN and no infinity."""
    return json.dumps(value, indent=1, allow_nan=False)


def require_writable(out: Path | None) -> None:
    """Check before the work that the output can be written.

    Args:
        out: the file; ``None`` is stdout, which is only checked to be open.

    Raises:
        TargetError: it cannot be written.
    """
    if out is not None:
        with _writing(f"--out {out}"):
            out.open("a").close()
    elif sys.stdout is None:
        raise TargetError(_unwritable("stdout", "it is closed"))


def message(text: str) -> None:
    """Print a message to stderr, unless it is closed."""
    if sys.stderr is not None:  # for None, print would use stdout
        print(f"autostream: {text}", file=sys.stderr)


def status(text: str) -> None:
    """Show a status line on a terminal; the next one replaces it."""
    if terminal := _terminal():
        print(f"{_CLEAR}{text}", end="", file=terminal, flush=True)


@contextmanager
def progress(what: str, every_s: float = 1.0) -> Iterator[None]:
    """Show on a terminal how long a step has taken so far; the line is cleared at the end.

    Args:
        what: the step.
        every_s: seconds between updates.
    """
    terminal = _terminal()  # before code inside may replace stderr
    if terminal is None:
        yield
        return
    done = Event()

    def update() -> None:
        for times in count(1):
            if done.wait(every_s):
                return
            print(f"{_CLEAR}{what}: {times * every_s:.0f} s", end="", file=terminal, flush=True)

    thread = Thread(target=update, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        print(_CLEAR, end="", file=terminal, flush=True)


def painted(text: str) -> str:
    r"""A report in colours: keys and titles in bold, the candidate that was chosen in green.

    Example:
        >>> painted("model  Net\n\nCandidates\n*  search")
        '\x1b[1mmodel\x1b[0m  Net\n\n\x1b[1mCandidates\x1b[0m\n\x1b[32m*  search\x1b[0m'
    """
    summary, *sections = text.split("\n\n")
    keys = re.sub(r"^\S+(?: \S+)*(?=  )", rf"{_BOLD}\g<0>{_PLAIN}", summary, flags=re.MULTILINE)
    titled = [re.sub(r"\A.+", rf"{_BOLD}\g<0>{_PLAIN}", section) for section in sections]
    marked = [re.sub(r"^\* .*", rf"{_GREEN}\g<0>{_PLAIN}", section, flags=re.MULTILINE) for section in titled]
    return "\n\n".join([keys, *marked])


def _terminal() -> TextIO | None:
    return sys.stderr if sys.stderr is not None and sys.stderr.isatty() else None


def _print(text: str) -> None:
    try:
        print(text, flush=True)
    except OSError:
        # Else Python flushes the rest again at exit, and exits with a code of its own.
        with suppress(OSError):
            sys.stdout.close()
        raise


@contextmanager
def _writing(where: str) -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:  # no failure: the reader, such as head, has closed the pipe
        raise
    except OSError as error:
        raise TargetError(_unwritable(where, error.strerror)) from error


def _unwritable(where: str, reason: str | None) -> str:
    return f"{where}: {reason}: name a file that can be written"
