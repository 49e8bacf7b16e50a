"""Files that outlive their process: what all that autostream keeps in the user's cache folder has in common.

A file is only ever replaced as a whole, so a reader needs no lock and never sees half of one. Writers take turns, under
a lock that ends with its process. What hinders keeping is told, once for each process, and stops nobody.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autostream.errors import first_line
from autostream.ir import Decision

if TYPE_CHECKING:
    from filelock import FileLock

log = logging.getLogger(__name__)

_PATIENCE_S = 5.0
"""Writing takes some milliseconds: a lock that is held longer is held by a process that does not run."""

HINDRANCES = (OSError, NotImplementedError)
"""What keeps from keeping: without locks in the file system, some versions of filelock do not do as they are asked."""


def key_of(*content: object) -> str:
    """The key of what is kept: the same for the same content, in every process.

    Args:
        content: all that it depends on (op, shapes, strides, dtypes, constants, …): strings, numbers, ``None``, and
            sequences and dicts of such. What holds an address is not content.

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
    """A digest of the Python files in a folder and below: what is changed there may change what was kept.

    Example:
        >>> len(code_in(Path(__file__).parent))
        64
    """
    files = sorted(folder.rglob("*.py"))
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()


def lock(path: Path) -> FileLock:
    """To be held by whoever writes a file; a ``TimeoutError`` says that somebody else does, and does not go on."""
    from filelock import FileLock  # brings asyncio along, which takes long to import

    return FileLock(f"{path}.lock", timeout=_PATIENCE_S)


def replace_file(path: Path, text: str) -> None:
    """Put a text in the place of a file; others see the one or the other, and so they do after a crash.

    A computer that loses its power may lose the text even so; then the file is a damaged one like any other.

    Args:
        path: the file, whose :func:`lock`, or that of all files around it, the caller holds.
        text: what it will hold.

    Raises:
        OSError: it cannot be written; the file is as it was.
    """
    beside = path.with_suffix(".new")
    try:
        beside.write_text(text)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def read_json(path: Path) -> Any:
    """What :func:`write_json` has written.

    Raises:
        FileNotFoundError: there is no such file.
        OSError: it cannot be read.
        ValueError: it is damaged.
    """
    match json.loads(path.read_bytes()):
        case {"sha256": sha256, "content": content} if sha256 == key_of(content):
            return content
    raise ValueError("it is not what was written")


def write_json(path: Path, content: Any, most: int) -> None:
    """Keep content that JSON has a form for, with a checksum, in a folder for such files alone.

    Args:
        path: the file; its folder need not exist.
        content: what it will hold.
        most: files in the folder; the oldest go.

    Raises:
        Exception: one of :data:`HINDRANCES`; the file is as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with lock(path.parent):
        replace_file(path, json.dumps({"sha256": key_of(content), "content": content}))
        oldest_last = sorted(path.parent.glob("*.json"), key=lambda file: file.stat().st_mtime, reverse=True)
        for file in oldest_last[most:]:
            file.unlink()


def not_kept(what: str, error: Exception) -> Decision:
    """Why something could not be kept, for a report."""
    reason = f"{what} cannot be kept ({first_line(error)}): set AUTOSTREAM_CACHE_DIR to a folder that can"
    return reported("not cached", reason)


def reported(choice: str, reason: str) -> Decision:
    """What a report says each time, and the log of a process once."""
    _warn_once(reason)
    return Decision("", choice, reason)


@functools.cache
def _warn_once(reason: str) -> None:
    log.warning("%s", reason)
