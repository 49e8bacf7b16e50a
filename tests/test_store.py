"""Keys, and files that are replaced as a whole; several processes at once are in ``tests/costs/test_cache.py``."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autostream import store as keeping
from autostream.ir import Decision
from autostream.store import (
    HINDRANCES,
    code_in,
    key_of,
    lock,
    not_kept,
    read_json,
    replace_file,
    reported,
    write_json,
)

contents = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(contents, contents)
def test_equal_contents_have_one_key_and_others_have_others(one: object, other: object) -> None:
    # As text, since 1, 1.0 and True are equal to Python, but not to an op.
    assert (key_of(one) == key_of(other)) == (repr(_sorted(one)) == repr(_sorted(other)))


def _sorted(content: object) -> object:
    if isinstance(content, dict):
        return {name: _sorted(content[name]) for name in sorted(content)}
    return [_sorted(inner) for inner in content] if isinstance(content, list) else content


def test_a_key_is_that_of_the_content_whatever_its_containers() -> None:
    assert key_of("relu", (8, 3), {"a": 1, "b": 2}) == key_of("relu", [8, 3], {"b": 2, "a": 1})
    assert len({key_of("relu", constant) for constant in (1, 1.0, True, "1", None, [1])}) == 6


def test_what_holds_an_address_has_no_key() -> None:
    with pytest.raises(TypeError):
        key_of("relu", object())


def test_the_code_in_a_folder_is_what_its_python_files_say(tmp_path: Path) -> None:
    def digest() -> str:
        code_in.cache_clear()
        return code_in(tmp_path)

    (tmp_path / "below").mkdir()
    found = [digest()]
    for path, text in (("a.py", "1"), ("below/b.py", "1"), ("below/b.py", "2")):
        (tmp_path / path).write_text(text)
        found.append(digest())
    assert len(set(found)) == 4
    (tmp_path / "notes.txt").write_text("of no matter")
    assert digest() == found[-1]


def test_a_file_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kept.json"
    replace_file(path, "old")
    with monkeypatch.context() as full:
        full.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("the disk is full")))
        with pytest.raises(OSError, match="full"):
            replace_file(path, "new")
    assert path.read_text() == "old"
    replace_file(path, "new")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_of_many_files_the_oldest_go_and_damage_is_seen(tmp_path: Path) -> None:
    paths = [tmp_path / "folder" / f"{age}.json" for age in range(3)]
    for age, path in enumerate(paths):
        write_json(path, {"age": age}, most=2)
        os.utime(path, (age, age))
    assert [path.exists() for path in paths] == [False, True, True]
    assert read_json(paths[2]) == {"age": 2}
    for damaged in ('{"content": {"age": 2}}', "[]", "{", paths[2].read_text().replace('"age": 2', '"age": 3')):
        paths[2].write_text(damaged)
        with pytest.raises(ValueError, match=r"."):
            read_json(paths[2])
    with pytest.raises(FileNotFoundError):
        read_json(paths[0])


def test_writers_take_turns_and_wait_for_nobody_forever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "_PATIENCE_S", 0.0)
    with lock(tmp_path / "one"), lock(tmp_path / "other"), pytest.raises(HINDRANCES), lock(tmp_path / "one"):
        pass


def test_reports_tell_each_time_and_the_log_once(caplog: pytest.LogCaptureFixture) -> None:
    keeping._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert reported("odd", "a reason") == reported("odd", "a reason") == Decision("", "odd", "a reason")
    assert [record.getMessage() for record in caplog.records] == ["a reason"]


def test_what_is_not_kept_is_told_with_what_to_do() -> None:
    assert not_kept("measurements", OSError("no space")).reason == (
        "measurements cannot be kept (OSError: no space): set AUTOSTREAM_CACHE_DIR to a folder that can"
    )
