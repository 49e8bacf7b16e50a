"""Time to the first result: what is timed, in which caches, and what is said of it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks import startup
from benchmarks.startup import MODES, first, main, row, table


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


def test_a_process_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 3, b""))
    with pytest.raises(
        SystemExit, match="towers8 in the mode compile_reduce_overhead failed: its process ended with 3"
    ):
        row("towers8", warm=0)


def test_the_clock_runs_while_the_mode_is_made_and_called(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[str] = []
    ticks = iter([10.0, 17.5])
    monkeypatch.setattr(startup.time, "perf_counter", lambda: (calls.append("clock"), next(ticks))[1])
    mode = lambda model, args: (calls.append("made"), lambda *args: calls.append("called"))[1]  # noqa: E731
    monkeypatch.setattr(startup, "modes_of", lambda device: {"mode": mode})
    first("mm_small", "mode")
    assert calls == ["clock", "made", *["called"] * startup.CALLS, "clock"]
    assert json.loads(capsys.readouterr().out) == 7.5


def test_ratios_are_ours_to_theirs() -> None:
    rows = [{"workload": "a", MODES[0]: {"cold_s": 8.0, "warm_s": 4.0}, MODES[1]: {"cold_s": 6.0, "warm_s": None}}]
    assert "0.75×" in table(rows)


def test_results_are_saved_with_their_stamp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = {mode: {"cold_s": 2.0, "warm_s": 1.0} for mode in MODES}
    monkeypatch.setattr(startup, "row", lambda workload, warm: {"workload": workload, **cells})
    assert main(["googlenet", "--out", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "startup.json").read_text())
    assert [row["workload"] for row in result["rows"]] == ["googlenet"]
    assert result["stamp"]["commit"]
    assert "1.00×" in (tmp_path / "startup.md").read_text()


def test_an_unknown_workload_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["gogglenet"])
    assert "gogglenet: use googlenet" in capsys.readouterr().err
