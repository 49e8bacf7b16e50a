"""Measured costs on disk: which measurements a context's file has, and files that a user names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from autostream import store as stores
from autostream.costs import cache
from autostream.costs.cache import load, read, save
from autostream.costs.device import profile_named
from autostream.costs.records import Context, Measurements, Record, to_json
from autostream.errors import CostError

H200 = Context("NVIDIA H200", 132, {"torch": "2.13.0"})
RELU: Record = {"duration_us": 2.5, "sm_share": 0.5}
ADD: Record = {"duration_us": 3.5}


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache, in a process that has logged no warning yet."""
    monkeypatch.setenv("AUTOSTREAM_CACHE_DIR", str(tmp_path / "cache"))
    stores._warn_once.cache_clear()
    return tmp_path / "cache" / "costs"


def of(context: Context = H200, /, **records: Record) -> Measurements:
    return Measurements(context, records=records)


def test_saving_adds_to_what_was_saved_and_the_newest_counts() -> None:
    assert load(H200) == (of(), ())
    assert save(Measurements(H200, profile_named("h200"), {"relu": RELU, "add": RELU, "view": {}})) == ()
    assert save(of(mul=RELU, add=ADD)) == ()
    expected = Measurements(H200, profile_named("h200"), {"relu": RELU, "view": {}, "mul": RELU, "add": ADD})
    assert load(H200) == (expected, ())
    newer = replace(profile_named("h200"), replay_us=2.0)
    save(Measurements(H200, newer))
    assert load(H200) == (replace(expected, profile=newer), ())


@pytest.mark.parametrize(
    "other",
    [
        replace(H200, device="NVIDIA H100"),
        replace(H200, multiprocessors=60),
        replace(H200, versions={**H200.versions, "driver": "570.86.15"}),
    ],
)
def test_another_device_or_version_has_another_file(other: Context) -> None:
    save(of(relu=RELU))
    save(of(other, relu=ADD))
    assert load(H200) == (of(relu=RELU), ())
    assert load(other) == (of(other, relu=ADD), ())


def test_the_oldest_of_too_many_records_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_MOST_RECORDS", 2)
    for name, record in (("relu", RELU), ("add", ADD), ("relu", RELU), ("mul", RELU)):
        save(of(**{name: record}))
    assert load(H200)[0] == of(relu=RELU, mul=RELU)


DAMAGE: dict[str, Callable[[str], str]] = {
    "truncated": lambda text: text[:-20],
    "a number changed": lambda text: text.replace("3.5", "4.5"),
    "of another device": lambda text: stores._with_checksum(to_json(of(replace(H200, device="Tesla T4")))),
    "of a number that is none": lambda text: stores._with_checksum(to_json(of(add=ADD)).replace("3.5", "NaN")),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_file_is_reported_once_and_measured_again(folder: Path, damage: Callable[[str], str]) -> None:
    save(of(relu=RELU, add=ADD))
    (path,) = folder.rglob("*.json")
    path.write_text(damage(path.read_text()))
    measurements, (note,) = load(H200)
    assert measurements == of()
    assert note.choice == "cache rebuilt"
    assert note.reason.startswith(f"{path} cannot be used (")
    assert note.reason.endswith("; its ops are measured again")
    assert load(H200) == (of(), ())
    assert save(of(add=ADD)) == ()
    assert load(H200) == (of(add=ADD), ())


def test_measurements_that_cannot_be_kept_are_reported(folder: Path) -> None:
    folder.parent.write_text("in the way")
    assert load(H200) == (of(), ())
    (note,) = save(of(relu=RELU))
    assert note.choice == "not cached"
    assert note.reason.startswith("measurements cannot be kept (")


# Files that a user names


def test_a_file_of_the_cache_can_be_copied_and_named(folder: Path, tmp_path: Path) -> None:
    measurements = Measurements(H200, profile_named("h200"), {"relu": RELU})
    save(measurements)
    (path,) = folder.rglob("*.json")
    copy = path.rename(tmp_path / "my-h200.json")
    assert read(copy, H200) == read(copy) == measurements


@pytest.mark.parametrize("damage", [lambda text: text[:-20], lambda text: text.replace("2.5", "NaN")])
def test_a_damaged_file_is_refused_and_stays(tmp_path: Path, damage: Callable[[str], str]) -> None:
    path = tmp_path / "my-h200.json"
    path.write_text(text := damage(to_json(of(relu=RELU))))
    with pytest.raises(CostError, match=r"my-h200.json(:| is) "):
        read(path)
    assert path.read_text() == text


def test_a_file_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CostError, match=r"my-h200.json cannot be read \(FileNotFoundError: .*\): name a file"):
        read(tmp_path / "my-h200.json")
