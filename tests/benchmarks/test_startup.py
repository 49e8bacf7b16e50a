"""Time to the first result: what is timed, in which caches, and what is said of it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks import startup
from benchmarks.startup import MODES, main, row


def test_the_first_round_finds_empty_caches_and_the_others_those_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, list[str]]] = []

    def run(command: list[str], env: dict[str, str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        caches = Path(env["TORCHINDUCTOR_CACHE_DIR"]).parent
        assert Path(env["TRITON_CACHE_DIR"]).parent == caches
        assert env["PATH"] == os.environ["PATH"]
        seen.append((str(caches), os.listdir(caches)))
        (caches / f"round {len(seen)}").touch()
        return subprocess.CompletedProcess(command, 0, b"loading\n%d\n" % len(seen))

    monkeypatch.setattr(subprocess, "run", run)
    measured = row("towers8", warm=3)
    assert measured == {
        "workload": "towers8",
        MODES[0]: {"cold_s": 1.0, "warm_s": 3.0},
        MODES[1]: {"cold_s": 5.0, "warm_s": 7.0},
    }
    assert [files for _, files in seen[::4]] == [[], []]
    assert sorted(seen[3][1]) == ["round 1", "round 2", "round 3"]
    assert seen[0][0] == seen[3][0] != seen[4][0]


def test_results_are_saved_with_their_stamp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = {mode: {"cold_s": 2.0, "warm_s": 1.0} for mode in MODES}
    monkeypatch.setattr(startup, "row", lambda workload, warm: {"workload": workload, **cells})
    assert main(["googlenet", "--out", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "startup.json").read_text())
    assert [row["workload"] for row in result["rows"]] == ["googlenet"]
    assert result["stamp"]["commit"]
    assert "1.00×" in (tmp_path / "startup.md").read_text()
