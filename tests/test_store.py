"""The cache folder: files with keys, written by several processes, damaged, or impossible to write."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
from collections.abc import Callable
from functools import partial
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from hypothesis import given
from hypothesis import strategies as st

from autostream import store as stores
from autostream.store import Store, code_in, key_of

STORE = Store("things", "some things", "they are made again", most=3)

contents = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A cache folder that does not exist yet, in a process that has logged no warning yet."""
    monkeypatch.setenv("AUTOSTREAM_CACHE_DIR", str(tmp_path / "cache"))
    stores._warn_once.cache_clear()
    return tmp_path / "cache"


def write(name: str, **content: Any) -> list[str]:
    return [note.reason for note in STORE.write(name, partial(json.dumps, content))]


def read(name: str) -> tuple[Any, list[str]]:
    content, notes = STORE.read(name, json.loads)
    return content, [note.reason for note in notes]


# Keys


@given(contents, contents)
def test_equal_contents_have_one_key_and_others_have_others(one: object, other: object) -> None:
    # As text, since 1, 1.0 and True are equal to Python, but not to an op.
    assert (key_of(one) == key_of(other)) == (repr(_sorted(one)) == repr(_sorted(other)))


def _sorted(content: object) -> object:
    if isinstance(content, dict):
        return {name: _sorted(content[name]) for name in sorted(content)}
    return [_sorted(inner) for inner in content] if isinstance(content, list) else content


def test_a_key_depends_on_values_and_not_on_containers_and_objects_have_none() -> None:
    assert key_of("relu", (8, 3), {"a": 1, "b": 2}) == key_of("relu", [8, 3], {"b": 2, "a": 1})
    with pytest.raises(TypeError):
        key_of("relu", object())


def test_the_digest_of_code_changes_with_python_files_only(tmp_path: Path) -> None:
    def digest() -> str:
        code_in.cache_clear()
        return code_in(tmp_path)

    (tmp_path / "below").mkdir()
    digests = [digest()]
    for path, text in (("a.py", "1"), ("below/b.py", "1"), ("below/b.py", "2")):
        (tmp_path / path).write_text(text)
        digests.append(digest())
    assert len(set(digests)) == 4
    (tmp_path / "notes.txt").write_text("no code")
    assert digest() == digests[-1]


# Reading and writing


def test_a_file_is_read_as_it_was_written_and_can_be_replaced(cache: Path) -> None:
    assert read("a") == (None, [])
    assert not cache.exists(), "reading makes no folder"
    for age in (1, 2):
        assert write("a", age=age, text="é\n") == []
        assert read("a") == ({"age": age, "text": "é\n"}, [])
    assert STORE.path("a") == cache / "things" / "a.json"
    assert json.loads(STORE.path("a").read_text())["age"] == 2, "the file is JSON"


def test_the_oldest_of_too_many_files_are_deleted() -> None:
    for age in range(5):
        write(str(age), age=age)
        os.utime(STORE.path(str(age)), (age, age))
    assert [age for age in range(5) if STORE.path(str(age)).exists()] == [2, 3, 4]


def _add_each(cache: Path, numbers: list[int], start: Barrier) -> None:
    os.environ["AUTOSTREAM_CACHE_DIR"] = str(cache)
    stores._PATIENCE_S = 600.0  # a machine may be slow
    start.wait()
    for number in numbers:
        assert STORE.write("a", lambda number=number: json.dumps({"a": [*read("a")[0]["a"], number]})) == ()  # type: ignore[misc]


def test_processes_that_add_to_one_file_at_the_same_time_lose_nothing(cache: Path) -> None:
    write("a", a=[])
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(3, timeout=300)
    numbers = [list(range(10)), list(range(10, 20))]
    writers = [context.Process(target=_add_each, args=(cache, some, start)) for some in numbers]
    for writer in writers:
        writer.start()
    start.wait()
    while any(writer.is_alive() for writer in writers):
        content, notes = read("a")
        assert content is not None, "a reader sees whole files only"
        assert notes == []
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert sorted(read("a")[0]["a"]) == list(range(20))


def _die_before_replacing(cache: Path) -> None:
    os.environ["AUTOSTREAM_CACHE_DIR"] = str(cache)
    os.replace = lambda source, target: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment,misc]
    write("a", age=2)


def _die_while_writing(cache: Path) -> None:
    os.environ["AUTOSTREAM_CACHE_DIR"] = str(cache)

    def write_half(path: Path, text: str) -> None:
        with path.open("w") as file:
            file.write(text[: len(text) // 2])
        os.kill(os.getpid(), signal.SIGKILL)

    Path.write_text = write_half  # type: ignore[method-assign,assignment]
    write("a", age=2)


@pytest.mark.parametrize("die", [_die_while_writing, _die_before_replacing])
def test_a_process_that_is_killed_leaves_the_old_file_and_no_lock(cache: Path, die: Callable[[Path], None]) -> None:
    write("a", age=1)
    process = multiprocessing.get_context("spawn").Process(target=die, args=(cache,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert read("a") == ({"age": 1}, [])
    assert write("a", age=3) == []
    assert read("a") == ({"age": 3}, [])
    assert [path.name for path in (cache / "things").iterdir()] == ["a.json"]


# Damage


DAMAGE: dict[str, Callable[[str], str]] = {
    "empty": lambda text: "",
    "truncated": lambda text: text[:-5],
    "not text": lambda text: "\0\x80",
    "deep": lambda text: "[" * 100_000,
    "without a checksum": lambda text: '{"age": 1}',
    "changed": lambda text: text.replace('"age": 1', '"age": 2'),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_file_is_reported_once_and_made_anew(
    damage: Callable[[str], str], caplog: pytest.LogCaptureFixture
) -> None:
    write("a", age=1)
    STORE.path("a").write_bytes(damage(STORE.path("a").read_text()).encode("latin-1"))
    with caplog.at_level(logging.WARNING):
        content, (reason,) = read("a")
    assert content is None
    assert reason.startswith(f"{STORE.path('a')} cannot be used (")
    assert reason.endswith("); they are made again")
    assert [record.getMessage() for record in caplog.records] == [f"autostream: {reason}"]
    assert read("a") == (None, [])
    assert write("a", age=1) == []
    assert read("a") == ({"age": 1}, [])


def test_content_that_cannot_be_parsed_is_damage_too() -> None:
    write("a", age=1)
    (note,) = STORE.read("a", lambda text: json.loads(text)["name"])[1]
    assert note.choice == "cache rebuilt"
    assert "(KeyError: 'name')" in note.reason


# Folders that cannot be written


def _a_file_is_in_the_way(cache: Path) -> None:
    cache.write_text("")


def _the_folder_is_read_only(cache: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    cache.mkdir(exist_ok=True)
    cache.chmod(0o500)


def _the_disk_is_full(cache: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full")
    STORE.path("a").parent.mkdir(parents=True, exist_ok=True)
    STORE.path("a").with_suffix(".new").symlink_to("/dev/full")


def _a_folder_has_its_name(cache: Path) -> None:
    STORE.path("a").mkdir(parents=True, exist_ok=True)


@pytest.mark.parametrize(
    "obstruct", [_a_file_is_in_the_way, _the_folder_is_read_only, _the_disk_is_full, _a_folder_has_its_name]
)
def test_a_file_that_cannot_be_written_is_reported_each_time_and_logged_once(
    cache: Path, obstruct: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    reasons = []
    for _ in range(2):
        obstruct(cache)
        assert read("a") == (None, [])
        reasons += write("a", age=1)
    assert len(reasons) == 2
    assert reasons[0].startswith("some things cannot be kept (")
    assert reasons[0].endswith("): set AUTOSTREAM_CACHE_DIR to a folder that can")
    logged = [record.getMessage().removeprefix("autostream: ") for record in caplog.records]
    assert logged == reasons[:1] == reasons[1:]


def test_a_file_that_cannot_be_replaced_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    write("a", age=1)
    with monkeypatch.context() as full:
        full.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("the disk is full")))
        assert "the disk is full" in write("a", age=2)[0]
    assert read("a") == ({"age": 1}, [])


def test_a_lock_that_another_process_keeps_is_not_waited_for_forever(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("a", age=1)
    monkeypatch.setattr(stores, "_PATIENCE_S", 0.0)
    with FileLock(cache / "things.lock"):
        assert "cannot be kept (Timeout: " in write("a", age=2)[0]
        assert read("a") == ({"age": 1}, []), "readers need no lock"
    assert write("a", age=2) == []


def test_without_a_home_directory_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AUTOSTREAM_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    assert read("a") == (None, [])
    assert "there is no home directory" in write("a", age=1)[0]
