"""The loops see all batches, and the table says what they mean."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import prefetching
from benchmarks.prefetching import WAYS, loops, main, table


def test_every_way_works_on_every_batch() -> None:
    batches = [torch.full((3,), float(number)) for number in range(4)]
    calls = loops(batches, 2, torch.device("cpu"), torch.ones(2, 2), products=1)
    seen = {name: call().item() for name, call in calls.items()}
    assert seen == {"copy": 3.0, "work": 0.0} | dict.fromkeys(WAYS[2:], 6.0)


def test_the_table_has_the_gain_and_the_share_of_what_is_possible() -> None:
    row = {"mib": 1, "copy_us": 40.0, "work_us": 48.0, "synchronous_us": 100.0, "non_blocking_us": 90.0}
    gain, share = (
        table([{**row, "prefetch_us": 50.0, "graph_us": 49.0, "graph_into_us": 48.5}])
        .splitlines()[-1]
        .split("|")[-3:-1]
    )
    assert (gain.strip(), share.strip()) == ("2.00×", "0.96")


def test_the_command_writes_and_prints_its_rows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def row(mib: int, *_: object) -> dict[str, float]:
        return {"mib": mib, **{f"{name}_us": float(mib) for name in WAYS}}

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(prefetching, "stamp", dict)
    monkeypatch.setattr(prefetching, "row", row)
    assert main(["--mib", "1", "8", "--out", str(tmp_path)]) == 0
    saved = json.loads((tmp_path / "prefetching.json").read_text())
    assert [row["mib"] for row in saved["rows"]] == [1, 8]
    assert (tmp_path / "prefetching.md").read_text() == capsys.readouterr().out
