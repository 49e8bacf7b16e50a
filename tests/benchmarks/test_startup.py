"""Time to the first result: what is timed, in which caches, and what is said of it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.startup import MODES, row, table


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
    assert [cell.strip() for cell in table([measured]).splitlines()[2].split("|")[4:8:3]] == ["5.00×", "2.33×"]
    assert [files for _, files in seen[::4]] == [[], []]
    assert sorted(seen[3][1]) == ["round 1", "round 2", "round 3"]
    assert seen[0][0] == seen[3][0] != seen[4][0]
