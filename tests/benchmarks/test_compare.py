"""Two results, row by row; what counts as worse is tested beside it (tests/cli/test_changes.py)."""

from __future__ import annotations

from typing import Any

import pytest

from autostream.cli.changes import Change
from benchmarks.compare import changes
from benchmarks.result import ResultError
from tests.benchmarks.results import cell, result, row

STEADY = (10.0, 10.0, 10.0)


def of(before: dict[str, Any], after: dict[str, Any], modes: str = "autostream", measure: Any = "call") -> list[Change]:
    return list(changes(before, after, modes, "cuda_graph", measure))


def cells(us: float) -> dict[str, Any]:
    return {"cuda_graph": cell(*STEADY), "autostream": cell(us, us, us)}


def test_two_suites_are_not_compared() -> None:
    with pytest.raises(ResultError, match="results of quick and training do not compare: they are two suites"):
        of(result(row("a", **cells(5.0))), result(row("a", **cells(5.0)), suite="training"))


def test_what_only_the_newer_has_is_not_compared() -> None:
    """New rows and modes are no news of old ones; neither is the same model at another batch size."""
    before = result(row("a", **cells(5.0)), row("b", 8, **cells(5.0)), row("gone", **cells(5.0)))
    after = result(
        row("new", **cells(9.0)), row("b", 8, **cells(9.0), autostream_new=cell(1, 1)), row("a", 8, **cells(9.0))
    )
    found = [(change.row, change.mode, change.status, change.worse(0.99)) for change in of(before, after)]
    assert found == [
        ("a", "autostream", "missing", True),
        ("b ×8", "autostream", "ok", False),
        ("gone", "autostream", "missing", True),
    ]
