"""What a command shows: its answer on stdout or in a file, everything else on stderr.

Colours are for terminals, and for users who have not set ``NO_COLOR`` (https://no-color.org); so is progress.
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
        report: whether it is a report for people, which a terminal shows in colours.

    Raises:
        BrokenPipeError: the reader has left.
        TargetError: the file, or stdout, cannot be written.
    """
    if out is None:
        require_writable(out)
        # Source lines and names are the model's to choose; what the terminal cannot show must not end the command.
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
    """Rather fail before hours of work than with the results in hand.

    Args:
        out: the file; ``None`` is stdout, of which only a closed one is found.

    Raises:
        TargetError: it cannot be written.
    """
    if out is not None:
        with _writing(f"--out {out}"):
            out.open("a").close()
    elif sys.stdout is None:
        raise TargetError(_unwritable("stdout", "it is closed"))


def remark(text: str) -> None:
    """Say something that is no part of the answer, unless stderr is closed."""
    if sys.stderr is not None:  # in its place, print would take stdout
        print(f"autostream: {text}", file=sys.stderr)


def note(text: str) -> None:
    """Say what is under way, on a line that the next one replaces; for a terminal only."""
    if terminal := _terminal():
        print(f"{_CLEAR}{text}", end="", file=terminal, flush=True)


@contextmanager
def progress(what: str, every_s: float = 1.0) -> Iterator[None]:
    """Say on the terminal what takes so long, from the first second on; nothing of it stays.

    Args:
        what: is under way.
        every_s: seconds from one line to the next.
    """
    terminal = _terminal()  # what runs inside may put another in the place of stderr
    if terminal is None:
        yield
        return
    over = Event()

    def tell() -> None:
        for times in count(1):
            if over.wait(every_s):
                return
            print(f"{_CLEAR}{what}: {times * every_s:.0f} s", end="", file=terminal, flush=True)

    teller = Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        over.set()
        teller.join()
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
        # Python would write the rest once more when the process ends, and end it with a code of its own.
        with suppress(OSError):
            sys.stdout.close()
        raise


@contextmanager
def _writing(where: str) -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:  # no failure: its reader, such as head, has seen enough
        raise
    except OSError as error:
        raise TargetError(_unwritable(where, error.strerror)) from error


def _unwritable(where: str, reason: str | None) -> str:
    return f"{where}: {reason}: name a file that can be written"
