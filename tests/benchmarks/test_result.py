"""Result files: written whole or not at all, read with care, put together only where rows can be compared."""

from __future__ import annotations

import copy
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, fields
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
from tests.benchmarks.results import LATER, OTHER_GPU, SCHEMA, STAMP, cell, check, failed, row
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


def test_numbers_of_rounds_share_a_line(path: Path) -> None:
    result.save(made(row("a", eager=cell(1.5, 2e-07, 3e22))), path)
    lines = [line.strip() for line in path.read_text().splitlines()]
    assert '"call_us": [ 1.5, 2e-07, 3e+22 ],' in lines
    assert '"workload": "a",' in lines, "all else has a line of its own"
    assert result.load(path)["rows"][0]["cells"]["eager"]["call_us"] == [1.5, 2e-07, 3e22]


def test_text_that_looks_like_numbers_stays_text(path: Path) -> None:
    reason = "RuntimeError: expected [1,   2], got [ 1,  -3 ]\nand [\n 1 ]"
    found = made(row("a", failure=reason, eager=failed() | {"reason": reason}))
    result.save(found, path)
    assert result.load(path) == found


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


def test_pieces_saved_side_by_side_do_not_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that differ only in what looks like a suffix have temporary files of their own."""
    written: list[object] = []
    monkeypatch.setattr(os, "replace", lambda source, target: written.append(source))
    for name in ("quick.1", "quick.2"):
        result.save(FULL, tmp_path / name)
    assert len(set(written)) == 2


def test_what_is_no_number_is_not_written(path: Path) -> None:
    """JSON has no NaN; other readers would refuse the whole file."""
    result.save(FULL, path)
    with pytest.raises(ValueError, match="not JSON compliant"):
        result.save(made(row("a", eager=cell(1.0, float("nan")))), path)
    assert result.load(path) == FULL


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
        ("", r"is no result file \(JSONDecodeError\)"),
        ('{"schema": 1, "suite"', r"is no result file \(JSONDecodeError\)"),
        ("[1]", r"is no result file \(TypeError\)"),
        ('{"rows": []}', r"is no result file \(KeyError\)"),
        ("[" * 100_000, r"is no result file \(RecursionError\)"),
        ('{"schema": 1, "rows": [1e999]}', r"is no result file \(ValueError\)"),
        ('{"schema": 1, "rows": [-1e999]}', r"is no result file \(ValueError\)"),
        (f'{{"schema": 1, "rows": [{10**400}]}}', r"is no result file \(ValueError\)"),
        ('{"schema": 2}', "has schema 2, not 1: measure again"),
        ('{"schema": 1}', r"is damaged \(\$: 'suite' is a required property\): measure again"),
        ('{"schema": 1, "suite": "old", "stamps": [], "rows": []}', r"is damaged \(\$.suite: 'old' is not one of"),
        ('{"schema": 1, "suite": "cpu", "stamps": []}', "is damaged"),
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
        ("workload", None),
        ("workload", 3),
        ("batch", "1"),
        ("dtype", None),
        ("optimizer", []),
        ("failure", None),
        ("cells", None),
        ("cells", []),
        ("stamp", None),
        ("stamp", 1),
        ("stamp", -1),
        ("stamp", "0"),
        ("stamp", 0.0),
        ("cells/eager", "ok"),
        ("cells/eager/status", None),
        ("cells/eager/status", "failed"),
        ("cells/eager/reason", 3),
        ("cells/eager/error", "little"),
        ("cells/eager/call_us", None),
        ("cells/eager/call_us", 3.0),
        ("cells/eager/call_us", [3.0]),
        ("cells/eager/call_us", [3.0, "3"]),
        ("cells/eager/call_us", [3.0, 0.0]),
        ("cells/eager/call_us", [3.0, 1e-300]),
        ("cells/eager/call_us", [3.0, 1e300]),
        ("cells/eager/call_us", [3.0, 3.0, 3.0]),
        ("cells/eager/device_us", [3.0]),
        ("cells/eager/device_us", [3.0, 3.0, 3.0]),
        ("cells/eager/host_us", None),
        ("cells/eager/host_us/median", None),
        ("cells/eager/host_us/q1", "1"),
        ("cells/eager/latency_us/p99", None),
        ("cells/eager/latency_us", [1.0]),
        ("cells/autostream/schedule", "none"),
        ("cells/autostream/schedule/streams", "two"),
        ("cells/autostream/schedule/policy", ["path_cover"]),
        ("cells/autostream/schedule/predicted_us", "2"),
    ],
)
def test_a_damaged_row_is_told_in_a_line(tmp_path: Path, change: str, value: Any) -> None:
    found = damaged(tmp_path / "x.json", changed(f"rows/0/{change}", value))
    assert found.startswith((" ($.rows[0]", " (googlenet has ")), found
    assert found.endswith("): measure again, or take that row out")


@pytest.mark.parametrize("value", [None, [], "x", 3])
def test_what_is_no_row_is_told(tmp_path: Path, value: object) -> None:
    found = FULL | {"rows": [*FULL["rows"], value]}
    assert damaged(tmp_path / "x.json", found).startswith(" ($.rows[3]: ")


@pytest.mark.parametrize(
    ("change", "value"),
    [
        ("rows", {}),
        ("rows", 3),
        ("stamps", {}),
        ("stamps", [3]),
        ("suite", ["quick"]),
        ("stamps/0/gpu", None),
        ("stamps/0/gpu", 3),
        ("stamps/0/torch", 2.11),
        ("stamps/0/commit", ["a"]),
        ("stamps/0/cuda", None),
    ],
)
def test_damage_around_the_rows_is_told(tmp_path: Path, change: str, value: Any) -> None:
    place = "".join(f"[{part}]" if part.isdecimal() else f".{part}" for part in change.split("/"))
    assert damaged(tmp_path / "x.json", changed(change, value)).startswith((f" (${place}", " ($.stamps[0]: "))


def test_a_row_that_is_there_twice_is_told(tmp_path: Path) -> None:
    assert damaged(tmp_path / "x.json", made(row("a", 8), row("a"), row("a", 8))).startswith(" (a is there twice): ")


def test_one_round_is_no_series(tmp_path: Path) -> None:
    """It has no quartiles."""
    assert damaged(tmp_path / "x.json", made(row("a", eager=cell(3.0)))).startswith(" ($.rows[0].cells.eager")


def test_numbers_that_json_has_not_are_told(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps(made(row("a", eager=cell(1.0, float("nan"))))))
    with pytest.raises(ResultError, match=r"is no result file \(ValueError\)"):
        result.load(tmp_path / "x.json")


def test_a_cell_may_lack_the_devices_times(path: Path) -> None:
    """What a mode takes beside the device can be timed where the device alone cannot."""
    found = changed("rows/0/cells/eager/device_us", None)
    check(found)
    result.save(found, path)
    assert result.load(path) == found


@pytest.mark.parametrize("text", ["\x1b[2J", "a\rb", "\u202eabc", "\ud800"], ids=ascii)
@pytest.mark.parametrize(
    "change",
    [
        lambda found, text: found["rows"][0].update(workload=text),
        lambda found, text: found["rows"][0].update(failure=text),
        lambda found, text: found["stamps"][0].update(gpu=text),
        lambda found, text: found.update({text: 1}),
        lambda found, text: found.update(schema=text),
    ],
    ids=range(5),
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


def test_bytes_and_folders_are_no_results(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"\xff\xfe")
    with pytest.raises(ResultError, match="UnicodeDecodeError"):
        result.load(tmp_path / "x")
    with pytest.raises(ResultError, match="IsADirectoryError"):
        result.load(tmp_path)


def test_a_key_is_the_same_for_what_is_measured_and_what_was() -> None:
    wanted = Row("dlrm", 8, "float16", "sgd")
    assert result.key({**asdict(wanted), "cells": {}, "stamp": 3}) == result.key(wanted)
    others = (Row("dlrm", 1, "float16", "sgd"), Row("dlrm", 8, "float32", "sgd"), Row("dlrm", 8, "float16"))
    assert len({result.key(row) for row in (wanted, *others, Row("deepfm", 8, "float16", "sgd"))}) == 5


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


def test_a_row_replaces_the_same_one_and_stamps_without_rows_go() -> None:
    found = result.with_row(made(row("a"), row("b")), row("c"), LATER)
    found = result.with_row(found, row("a", eager=failed()), LATER)
    assert {row["workload"]: row["stamp"] for row in found["rows"]} == {"b": 0, "c": 1, "a": 1}
    assert [row["cells"] for row in found["rows"]] == [{}, {}, {"eager": failed()}]
    found = result.with_row(found, row("b"), LATER)
    assert found["stamps"] == [LATER]
    check(found)
    assert len(result.with_row(found, row("b", 8), LATER)["rows"]) == 4


@pytest.mark.parametrize(("name", "value"), [("gpu", "G2"), ("torch", "2.13.0"), ("cuda", None)])
def test_rows_that_cannot_be_compared_do_not_share_a_file(name: str, value: str | None) -> None:
    with pytest.raises(ResultError, match=f"has {name} '?{STAMP[name]}'?, the new row '?{value}'?: .* another file"):
        result.with_row(made(row("a")), row("b"), STAMP | {name: value})


def test_another_driver_or_commit_is_only_noted() -> None:
    found = result.with_row(made(row("a")), row("b"), STAMP | {"driver": "580", "commit": None, "cpus": 3})
    assert len(found["stamps"]) == 2


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


@pytest.mark.parametrize("differing", [{"cpu": "C2"}, {"cpus": 3}, {"threads": 1}, {"timeout_s": 7.0}, {"modes": []}])
def test_the_cpu_beside_a_gpu_and_options_are_only_noted(differing: dict[str, Any]) -> None:
    found = result.with_row(made(row("a")) | {"stamps": [STAMP | NEW]}, row("b"), STAMP | NEW | differing)
    check(found)
    assert len(found["stamps"]) == 2


def test_what_an_older_stamp_does_not_have_is_not_compared() -> None:
    for one, other in ((STAMP, STAMP | NEW), (STAMP | NEW, STAMP)):
        assert len(result.with_row(made(row("a")) | {"stamps": [one]}, row("b"), other)["stamps"]) == 2


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


def test_a_row_of_another_kind_is_refused_even_if_it_would_not_be_kept() -> None:
    with pytest.raises(ResultError, match="has gpu 'G1', the new row 'G2'"):
        result.merged([made(row("a", **TWO)), made(row("a")) | {"stamps": [OTHER_GPU]}])


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


def test_other_suites_and_other_machines_do_not_merge() -> None:
    with pytest.raises(ResultError, match="results of quick and cpu do not merge"):
        result.merged([made(row("a")), made(row("b"), suite="cpu")])
    with pytest.raises(ResultError, match="has gpu 'G1', the new row 'G2'"):
        result.merged([made(row("a")), made(row("b")) | {"stamps": [OTHER_GPU]}])


def test_rows_stand_in_the_order_of_the_suite() -> None:
    rows = [Row(name, batch, "float16") for batch in (1, 8) for name in ("a", "b")]
    found = made(row("gone"), row("b", 8), row("a", 8), row("old"), row("a"))
    names = [(row["workload"], row["batch"]) for row in result.ordered(found, rows)["rows"]]
    assert names == [("a", 1), ("a", 8), ("b", 8), ("gone", 1), ("old", 1)]


def test_the_schema_itself_is_one() -> None:
    Draft202012Validator.check_schema(SCHEMA)
    check(FULL)
    check(result.empty("inference"))
    assert SCHEMA["properties"]["schema"]["const"] == result.SCHEMA


def test_the_schema_has_what_the_code_writes() -> None:
    definitions = SCHEMA["$defs"]
    properties = definitions["cell"]["properties"]
    assert [*properties] == [field.name for field in fields(Cell)]
    assert properties["status"]["enum"] == [*get_args(Status)]
    assert {"auto", *definitions["schedule"]["properties"]["policy"]["enum"]} == {*get_args(PolicyName)}
    stamps = definitions["stamp"]
    assert {*stamps["required"]} == STAMP.keys() <= stamp().keys() <= stamps["properties"].keys()
    optional = {*LIBRARIES, "cpu", "threads", "timeout_s", "modes"}
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
        ("suite", "slow"),
        ("stamps", None),
        ("remark", "x"),
        ("stamps/0/gpu", None),
        ("stamps/0/host", "x"),
        ("stamps/0/date", "yesterday"),
        ("rows/0/failure", None),
        ("rows/0/remark", "x"),
        ("rows/0/batch", 0),
        ("rows/0/batch", "1"),
        ("rows/0/dtype", "half"),
        ("rows/0/optimizer", "lion"),
        ("rows/0/stamp", -1),
        ("rows/0/cells/Eager", failed()),
        ("rows/0/cells/eager/status", "fine"),
        ("rows/0/cells/eager/status", "failed"),
        ("rows/0/cells/eager/reason", "x"),
        ("rows/0/cells/eager/call_us", None),
        ("rows/0/cells/eager/call_us", [1.0, "2"]),
        ("rows/0/cells/eager/device_us", [1.0, 0.0]),
        ("rows/0/cells/eager/latency_us/p99", None),
        ("rows/0/cells/eager/host_us/q3", None),
        ("rows/0/cells/eager/host_us/mean", 1.0),
        ("rows/0/cells/eager/error", -1.0),
        ("rows/0/cells/eager/p99", 1.0),
        ("rows/0/cells/autostream/schedule/mode", None),
        ("rows/0/cells/autostream/schedule/lanes", 2),
        ("rows/0/cells/autostream/schedule/policy", "auto"),
        ("rows/1/cells/eager/reason", None),
        ("rows/1/cells/eager/call_us", [1.0, 2.0]),
    ],
)
def test_the_schema_is_strict(path: str, value: Any) -> None:
    with pytest.raises(ValidationError):
        check(changed(path, value))


COMMITTED = [path for path in RESULTS.rglob("*.json") if '"suite"' in path.read_text()]


def test_results_are_committed() -> None:
    assert {"quick.json", "quick-rerun.json"} <= {path.name for path in COMMITTED}


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_a_committed_result_is_as_the_schema_says(path: Path) -> None:
    check(result.load(path))


def test_a_whole_result_is_read_where_its_schema_cannot_be_checked(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result.save(FULL, path)
    monkeypatch.setattr(result, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    assert result.load(path) == FULL
