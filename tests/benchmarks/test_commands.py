"""Commands that measure rows of one kind: these are kept as JSON, with a stamp, and as a table, which is printed."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from benchmarks import partial_graphs, prefetching, startup

TIMES = {"captured_share": 1.0, "eager_us": 1.0, "autostream_us": 1.0}


@pytest.mark.parametrize(
    ("module", "argv", "row", "saved"),
    [
        (partial_graphs, [], lambda name: {"between": name, **TIMES}, [*partial_graphs.MODELS]),
        (
            prefetching,
            ["--mib", "1", "8"],
            lambda mib, *_: {"mib": mib, **{f"{name}_us": float(mib) for name in prefetching.VARIANTS}},
            [1, 8],
        ),
        (
            startup,
            ["googlenet"],
            lambda name, warm: {"workload": name, **{mode: {"cold_s": 2.0, "warm_s": 1.0} for mode in startup.MODES}},
            ["googlenet"],
        ),
    ],
    ids=lambda value: value.__name__.split(".")[1] if isinstance(value, ModuleType) else "",
)
def test_rows_are_kept_and_printed(
    module: ModuleType,
    argv: list[str],
    row: Any,
    saved: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(module, "stamp", lambda: {"commit": "a"})
    monkeypatch.setattr(module, "row", row)
    assert module.main([*argv, "--out", str(tmp_path)]) == 0
    (name,) = {path.stem for path in tmp_path.iterdir()}
    result = json.loads((tmp_path / f"{name}.json").read_text())
    assert ([next(iter(row.values())) for row in result["rows"]], result["stamp"]) == (saved, {"commit": "a"})
    assert (tmp_path / f"{name}.md").read_text() in capsys.readouterr().out


def test_every_way_to_prefetch_works_on_every_batch() -> None:
    batches = [torch.full((3,), float(number)) for number in range(4)]
    calls = prefetching.loops(batches, 2, torch.device("cpu"), torch.ones(2, 2), products=1)
    seen = {name: call().item() for name, call in calls.items()}
    assert seen == {"copy": 3.0, "work": 0.0} | dict.fromkeys(prefetching.VARIANTS[2:], 6.0)
