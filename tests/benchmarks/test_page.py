"""What is measured of a page: that it is of this page, and whole."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from autostream.reporting.page.assemble import render
from benchmarks import page
from tests.reporting.reports import REPORT


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no browser: chromium is not installed")
def test_a_page_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("playwright")
    (tmp_path / "net.html").write_text(render(REPORT), encoding="utf-8")
    assert page.main([str(tmp_path / "net.html"), "--frames", "3", "--out", str(tmp_path / "out")]) == 0
    (row,) = json.loads((tmp_path / "out" / "page.json").read_text())["rows"]
    assert (row["page"], row["ops"], row["bytes"]) == ("net", 5, (tmp_path / "net.html").stat().st_size)
    assert all(row[name] > 0 for name in row if name not in ("page", "ops", "bytes"))
    assert capsys.readouterr().out == (tmp_path / "out" / "page.md").read_text()


def test_ten_thousand_ops_are_a_target() -> None:
    model, _ = page.chains()
    assert model.joints * (8 * 16 + 7) >= 10_000
    tree, (x,) = page.tree()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        tree(x)
    products = [event.count for event in profile.key_averages() if event.key == "aten::mul"]
    assert sum(products) == sum(3**level for level in range(1, 9))
