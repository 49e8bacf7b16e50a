"""Stamps: of this repository and of what is installed here."""

from __future__ import annotations

import os
import subprocess
from importlib import metadata
from pathlib import Path

import pytest
import torch

from benchmarks.stamp import LIBRARIES, _cpu, stamp


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


def test_the_commit_may_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOSTREAM_COMMIT", "told")
    assert stamp()["commit"] == "told"


def test_libraries_that_are_installed_have_their_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    found = stamp()
    assert found["networkx"] == metadata.version("networkx")
    installed = {package.metadata["Name"] for package in metadata.distributions()}
    assert {name for name in LIBRARIES if name in found} == {*LIBRARIES} & installed


def test_the_cpu_is_told() -> None:
    found = stamp()
    assert found["cpu"]
    assert (found["cpus"], found["threads"]) == (os.cpu_count(), torch.get_num_threads())


def test_without_a_model_the_cpu_is_its_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda path: "processor : 0\nmodel name :\n")
    monkeypatch.setattr("platform.machine", lambda: "arm")
    assert _cpu() == "arm"
