"""Files in the user's cache folder: measured costs, fused kernels and chosen schedules.

    Store.read(name)     ──▶ what the file holds, or None; a note if it is damaged
    Store.write(name)    ──▶ a note if it cannot be kept

A file is replaced as a whole, so readers need no lock and never see half of one. Writers take a lock that ends with
their process. Errors become notes for a report, and are logged once for each process: no caller fails because a file
cannot be kept.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from autostream.errors import first_line
from autostream.ir import Decision
from autostream.options import cache_folder
from autostream.utils.logs import Log

if TYPE_CHECKING:
    from filelock import FileLock

log = Log(__name__)

Content = TypeVar("Content")

Notes = tuple[Decision, ...]
"""Why something was not read or not kept, for a report."""

_PATIENCE_S = 5.0
"""Writing takes milliseconds: a process that holds the lock for longer does not run."""

_CHECKSUM = re.compile(r'\{"sha256": "(\w{64})", ')


@dataclass(frozen=True, slots=True)
class Store:
    """Files of one kind: JSON objects with a checksum, in one folder below the user's cache folder.

    The name of a file is its key. Part of the key is the version of the format: a file in another format has another
    name, and is never read.

    Attributes:
        folder: the name of the folder.
        content: what a file holds, for messages.
        remedy: what happens in place of reading a damaged file, for messages.
        most: the number of files that stay; the oldest are deleted.
    """

    folder: str
    content: str
    remedy: str
    most: int

    def path(self, name: str) -> Path:
        """The path of a file, whether or not it exists.

        Raises:
            FileNotFoundError: there is no home directory, see :func:`autostream.options.cache_folder`.
        """
        return cache_folder() / self.folder / f"{name}.json"

    def read(self, name: str, parse: Callable[[str], Content]) -> tuple[Content | None, Notes]:
        """Read a file; delete it if it is damaged, so that it is reported once.

        Args:
            name: of the file.
            parse: makes the content from the JSON text that was written. Any exception but an ``OSError`` means that
                the file is damaged.

        Returns:
            The content, or ``None`` if there is none, and a note if the file is damaged.
        """
        try:
            path = self.path(name)
            return parse(_checked(path.read_text())), ()
        except OSError:  # mostly, there is no file; other reasons prevent writing too, which reports them
            return None, ()
        except Exception as error:
            with suppress(OSError):
                path.unlink()
            reason = f"{path} cannot be used ({first_line(error)}); {self.remedy}"
            return None, (_reported("cache rebuilt", reason),)

    def write(self, name: str, text: Callable[[], str]) -> Notes:
        """Write a file, and delete the oldest if there are too many.

        Args:
            name: of the file.
            text: makes the text of a JSON object that is not empty. It is called with the lock held, so it may read
                the file that it replaces.

        Returns:
            A note if the file could not be written; then it is as it was.
        """
        try:
            path = self.path(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            with _lock(path.parent):
                _replace(path, _with_checksum(text()))
                newest_first = sorted(path.parent.glob("*.json"), key=lambda file: file.stat().st_mtime, reverse=True)
                for file in newest_first[self.most :]:
                    file.unlink()
        # Some versions of filelock raise NotImplementedError if the file system has no locks.
        except (OSError, NotImplementedError) as error:
            advice = "set AUTOSTREAM_CACHE_DIR to a folder that can"
            return (_reported("not cached", f"{self.content} cannot be kept ({first_line(error)}): {advice}"),)
        return ()


def key_of(*content: object) -> str:
    """A key that is the same for the same content in every process.

    Args:
        content: strings, numbers, ``None``, and sequences and dicts of them, e.g. an op with its shapes, strides,
            dtypes and constants.

    Returns:
        64 hexadecimal digits, SHA-256 of the content as JSON.

    Raises:
        TypeError: JSON has no form for some of it.

    Example:
        >>> key_of("aten.relu.default", (8, 3), "float32")[:8]
        '192fb00c'
    """
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@functools.cache
def code_in(folder: Path) -> str:
    """A digest of the Python files in a folder and below, for keys of what depends on that code.

    Example:
        >>> len(code_in(Path(__file__).parent))
        64
    """
    files = sorted(folder.rglob("*.py"))
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()


def _lock(folder: Path) -> FileLock:
    """The lock for writing files in a folder; acquiring it raises ``TimeoutError`` if another process keeps it."""
    from filelock import FileLock  # imports asyncio, which takes long

    return FileLock(f"{folder}.lock", timeout=_PATIENCE_S)


def _replace(path: Path, text: str) -> None:
    """Replace a file in one step: other processes see the old text or the new text, also if this one is killed.

    After a power failure the text may be lost; the checksum tells.
    """
    beside = path.with_suffix(".new")
    try:
        beside.write_text(text)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def _with_checksum(text: str) -> str:
    """A JSON object with the checksum of its text as one more key."""
    return f'{{"sha256": "{_sha256(text)}", {text[1:]}'


def _checked(text: str) -> str:
    """The text that :func:`_with_checksum` was called with.

    Raises:
        ValueError: it is damaged.
    """
    if checksum := _CHECKSUM.match(text):
        content = "{" + text[checksum.end() :]
        if _sha256(content) == checksum[1]:
            return content
    raise ValueError("it is not what was written")


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _reported(choice: str, reason: str) -> Decision:
    _warn_once(reason)
    return Decision("", choice, reason)


@functools.cache
def _warn_once(reason: str) -> None:
    log.warning("%s", reason)
