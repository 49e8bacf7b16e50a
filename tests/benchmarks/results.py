"""Results made by hand, and the schema that real ones follow too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

import benchmarks

SCHEMA = json.loads((Path(benchmarks.__file__).parent / "schema.json").read_text())

STAMP: dict[str, Any] = {
    "date": "2026-11-20 12:00 UTC",
    "commit": "0123456789ab-dirty",
    "torch": "2.11.0",
    "python": "3.11.7",
    "cuda": "12.8",
    "cudnn": 91002,
    "gpu": "G1",
    "driver": "570.1",
    "cpus": 2,
}
LATER = STAMP | {"date": "2026-11-21 12:00 UTC"}
OTHER_GPU = STAMP | {"gpu": "G2"}


def cell(*rounds: float, **others: Any) -> dict[str, Any]:
    """A cell that was timed; on the device it took half as long."""
    host = {"q1": 1.0, "median": 2.0, "q3": 3.0}
    times = {"call_us": [*rounds], "device_us": [us / 2 for us in rounds], "host_us": host}
    return {"status": "ok", "error": 1e-4, "first_s": 0.5, **times, "latency_us": host | {"p99": 4.0}} | others


def failed(status: str = "failed") -> dict[str, Any]:
    return {"status": status, "reason": "RuntimeError: it would not"}


def row(workload: str, batch: int = 1, failure: str = "", **cells: dict[str, Any]) -> dict[str, Any]:
    """A row, still without its stamp."""
    what = {"workload": workload, "batch": batch, "dtype": "float16", "optimizer": ""}
    return {**what, "seconds": 1.0, "failure": failure, "cells": cells}


def result(*rows: dict[str, Any], suite: str = "quick") -> dict[str, Any]:
    return {"schema": 1, "suite": suite, "stamps": [STAMP], "rows": [{**row, "stamp": 0} for row in rows]}


def check(found: dict[str, Any]) -> None:
    """See that a result follows the schema, and what a schema cannot say."""
    Draft202012Validator(SCHEMA).validate(found)
    keys = [(row["workload"], row["batch"], row["dtype"], row["optimizer"]) for row in found["rows"]]
    assert len(keys) == len(set(keys))
    assert {row["stamp"] for row in found["rows"]} == set(range(len(found["stamps"])))
    for measured in found["rows"]:
        series = [
            cell[name] for cell in measured["cells"].values() for name in ("call_us", "device_us") if name in cell
        ]
        assert len({len(rounds) for rounds in series}) <= 1
