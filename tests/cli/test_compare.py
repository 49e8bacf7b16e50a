"""``autostream compare``: what is worse, how it is shown, and files that are no results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autostream import cli
from tests.cli.calls import error_of


def measured(us: float, **more: object) -> dict[str, object]:
    """What bench writes of a model that takes 8 µs plainly, and this when optimized."""
    cells = {"eager": {"status": "ok", "call_us": [8.0] * 9}, "autostream": {"status": "ok", "call_us": [us] * 9}}
    about = {"device": "cpu", "baseline": "eager", "versions": {"torch": "2.11.0"}, "workload": "net"}
    return {**about, "cells": cells, **more}


FOREIGN = "after.json is not what autostream bench --json writes ("


def compare(before: object, after: object, *flags: str) -> int:
    for name, row in (("before.json", before), ("after.json", after)):
        Path(name).write_text(json.dumps(row), encoding="utf-8")
    return cli.main(["compare", "before.json", "after.json", *flags])


@pytest.mark.parametrize(
    ("us", "flags", "code"),
    [(4.0, [], 0), (4.1, [], 0), (4.2, [], 1), (4.2, ["--fail-over", "6%"], 0), (4.2, ["--fail-over", "0.01"], 1)],
)
def test_compare_fails_if_more_was_lost_than_is_allowed(model: str, us: float, flags: list[str], code: int) -> None:
    """4 µs are twice the speed of 8, and 4.2 µs 4.8 % less than that."""
    assert compare(measured(4.0), measured(us), *flags) == code


@pytest.mark.parametrize(
    ("after", "said"),
    [
        (measured(4.0, workload="other"), "before.json and after.json have another workload, net and other: measure"),
        (measured(4.0, baseline="autostream"), "before.json and after.json have another baseline, eager and auto"),
        (measured(4.0, cells={}), f"{FOREIGN}ValueError: its names or times are none)"),
        (measured(float("nan")), f"{FOREIGN}ValueError: its names or times are none)"),
        (measured(True), f"{FOREIGN}ValueError: its names or times are none)"),
        (measured(1e308), f"{FOREIGN}ValueError: its names or times are none)"),
        (measured(4.0, versions=None), f"{FOREIGN}ValueError: its names or times are none)"),
        ([], f"{FOREIGN}TypeError: "),
    ],
)
def test_what_cannot_be_compared_is_one_line(
    capsys: pytest.CaptureFixture[str], model: str, after: object, said: str
) -> None:
    assert compare(measured(4.0), after) == 2
    assert capsys.readouterr().err.startswith(f"autostream: error: {said}")
    assert error_of(capsys, "compare", "before.json", "missing.json").startswith("missing.json cannot be read (File")
    for text in ("{", "[" * 100_000):
        Path("after.json").write_text(text, encoding="utf-8")
        assert error_of(capsys, "compare", "before.json", "after.json").startswith(FOREIGN)
    Path("after.json").write_text(Path("before.json").read_text())
    said = error_of(capsys, "compare", "before.json", "after.json", "--modes", "fast")
    assert said == "before.json has no time of a mode that starts with 'fast': name others"
