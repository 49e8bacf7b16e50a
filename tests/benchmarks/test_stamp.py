"""Stamps: of this repository and of what is installed here."""

from __future__ import annotations

import subprocess
from importlib import metadata
from pathlib import Path

import pytest

from benchmarks.stamp import LIBRARIES, earlier_rows, save, stamp


@pytest.fixture(autouse=True)
def untold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AUTOSTREAM_COMMIT", raising=False)


def test_the_commit_is_not_that_of_the_folder_where_the_command_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "other"], ["tag", "-a", "other", "-m", "x"]):
        subprocess.run([*git, *words], check=True)
    monkeypatch.chdir(tmp_path)
    assert subprocess.check_output(["git", "describe"], text=True).strip() == "other"
    assert stamp()["commit"] != "other"


def test_libraries_that_are_installed_have_their_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    found = stamp()
    assert found["networkx"] == metadata.version("networkx")
    installed = {package.metadata["Name"] for package in metadata.distributions()}
    assert {name for name in LIBRARIES if name in found} == {*LIBRARIES} & installed


@pytest.mark.parametrize(
    ("changed", "settings", "kept"),
    [({}, 60, True), ({"date": "later"}, 60, True), ({"commit": "b"}, 60, False), ({}, 400, False)],
    ids=["same", "later", "another commit", "other settings"],
)
def test_rows_of_the_same_code_on_the_same_machine_are_kept(
    tmp_path: Path, changed: dict[str, str], settings: int, kept: bool
) -> None:
    now = {"date": "today", "commit": "a", "gpu": "H200"}
    assert earlier_rows("search", tmp_path, now, seconds=60) == []
    save("search", {"stamp": now, "seconds": 60, "rows": [{"row": "x"}]}, "a table", tmp_path)
    found = earlier_rows("search", tmp_path, {**now, **changed}, seconds=settings)
    assert found == ([{"row": "x"}] if kept else [])


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "7", "[" * 100_000, '{"rows": []}', '{"stamp": 1, "rows": []}', '{"stamp": {}, "rows": 1}']
)
def test_a_file_that_is_damaged_or_of_somebody_else_has_no_rows(tmp_path: Path, text: str) -> None:
    (tmp_path / "search.json").write_text(text)
    assert earlier_rows("search", tmp_path, {}) == []
