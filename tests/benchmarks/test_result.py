"""Result files: written whole or not at all, read with care, put together only where rows can be compared."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest
from jsonschema import Draft202012Validator, ValidationError

from autostream.options import PolicyName
from benchmarks import result
from benchmarks.harness.comparison import Cell, Status
from benchmarks.result import ResultError
from benchmarks.stamp import LIBRARIES, RESULTS, stamp
from benchmarks.suites import Row
from tests.benchmarks.results import LATER, SCHEMA, STAMP, cell, check, failed, row
from tests.benchmarks.results import result as made

FULL = made(
    row("googlenet", eager=cell(2.0, 3.0), autostream=cell(1.0, 1e-05, schedule={"mode": "streams", "ops": 3})),
    row("dlrm", 8, eager=failed("timed out"), autostream=failed("wrong") | {"error": 0.5}),
    row("mm_small", failure="RuntimeError: no such model"),
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "new" / "results" / "quick.json"


def test_a_result_comes_back_as_it_was(path: Path) -> None:
    result.save(FULL, path)
    assert result.load(path) == FULL
    assert [file.name for file in path.parent.iterdir()] == ["quick.json"]


@pytest.mark.parametrize("stage", ["write_text", "replace"])
def test_an_interrupted_save_leaves_the_old_file(path: Path, monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    """Also where half of the new one is written by then."""
    result.save(FULL, path)

    def half(file: Path, text: str) -> None:
        with file.open("w") as out:
            out.write(text[: len(text) // 2])
        raise KeyboardInterrupt

    def never(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(*{"write_text": (Path, "write_text", half), "replace": (os, "replace", never)}[stage])
    with pytest.raises(KeyboardInterrupt):
        result.save(result.empty("quick"), path)
    monkeypatch.undo()
    assert result.load(path) == FULL
    result.save(result.empty("quick"), path)
    assert result.load(path) == result.empty("quick")
    assert [file.name for file in path.parent.iterdir()] == ["quick.json"]


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResultError, match=r"file/x\.json: .*: name a file that can be written"):
        result.save(FULL, tmp_path / "file" / "x.json")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ResultError, match="Is a directory: name a file"):
        result.save(FULL, tmp_path / "folder")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, r"is no result file \(FileNotFoundError\): write one with run --out"),
        ('{"schema": 1, "suite"', r"is no result file \(JSONDecodeError\)"),
        ("[1]", r"is no result file \(TypeError\)"),
        ('{"rows": []}', r"is no result file \(KeyError\)"),
        ("[" * 100_000, r"is no result file \(RecursionError\)"),
        ('{"schema": 1, "rows": [1e999]}', r"is no result file \(ValueError\)"),
        (f'{{"schema": 1, "rows": [{10**400}]}}', r"is no result file \(ValueError\)"),
        ('{"schema": 2}', "has schema 2, not 1: measure again"),
        ('{"schema": 1}', r"is damaged \(\$: 'suite' is a required property\): measure again"),
        ('{"schema": 1, "suite": "old", "stamps": [], "rows": []}', r"is damaged \(\$.suite: 'old' is not one of"),
    ],
)
def test_what_is_no_result_is_told_in_a_line(tmp_path: Path, text: str | None, said: str) -> None:
    path = tmp_path / "x.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ResultError, match=said) as raised:
        result.load(path)
    assert str(raised.value).startswith(str(path))
    assert "\n" not in str(raised.value)


def damaged(path: Path, found: object) -> str:
    """What is said of a file with this inside."""
    path.write_text(json.dumps(found))
    with pytest.raises(ResultError) as raised:
        result.load(path)
    said = str(raised.value)
    assert said.startswith(f"{path} is damaged")
    assert "\n" not in said
    return said.removeprefix(f"{path} is damaged")


@pytest.mark.parametrize(
    ("change", "value"),
    [
        ("workload", 3),
        ("cells", None),
        ("stamp", 1),
        ("cells/eager/status", "failed"),
        ("cells/eager/call_us", [3.0]),
        ("cells/eager/call_us", [3.0, "3"]),
        ("cells/eager/call_us", [3.0, 1e-300]),
        ("cells/eager/call_us", [3.0, 3.0, 3.0]),
        ("cells/eager/device_us", [3.0, 3.0, 3.0]),
        ("cells/eager/host_us/median", None),
        ("cells/eager/latency_us/p99", None),
        ("cells/autostream/schedule", "none"),
    ],
)
def test_a_damaged_row_is_told_in_a_line(tmp_path: Path, change: str, value: Any) -> None:
    found = damaged(tmp_path / "x.json", changed(f"rows/0/{change}", value))
    assert found.startswith((" ($.rows[0]", " (googlenet has ")), found
    assert found.endswith("): measure again, or take that row out")


def test_a_row_that_is_there_twice_is_told(tmp_path: Path) -> None:
    assert damaged(tmp_path / "x.json", made(row("a", 8), row("a"), row("a", 8))).startswith(" (a is there twice): ")


@pytest.mark.parametrize("text", ["\x1b[2J", "\ud800"], ids=ascii)
@pytest.mark.parametrize(
    "change",
    [
        lambda found, text: found["rows"][0].update(workload=text),
        lambda found, text: found["rows"][0].update(failure=text),
        lambda found, text: found.update({text: 1}),
    ],
    ids=range(3),
)
def test_text_that_a_terminal_would_obey_is_refused_in_a_line(
    tmp_path: Path, change: Callable[[Any, str], None], text: str
) -> None:
    odd = copy.deepcopy(FULL)
    change(odd, text)
    (tmp_path / "odd.json").write_text(json.dumps(odd))
    with pytest.raises(ResultError, match=r"odd.json is damaged \(it says ") as caught:
        result.load(tmp_path / "odd.json")
    assert str(caught.value).isprintable()


def test_rows_are_added_with_their_stamps() -> None:
    found = result.empty("quick")
    for number, (name, at) in enumerate((("a", STAMP), ("b", LATER), ("c", STAMP))):
        before = copy.deepcopy(found)
        more = result.with_row(found, row(name), at)
        assert found == before, "the old result stays as it is"
        found = more
        assert len(found["rows"]) == number + 1
    check(found)
    assert [(row["workload"], row["stamp"]) for row in found["rows"]] == [("a", 0), ("b", 1), ("c", 0)]
    assert found["stamps"] == [STAMP, LATER]


NEW = {"cpu": "C1", "threads": 2, "timm": "1.0", "networkx": "3.2"}
"""What stamps that are older do not have."""


@pytest.mark.parametrize(
    ("gpu", "differing"),
    [
        ("G1", {"timm": "2.0"}),
        ("G1", {"networkx": "3.3"}),
        (None, {"timm": "2.0"}),
        (None, {"cpu": "C2"}),
        (None, {"cpus": 3}),
        (None, {"threads": 1}),
    ],
)
def test_libraries_have_to_agree_and_without_a_gpu_the_cpu(gpu: str | None, differing: dict[str, Any]) -> None:
    at = STAMP | NEW | {"gpu": gpu}
    found = result.with_row(result.empty("cpu"), row("a"), at)
    check(found)
    (name,) = differing
    with pytest.raises(ResultError, match=f"has {name} .*, the new row '?{differing[name]}'?: "):
        result.with_row(found, row("b"), at | differing)
    result.with_row(found, row("b"), at)


TWO = {"eager": cell(1.0, 1.0), "autostream": cell(1.0, 1.0)}


@pytest.mark.parametrize(
    ("later", "kept"),
    [
        pytest.param(row("a", failure="no room"), "earlier", id="failed"),
        pytest.param(row("a", eager=cell(2.0, 2.0)), "earlier", id="fewer modes"),
        pytest.param(row("a", **TWO | {"eager": failed()}), "earlier", id="fewer times"),
        pytest.param(row("a", **TWO), "later", id="as many"),
        pytest.param(row("a", **TWO, compile_default=cell(1.0, 1.0)), "later", id="more"),
    ],
)
def test_of_the_same_row_the_one_with_most_times_is_kept(later: dict[str, Any], kept: str) -> None:
    found = result.merged([made(row("a", **TWO)), made(later) | {"stamps": [LATER]}])
    check(found)
    assert found["stamps"] == [STAMP if kept == "earlier" else LATER]
    assert found["rows"][0]["cells"] == (TWO if kept == "earlier" else later["cells"])


def test_pieces_merge_and_the_last_of_the_same_row_counts() -> None:
    pieces = [
        made(row("a"), row("b")),
        result.with_row(made(row("d")), row("c"), LATER),
        result.with_row(result.empty("quick"), row("a", eager=failed()), LATER),
    ]
    before = copy.deepcopy(pieces)
    found = result.merged(pieces)
    check(found)
    assert pieces == before
    assert {row["workload"]: (row["stamp"], row["cells"]) for row in found["rows"]} == {
        "b": (0, {}),
        "d": (0, {}),
        "c": (1, {}),
        "a": (1, {"eager": failed()}),
    }
    assert result.merged(pieces[:1]) == pieces[0]


def test_rows_stand_in_the_order_of_the_suite() -> None:
    rows = [Row(name, batch, "float16") for batch in (1, 8) for name in ("a", "b")]
    found = made(row("gone"), row("b", 8), row("a", 8), row("old"), row("a"))
    names = [(row["workload"], row["batch"]) for row in result.ordered(found, rows)["rows"]]
    assert names == [("a", 1), ("a", 8), ("b", 8), ("gone", 1), ("old", 1)]


def test_the_schema_has_what_the_code_writes() -> None:
    definitions = SCHEMA["$defs"]
    properties = definitions["cell"]["properties"]
    assert [*properties] == [field.name for field in fields(Cell)]
    assert properties["status"]["enum"] == [*get_args(Status)]
    assert {"auto", *definitions["schedule"]["properties"]["policy"]["enum"]} == {*get_args(PolicyName)}
    stamps = definitions["stamp"]
    assert {*stamps["required"]} == STAMP.keys() <= stamp().keys() <= stamps["properties"].keys()
    optional = {*LIBRARIES, "cpu", "threads", "timeout_s", "modes", "caches"}
    assert stamps["properties"].keys() - STAMP.keys() == optional, "stamps that are older lack these"
    Draft202012Validator(SCHEMA).validate(result.empty("cpu") | {"stamps": [stamp()]})


def changed(change: str, value: Any) -> dict[str, Any]:
    """The result made by hand, with another value at a path, or without it."""
    found = copy.deepcopy(FULL)
    *path, last = change.split("/")
    place: Any = found
    for name in path:
        place = place[int(name) if name.isdecimal() else name]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return found


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("schema", 2),
        ("remark", "x"),
        ("stamps/0/gpu", None),
        ("stamps/0/host", "x"),
        ("rows/0/remark", "x"),
        ("rows/0/batch", 0),
        ("rows/0/optimizer", "lion"),
        ("rows/0/cells/Eager", failed()),
        ("rows/0/cells/eager/status", "fine"),
        ("rows/0/cells/eager/reason", "x"),
        ("rows/0/cells/eager/call_us", [1.0, "2"]),
        ("rows/0/cells/eager/latency_us/p99", None),
        ("rows/0/cells/eager/host_us/mean", 1.0),
        ("rows/0/cells/autostream/schedule/lanes", 2),
        ("rows/0/cells/autostream/schedule/policy", "auto"),
        ("rows/1/cells/eager/call_us", [1.0, 2.0]),
    ],
)
def test_the_schema_is_strict(path: str, value: Any) -> None:
    with pytest.raises(ValidationError):
        check(changed(path, value))


COMMITTED = [path for path in RESULTS.rglob("*.json") if '"suite"' in path.read_text()]


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_a_committed_result_is_as_the_schema_says(path: Path) -> None:
    check(result.load(path))
