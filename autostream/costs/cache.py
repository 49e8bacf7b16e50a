"""Measurements kept between runs: one JSON file for each device and set of versions, in the user's cache folder.

    load(context)        ──▶ what is kept, and what was wrong with it
    save(measurements)   ──▶ what is kept and these, written as one; what hindered that
    read(path, context)  ──▶ a file that somebody hands over, or a refusal

A writer adds to what is there now, so that writers lose nothing of each other's. Nothing that happens here stops the
caller: what cannot be kept is measured again next time.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from autostream.costs.records import SCHEMA, Context, Measurements, check_context, from_json, to_json
from autostream.errors import CostError, first_line
from autostream.ir import Decision
from autostream.options import cache_folder
from autostream.store import HINDRANCES, key_of, lock, not_kept, replace_file, reported

_MOST_RECORDS = 50_000
"""Some 6 MB, read in a third of a second. A model has some hundreds, so what goes is more than a hundred models old."""


def load(context: Context) -> tuple[Measurements, tuple[Decision, ...]]:
    """What is kept of a context; nothing at first.

    A file that is damaged is written anew with what is sound in it, so that the damage is reported once.

    Returns:
        The measurements, and what was wrong with the file, for a report.
    """
    try:
        path = path_of(context)
        kept, faults = _kept(path, context)
    except OSError:
        # Saving is hindered by the same, and says so: one fault is told in one way.
        return Measurements(context), save(Measurements(context))
    if not faults:
        return kept, ()
    # Saving finds the same damage, unless somebody was faster.
    return kept, tuple(dict.fromkeys((*_damage(path, faults), *save(Measurements(context)))))


def save(new: Measurements) -> tuple[Decision, ...]:
    """Add measurements to those that are kept of their context; where both have one, the new one stays.

    Returns:
        What was wrong with the file, and why they could not be kept, for a report; mostly nothing.
    """
    damage: tuple[Decision, ...] = ()
    try:
        path = path_of(new.context)
        path.parent.mkdir(parents=True, exist_ok=True)
        with lock(path):
            kept, faults = _kept(path, new.context)
            damage = _damage(path, faults)
            replace_file(path, to_json(_joined(kept, new)))
    except HINDRANCES as error:
        return (*damage, not_kept("measurements", error))
    return damage


def read(path: Path, context: Context | None = None) -> Measurements:
    """Read a file of measurements that somebody names; those of the cache are such files.

    Args:
        path: the file.
        context: where the measurements are to be used; ``None`` if that is the very device that they are of.

    Raises:
        CostError: it cannot be read, is damaged, or is of another device or other versions than ``context``.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise CostError(f"{path} cannot be read ({first_line(error)}): name a file of measurements") from error
    found, faults = from_json(text, str(path))
    if faults:
        raise CostError(f"{path}: {faults[0]}")
    if context is not None:
        check_context(found.context, context, str(path))
    return found


def path_of(context: Context) -> Path:
    """The file of a context, whether or not it exists.

    Raises:
        FileNotFoundError: there is no place for it; see :func:`autostream.options.cache_folder`.
    """
    device = re.sub(r"\W+", "-", context.device.casefold())
    key = key_of(SCHEMA, context.device, context.multiprocessors, context.versions)
    return cache_folder() / f"{device}-{key[:16]}.json"


def _kept(path: Path, context: Context) -> tuple[Measurements, tuple[str, ...]]:
    """What a file of the cache holds, and what is wrong with it."""
    try:
        found, faults = from_json(path.read_bytes(), "it")
        check_context(found.context, context, "it")
    except FileNotFoundError:
        return Measurements(context), ()
    except CostError as error:
        # That is done anyway: nobody needs to be told to.
        return Measurements(context), (str(error).partition(": measure again")[0],)
    return found, faults


def _joined(kept: Measurements, new: Measurements) -> Measurements:
    """Both, the newest last, without the oldest of too many."""
    older = {key: record for key, record in kept.records.items() if key not in new.records}
    records = [*older.items(), *new.records.items()][-_MOST_RECORDS:]
    return Measurements(new.context, new.profile or kept.profile, dict(records))


def _damage(path: Path, faults: Sequence[str]) -> tuple[Decision, ...]:
    if not faults:
        return ()
    more = f", and {len(faults) - 1} more" if faults[1:] else ""
    reason = f"{path} was damaged ({faults[0]}{more}); what it has lost is measured again"
    return (reported("cache rebuilt", reason),)
