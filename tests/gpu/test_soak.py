"""The soak, for a quarter of a minute; ``python -m tests.soak`` has it for longer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.soak import main

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),  # as errors, Inductor's own would make it fall back
]


def test_a_quarter_of_a_minute(tmp_path: Path) -> None:
    models = ["learners", "cells", "towers8", "deepfm"]
    out = tmp_path / "soak.json"
    code = main(["--minutes", "0.25", "--seed", "0", "--out", str(out), "--models", *models])
    summary = json.loads(out.read_text())
    assert code == 0, summary["failures"]
    assert summary["calls"] > 0
