"""The loops see all batches, and the table says what they mean."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import prefetching
from benchmarks.prefetching import VARIANTS, loops, main


def test_every_way_works_on_every_batch() -> None:
    batches = [torch.full((3,), float(number)) for number in range(4)]
    calls = loops(batches, 2, torch.device("cpu"), torch.ones(2, 2), products=1)
    seen = {name: call().item() for name, call in calls.items()}
    assert seen == {"copy": 3.0, "work": 0.0} | dict.fromkeys(VARIANTS[2:], 6.0)


def test_the_command_writes_and_prints_its_rows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def row(mib: int, *_: object) -> dict[str, float]:
        return {"mib": mib, **{f"{name}_us": float(mib) for name in VARIANTS}}

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(prefetching, "stamp", dict)
    monkeypatch.setattr(prefetching, "row", row)
    assert main(["--mib", "1", "8", "--out", str(tmp_path)]) == 0
    saved = json.loads((tmp_path / "prefetching.json").read_text())
    assert [row["mib"] for row in saved["rows"]] == [1, 8]
    assert (tmp_path / "prefetching.md").read_text() == capsys.readouterr().out
