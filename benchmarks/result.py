"""A result file: rows with the stamps of the runs that they came from, on one kind of machine.

Runs add to a file row by row, so one that is interrupted goes on where it ended, and pieces from several days or
machines merge. ``schema.json`` beside this file describes the form.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.suites import SUITES, Row

SCHEMA = 1

Result = dict[str, Any]

_KEY = ("workload", "batch", "dtype", "optimizer")
_KIND = ("gpu", "torch", "cuda")


class ResultError(Exception):
    """A result file cannot be read, or cannot be put together with another."""


def empty(suite: str) -> Result:
    """A result without rows."""
    return {"schema": SCHEMA, "suite": suite, "stamps": [], "rows": []}


def load(path: Path) -> Result:
    """Read a result file.

    Raises:
        ResultError: it is not there, or is no result of this schema and of a suite that there is, or is damaged inside.
    """
    try:
        result: Result = json.loads(path.read_text())
        found = result["schema"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ResultError(f"{path} is no result file ({type(error).__name__}): write one with run --out") from error
    if found != SCHEMA:
        raise ResultError(f"{path} has schema {found}, not {SCHEMA}: measure again")
    if not _is(empty("").keys(), _TOP, result):
        raise ResultError(f"{path} is damaged, or of a suite that there is no more: measure again")
    for what in ("stamps", "rows"):
        for number, entry in enumerate(result[what], 1):
            if not (_is_stamp(entry) if what == "stamps" else _is_row(entry, len(result["stamps"]))):
                raise ResultError(f"{path} is damaged in number {number} of its {what}: measure again")
    return result


def _is(required: Collection[str], form: Mapping[str, Callable[[Any], bool]], value: Any) -> bool:
    """Whether a value is an object with all that is required, of which each member that the form knows is right."""
    return (
        isinstance(value, dict)
        and all(name in value for name in required)
        and all(right(value[name]) for name, right in form.items() if name in value)
    )


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _is_stamp(value: Any) -> bool:
    return _is(_STAMP, _STAMP, value)


def _is_row(value: Any, stamps: int) -> bool:
    if not (_is(_ROW, _ROW, value) and value["stamp"] in range(stamps)):
        return False
    # Ratios are taken round by round.
    return len({len(cell[name]) for cell in value["cells"].values() for name in _SERIES if name in cell}) <= 1


def _is_cells(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_cell, value.values()))


def _is_cell(value: Any) -> bool:
    timed = isinstance(value, dict) and any(name in value for name in _SERIES)
    return _is(("status", *(_TIMED if timed else ())), _CELL, value)


def _is_series(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 1 and all(_is_number(us) and us > 0 for us in value)


def _is_quartiles(value: Any) -> bool:
    return isinstance(value, dict) and "median" in value and all(map(_is_number, value.values()))


_SERIES = ("call_us", "device_us")


def save(result: Result, path: Path) -> None:
    """Write a result file, at once: whoever interrupts leaves the old one or the new one.

    Raises:
        ResultError: it cannot be written there.
    """
    text = json.dumps(result, indent=1, allow_nan=False)
    # Rounds on one line each: a column of numbers would make the file three times as long. No string has a line break.
    text = re.sub(r"\[\n[-+.\de,\s]*\]", lambda numbers: " ".join(numbers[0].split()), text)
    beside = path.with_name(f"{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(text + "\n")
        os.replace(beside, path)
    except OSError as error:
        raise ResultError(f"--out {path}: {error.strerror}: name a file that can be written") from error


def key(row: dict[str, Any] | Row) -> tuple[Any, ...]:
    """What tells rows apart."""
    values = asdict(row) if isinstance(row, Row) else row
    return tuple(values[name] for name in _KEY)


def check_kind(result: Result, stamp: dict[str, Any]) -> None:
    """Refuse a stamp whose rows cannot be compared with those that a result has.

    Raises:
        ResultError: it is of another kind of machine or another torch.
    """
    for other in result["stamps"]:
        if differing := [name for name in _KIND if other[name] != stamp[name]]:
            name = differing[0]
            raise ResultError(
                f"this result has {name} {other[name]!r}, the new row {stamp[name]!r}: rows of one file are compared "
                "with one another, so write to another file"
            )


def with_row(result: Result, row: dict[str, Any], stamp: dict[str, Any]) -> Result:
    """The result with one more row, in the place of what was measured of it before.

    Raises:
        ResultError: the row is from another kind of machine or another torch.
    """
    check_kind(result, stamp)
    stamps = [*result["stamps"]] if stamp in result["stamps"] else [*result["stamps"], stamp]
    rows = [other for other in result["rows"] if key(other) != key(row)] + [{**row, "stamp": stamps.index(stamp)}]
    used = sorted({row["stamp"] for row in rows})
    rows = [{**row, "stamp": used.index(row["stamp"])} for row in rows]
    return {**result, "stamps": [stamps[index] for index in used], "rows": rows}


def merged(results: Sequence[Result]) -> Result:
    """One result with the rows of all; of a row that several have, the one that was given last.

    Raises:
        ResultError: they are of different suites, or from different kinds of machines.
    """
    first, *others = results
    for other in others:
        if other["suite"] != first["suite"]:
            raise ResultError(f"results of {first['suite']} and {other['suite']} do not merge: they are two suites")
        for row in other["rows"]:
            first = with_row(first, row, other["stamps"][row["stamp"]])
    return first


def ordered(result: Result, rows: Sequence[Row]) -> Result:
    """The result with its rows in the order of a suite; rows that the suite no longer has come last."""
    places = {key(row): place for place, row in enumerate(rows)}
    return {**result, "rows": sorted(result["rows"], key=lambda row: places.get(key(row), len(places)))}
