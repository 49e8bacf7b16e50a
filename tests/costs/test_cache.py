"""The cache: what is saved is loaded, by whomever and whatever happens meanwhile; what cannot be kept stops nobody."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest
from filelock import FileLock
from hypothesis import given
from hypothesis import strategies as st

from autostream import store as keeping
from autostream.costs import cache
from autostream.costs.cache import load, path_of, read, save
from autostream.costs.device import profile_named
from autostream.costs.records import Context, Measurements, Record, to_json
from autostream.errors import CostError

H200 = Context("NVIDIA H200", 132, {"torch": "2.13.0"})
RELU: Record = {"duration_us": 2.5, "sm_share": 0.5}
ADD: Record = {"duration_us": 3.5}


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache, in a process that has warned of nothing yet."""
    folder = tmp_path / "costs"
    monkeypatch.setenv("AUTOSTREAM_CACHE_DIR", str(folder))
    keeping._warn_once.cache_clear()
    return folder


def of(context: Context = H200, /, **records: Record) -> Measurements:
    return Measurements(context, records=records)


def test_at_first_there_is_nothing_and_nothing_wrong(folder: Path) -> None:
    assert load(H200) == (of(), ())
    assert not folder.exists()


def test_what_is_saved_is_loaded() -> None:
    kept = Measurements(H200, profile_named("h200"), {"relu": RELU, "view": {}})
    assert save(kept) == ()
    assert load(H200) == (kept, ())


def test_saving_adds_and_the_new_one_stays() -> None:
    save(Measurements(H200, profile_named("h200"), {"relu": RELU, "add": RELU}))
    save(of(mul=RELU, add=ADD))
    kept, _ = load(H200)
    assert kept == Measurements(H200, profile_named("h200"), {"relu": RELU, "mul": RELU, "add": ADD})
    newer = replace(profile_named("h200"), replay_us=2.0)
    save(Measurements(H200, newer))
    assert load(H200) == (replace(kept, profile=newer), ())


@given(st.lists(st.dictionaries(st.sampled_from("abcd"), st.sampled_from([RELU, ADD]), max_size=3), max_size=5))
def test_what_is_loaded_is_the_newest_of_all_that_was_saved(saved: list[dict[str, Record]]) -> None:
    newest: dict[str, Record] = {}
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTOSTREAM_CACHE_DIR", folder)
        for some in saved:
            newest |= some
            assert save(of(**some)) == ()
        assert load(H200) == (of(**newest), ())


@pytest.mark.parametrize(
    "other",
    [
        replace(H200, device="NVIDIA H100"),
        replace(H200, multiprocessors=60),
        replace(H200, versions={"torch": "2.11.0"}),
        replace(H200, versions={**H200.versions, "driver": "570.86.15"}),
    ],
)
def test_another_device_or_version_has_a_file_of_its_own(other: Context) -> None:
    save(of(relu=RELU))
    save(of(other, relu=ADD))
    assert load(H200) == (of(relu=RELU), ())
    assert load(other) == (of(other, relu=ADD), ())


def test_files_of_another_schema_are_let_be(monkeypatch: pytest.MonkeyPatch) -> None:
    save(of(relu=RELU))
    with monkeypatch.context() as later:
        later.setattr(cache, "SCHEMA", 2)
        assert load(H200) == (of(), ())
    assert load(H200) == (of(relu=RELU), ())


def test_the_file_tells_whose_it_is(folder: Path) -> None:
    save(of(relu=RELU))
    assert path_of(H200).parent == folder
    assert path_of(H200).name.startswith("nvidia-h200-")
    assert json.loads(path_of(H200).read_text())["device"] == "NVIDIA H200"


def test_of_too_many_the_oldest_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_MOST_RECORDS", 2)
    save(of(relu=RELU))
    save(of(add=ADD))
    save(of(relu=RELU))
    save(of(mul=RELU))
    assert load(H200)[0] == of(relu=RELU, mul=RELU)


# Several writers


def _save_each(folder: Path, names: list[str], start: Barrier) -> None:
    os.environ["AUTOSTREAM_CACHE_DIR"] = str(folder)
    keeping._PATIENCE_S = 600.0  # a machine may be slow
    start.wait()
    for name in names:
        assert save(of(**{name: RELU})) == ()


def test_processes_that_write_at_the_same_time_lose_nothing(folder: Path) -> None:
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(3, timeout=300)
    names = [[f"op{process}.{at}" for at in range(10)] for process in range(2)]
    writers = [context.Process(target=_save_each, args=(folder, some, start)) for some in names]
    for writer in writers:
        writer.start()
    start.wait()
    # Whoever reads meanwhile reads something whole.
    while any(writer.is_alive() for writer in writers):
        assert load(H200)[1] == ()
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert set(load(H200)[0].records) == {name for some in names for name in some}


def _die_before_replacing(folder: Path) -> None:
    os.environ["AUTOSTREAM_CACHE_DIR"] = str(folder)
    os.replace = lambda source, target: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment,misc]
    save(of(add=ADD))


def _die_while_writing(folder: Path) -> None:
    os.environ["AUTOSTREAM_CACHE_DIR"] = str(folder)

    def write_half(path: Path, text: str) -> None:
        with path.open("w") as file:
            file.write(text[: len(text) // 2])
        os.kill(os.getpid(), signal.SIGKILL)

    Path.write_text = write_half  # type: ignore[method-assign,assignment]
    save(of(add=ADD))


@pytest.mark.parametrize("die", [_die_while_writing, _die_before_replacing])
def test_a_process_that_is_killed_leaves_what_was_there(folder: Path, die: Callable[[Path], None]) -> None:
    save(of(relu=RELU))
    process = multiprocessing.get_context("spawn").Process(target=die, args=(folder,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert load(H200) == (of(relu=RELU), ())
    assert save(of(mul=RELU)) == (), "its lock went with it"
    assert load(H200) == (of(relu=RELU, mul=RELU), ())
    assert {path.suffix for path in folder.iterdir()} <= {".json", ".lock"}


# Damage


SOUND = to_json(of(relu=RELU))
DAMAGED = {
    "empty": "",
    "truncated": SOUND[:-20],
    "not JSON": "duration_us = 2.5",
    "not text": "\0\x80",
    "a list": "[]",
    "of another schema": SOUND.replace('"schema": 1', '"schema": 99'),
    "of wrong types": SOUND.replace("132", '"132"'),
    "of another device": SOUND.replace("NVIDIA H200", "Tesla T4"),
    "of another version": SOUND.replace("2.13.0", "2.11.0"),
}


@pytest.mark.parametrize("text", DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_file_is_reported_once_and_rebuilt(text: str, caplog: pytest.LogCaptureFixture) -> None:
    save(of(relu=RELU))
    path_of(H200).write_bytes(text.encode("latin-1"))
    with caplog.at_level(logging.WARNING):
        kept, (decision,) = load(H200)
    assert kept == of()
    assert decision.choice == "cache rebuilt"
    assert decision.reason.startswith(f"{path_of(H200)} was damaged (it ")
    assert decision.reason.endswith("); what it has lost is measured again")
    assert decision.reason.count("measure again") == 0, "it is done, and need not be asked for"
    assert [record.getMessage() for record in caplog.records] == [decision.reason]
    assert load(H200) == (of(), ())
    assert save(of(add=ADD)) == ()
    assert load(H200) == (of(add=ADD), ())


def test_a_damaged_file_that_is_written_before_it_is_read_is_reported_too(folder: Path) -> None:
    folder.mkdir()
    path_of(H200).write_text(SOUND[:-20])
    assert [decision.choice for decision in save(of(add=ADD))] == ["cache rebuilt"]
    assert load(H200) == (of(add=ADD), ())


def test_of_damaged_records_the_sound_ones_stay() -> None:
    save(of(relu=RELU, add=ADD, mul=ADD))
    path_of(H200).write_text(path_of(H200).read_text().replace("3.5", "NaN"))
    kept, (decision,) = load(H200)
    assert kept == of(relu=RELU)
    assert "(record add: duration_us=nan is not allowed: use a number from 0 to 1e+30, and 1 more)" in decision.reason
    assert load(H200) == (of(relu=RELU), ())


# Places that cannot be written


def _a_file_is_in_the_way(folder: Path) -> None:
    folder.write_text("")


def _it_is_read_only(folder: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    folder.mkdir(exist_ok=True)
    folder.chmod(0o500)


def _the_disk_is_full(folder: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full")
    folder.mkdir(exist_ok=True)
    path_of(H200).with_suffix(".new").symlink_to("/dev/full")


def _a_folder_has_its_name(folder: Path) -> None:
    path_of(H200).mkdir(parents=True, exist_ok=True)


OBSTACLES = [_a_file_is_in_the_way, _it_is_read_only, _the_disk_is_full, _a_folder_has_its_name]


@pytest.mark.parametrize("obstruct", OBSTACLES)
def test_what_cannot_be_saved_is_reported_and_stops_nobody(
    folder: Path, obstruct: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    obstruct(folder)
    assert load(H200)[0] == of()
    caplog.clear()
    keeping._warn_once.cache_clear()
    (first,) = save(of(relu=RELU))
    obstruct(folder)
    assert first.choice == "not cached"
    assert first.reason.startswith("measurements cannot be kept (")
    assert first.reason.endswith("): set AUTOSTREAM_CACHE_DIR to a folder that can")
    assert save(of(relu=RELU)) == (first,), "every report tells"
    assert [record.getMessage() for record in caplog.records] == [first.reason], "the log tells once"
    assert load(H200)[0] == of()


@pytest.mark.parametrize("obstruct", [_a_file_is_in_the_way, _a_folder_has_its_name, _it_is_read_only])
def test_a_place_that_cannot_be_used_is_told_of_in_one_way(folder: Path, obstruct: Callable[[Path], None]) -> None:
    obstruct(folder)
    assert {*load(H200)[1], *save(of(relu=RELU))} == {*save(of(relu=RELU))}, "whether it is read or written"


def test_a_damaged_file_that_cannot_be_rebuilt_is_reported_with_the_reason(folder: Path) -> None:
    folder.mkdir()
    path_of(H200).write_text(SOUND[:-20])
    _the_disk_is_full(folder)
    kept, decisions = load(H200)
    assert kept == of()
    assert [decision.choice for decision in decisions] == ["cache rebuilt", "not cached"]


def test_a_lock_that_somebody_keeps_is_not_waited_for_forever(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(of(relu=RELU))
    monkeypatch.setattr(keeping, "_PATIENCE_S", 0.0)
    with FileLock(f"{path_of(H200)}.lock"):
        (decision,) = save(of(add=ADD))
        assert decision.choice == "not cached"
        assert load(H200) == (of(relu=RELU), ()), "readers need no lock"
    assert save(of(add=ADD)) == ()


def test_without_a_home_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AUTOSTREAM_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    (unread,), (unsaved,) = load(H200)[1], save(of(relu=RELU))
    assert unread == unsaved
    assert "there is no home directory" in unread.reason


# Files that somebody hands over


def test_a_file_of_the_cache_can_be_handed_over(tmp_path: Path) -> None:
    kept = Measurements(H200, profile_named("h200"), {"relu": RELU})
    save(kept)
    mine = path_of(H200).rename(tmp_path / "my-h200.json")
    assert read(mine, H200) == read(mine) == kept


@pytest.mark.parametrize(
    ("here", "named"),
    [
        (replace(H200, device="Tesla T4", multiprocessors=40), ["NVIDIA H200 (132 ", "Tesla T4 (40 "]),
        (replace(H200, versions={"torch": "2.11.0"}), ["torch 2.13.0)", "torch 2.11.0)"]),
    ],
)
def test_a_file_of_another_device_or_version_is_refused_with_both_named(
    tmp_path: Path, here: Context, named: list[str]
) -> None:
    mine = tmp_path / "my-h200.json"
    mine.write_text(SOUND)
    with pytest.raises(CostError, match=r"my-h200.json was .*, and this is .*: measure again here$") as caught:
        read(mine, here)
    assert all(name in str(caught.value) for name in named)


@pytest.mark.parametrize("text", [SOUND[:-20], SOUND.replace("2.5", "NaN"), SOUND.replace("2.5", "-2.5")])
def test_a_damaged_file_is_refused_and_let_be(tmp_path: Path, text: str) -> None:
    mine = tmp_path / "my-h200.json"
    mine.write_text(text)
    with pytest.raises(CostError, match=r"my-h200.json(:| is) "):
        read(mine)
    assert mine.read_text() == text


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CostError, match=r"my-h200.json cannot be read \(FileNotFoundError: .*\): name a file"):
        read(tmp_path / "my-h200.json")
