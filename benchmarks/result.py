"""Result files: rows, and stamps of the runs that measured them, from one kind of machine.

Runs add rows one by one, so an interrupted one can be continued, and results of several runs can be merged.
``schema.json`` is the JSON schema.
"""

from __future__ import annotations

import json
import math
import os
import re
import reprlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.stamp import LIBRARIES
from benchmarks.suites import Row

SCHEMA = 1

Result = dict[str, Any]

_KEY = ("workload", "batch", "dtype", "optimizer")
_KIND = ("gpu", "torch", "cuda", *LIBRARIES)
"""Fields of stamps that all rows of one file must agree in, if both have them."""

_KIND_CPU = (*_KIND, "cpu", "cpus", "threads")
"""The same for measurements of the CPU."""


class ResultError(Exception):
    """A result file cannot be read, or cannot be put together with another."""


def empty(suite: str) -> Result:
    """A result without rows."""
    return {"schema": SCHEMA, "suite": suite, "stamps": [], "rows": []}


def load(path: Path) -> Result:
    """Read a result file.

    Raises:
        ResultError: it cannot be read, has another schema or suite, or is damaged.
    """
    try:
        result: Result = json.loads(path.read_text(), parse_constant=_refuse, parse_float=_finite, parse_int=_short)
        found = result["schema"]
        odd = next((text for text in _texts(result) if not text.replace("\n", "").isprintable()), None)
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise ResultError(f"{path} is no result file ({type(error).__name__}): write one with run --out") from error
    if odd is not None:
        raise ResultError(f"{path} is damaged (it says {reprlib.repr(odd)}): measure again, or take that row out")
    if found != SCHEMA:
        raise ResultError(f"{path} has schema {reprlib.repr(found)}, not {SCHEMA}: measure again")
    if fault := _fault(result):
        raise ResultError(f"{path} is damaged ({fault}): measure again, or take that row out")
    return result


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"JSON has no {constant}")


def _finite(number: str) -> float:
    """A finite float: infinity could not be written again."""
    value = float(number)
    return value if math.isfinite(value) else _refuse(number)


def _short(number: str) -> int:
    """An int with at most :data:`_DIGITS` digits: larger ones may not fit into a float."""
    return int(number) if len(number) <= _DIGITS else _refuse(number[:_SHOWN])


_DIGITS = 30


def _texts(value: object) -> Iterator[str]:
    """All strings of a result, keys included, to find control characters."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for inner in (*value, *value.values()) if isinstance(value, dict) else value:
            yield from _texts(inner)


def _fault(result: Result) -> str:
    """The first defect of a result, or ``""``."""
    if find_spec("jsonschema") is None:  # not without the extra ``bench``
        return ""
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import best_match

    validator = Draft202012Validator(json.loads((Path(__file__).parent / "schema.json").read_text()))
    if error := best_match(validator.iter_errors(result)):
        return f"{error.json_path}: {error.message[:_SHOWN]}"
    keys = set()
    for row in result["rows"]:
        if not isinstance(row["stamp"], int) or row["stamp"] >= len(result["stamps"]):  # 0.0 is an integer in JSON
            return f"{row['workload']} has a stamp that is not there"
        if key(row) in keys:
            return f"{row['workload']} is there twice"
        keys.add(key(row))
        if len({len(cell[name]) for cell in row["cells"].values() for name in _SERIES if name in cell}) > 1:
            return f"{row['workload']} has modes with other numbers of rounds"
    return ""


_SHOWN = 100
"""Length limit of a quoted error."""

_SERIES = ("call_us", "device_us")


def save(result: Result, path: Path) -> None:
    """Write a result file atomically.

    Raises:
        ResultError: it cannot be written there.
    """
    text = json.dumps(result, indent=1, allow_nan=False)
    # Numbers of one list on one line, which makes the file three times shorter. No string has a line break.
    text = re.sub(r"\[\n[-+.\de,\s]*\]", lambda numbers: " ".join(numbers[0].split()), text)
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text + "\n")
        os.replace(temporary, path)
    except OSError as error:
        raise ResultError(f"--out {path}: {error.strerror}: name a file that can be written") from error


def key(row: dict[str, Any] | Row) -> tuple[Any, ...]:
    """The key of a row."""
    values = asdict(row) if isinstance(row, Row) else row
    return tuple(values[name] for name in _KEY)


def timed(row: dict[str, Any]) -> set[str]:
    """The modes of a row with times."""
    return {mode for mode, cell in row["cells"].items() if cell["status"] == "ok"}


def check_kind(result: Result, stamp: dict[str, Any]) -> None:
    """Check that rows of a stamp can be compared with those of a result.

    Raises:
        ResultError: the machine or the version of a library differs.
    """
    for other in result["stamps"]:
        kind = [name for name in (_KIND if stamp["gpu"] else _KIND_CPU) if name in other and name in stamp]
        if name := next((name for name in kind if other[name] != stamp[name]), ""):
            raise ResultError(
                f"this result has {name} {other[name]!r}, the new row {stamp[name]!r}: rows of one file are compared "
                "with one another, so write to another file"
            )


def with_row(result: Result, row: dict[str, Any], stamp: dict[str, Any]) -> Result:
    """The result with a row added, or replaced if it has one of this key.

    Raises:
        ResultError: as :func:`check_kind`.
    """
    check_kind(result, stamp)
    stamps = [*result["stamps"]] if stamp in result["stamps"] else [*result["stamps"], stamp]
    rows = [other for other in result["rows"] if key(other) != key(row)] + [{**row, "stamp": stamps.index(stamp)}]
    used = sorted({row["stamp"] for row in rows})
    rows = [{**row, "stamp": used.index(row["stamp"])} for row in rows]
    return {**result, "stamps": [stamps[index] for index in used], "rows": rows}


def merged(results: Sequence[Result]) -> Result:
    """One result with the rows of all; of equal keys, the row with the most timed modes, or the last of those.

    Cells of different rows are not mixed, since those of one row share rounds.

    Raises:
        ResultError: they are of different suites, or from different kinds of machines.
    """
    first, *others = results
    for other in others:
        if other["suite"] != first["suite"]:
            raise ResultError(f"results of {first['suite']} and {other['suite']} do not merge: they are two suites")
        for row in other["rows"]:
            at = other["stamps"][row["stamp"]]
            check_kind(first, at)
            had = next((had for had in first["rows"] if key(had) == key(row)), None)
            if had is None or len(timed(row)) >= len(timed(had)):
                first = with_row(first, row, at)
    return first


def ordered(result: Result, rows: Sequence[Row]) -> Result:
    """The result with its rows in the order of a suite; rows that the suite no longer has come last."""
    positions = {key(row): at for at, row in enumerate(rows)}
    return {**result, "rows": sorted(result["rows"], key=lambda row: positions.get(key(row), len(positions)))}
