"""Measured costs on disk: one JSON file for each device and set of versions, in the user's cache folder.

    load(context)        ──▶ the measurements in the file of a context
    save(measurements)   ──▶ adds measurements to their file
    read(path, context)  ──▶ the measurements in a file that the user names

What cannot be kept is measured again by the next process, and reported (``store.py``).
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

from autostream.costs.records import SCHEMA, Context, Measurements, check_context, from_json, to_json
from autostream.errors import CostError, first_line
from autostream.store import Notes, Store, key_of

_MOST_RECORDS = 50_000
"""In a file: about 6 MB, which are read in a third of a second. A model has some hundreds."""

_STORE = Store("costs", "measurements", "its ops are measured again", most=64)


def load(context: Context) -> tuple[Measurements, Notes]:
    """The measurements that were saved for a context, and a note if their file is damaged."""
    measurements, notes = _STORE.read(_name(context), partial(_parse, context))
    return measurements or Measurements(context), notes


def save(new: Measurements) -> Notes:
    """Add measurements to the file of their context, in place of older ones with the same key.

    Returns:
        A note if they could not be kept.
    """

    def text() -> str:
        saved, _ = load(new.context)
        return to_json(_merged(saved, new))

    return _STORE.write(_name(new.context), text)


def read(path: Path, context: Context | None = None) -> Measurements:
    """Read a file of measurements that the user names, e.g. a copy of one in the cache folder.

    Args:
        path: the file.
        context: where the measurements are to be used; ``None`` to plan for the device that they were made on.

    Raises:
        CostError: the file cannot be read, is damaged, or is of another device or other versions than ``context``.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise CostError(f"{path} cannot be read ({first_line(error)}): name a file of measurements") from error
    measurements, faults = from_json(text, str(path))
    if faults:
        raise CostError(f"{path}: {faults[0]}")
    if context is not None:
        check_context(measurements.context, context, str(path))
    return measurements


def _name(context: Context) -> str:
    device = re.sub(r"\W+", "-", context.device.casefold())
    return f"{device}-{key_of(SCHEMA, context.device, context.multiprocessors, context.versions)[:16]}"


def _parse(context: Context, text: str) -> Measurements:
    """The content of a context's file.

    Raises:
        CostError: it does not hold measurements of this context.
    """
    measurements, faults = from_json(text, "it")
    if faults:
        raise CostError(faults[0])
    check_context(measurements.context, context, "it")
    return measurements


def _merged(saved: Measurements, new: Measurements) -> Measurements:
    """Both, the newest last, without the oldest if there are too many."""
    older = {key: record for key, record in saved.records.items() if key not in new.records}
    records = [*older.items(), *new.records.items()][-_MOST_RECORDS:]
    return Measurements(new.context, new.profile or saved.profile, dict(records))
