"""Plots: drawn where there is data, the same file for the same result."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from matplotlib.axes import Axes

from autostream.cli.changes import Measure
from benchmarks import plot
from tests.benchmarks.results import cell, failed, result, row


def cells(us: float, **schedule: Any) -> dict[str, Any]:
    return {
        "cuda_graph": cell(12.0, 12.0, 12.0),
        "autostream": cell(us, us, us, schedule={"mode": "streams", **schedule}),
        "eager": failed(),
    }


FULL = result(
    row("alpha", 8, **cells(6.0, predicted_us=2.5)),
    row("alpha", **cells(4.0, predicted_us=2.0)),
    row("beta", **cells(24.0)),
    row("gamma", failure="RuntimeError: no"),
    row("delta", cuda_graph=failed(), autostream=cell(1.0, 1.0)),
)


def drawn(found: dict[str, Any], folder: Path, measure: Measure = "call") -> list[str]:
    paths = plot.plots(found, "cuda_graph", measure, folder)
    assert sorted(paths) == sorted(folder.iterdir())
    return [path.name for path in paths]


def words(path: Path) -> set[str]:
    """The texts in a plot, which Matplotlib leaves in comments beside their outlines."""
    return {text.strip() for text in re.findall(r"<!--(.*?)-->", path.read_text(encoding="utf-8"))}


class Spy:
    """Notes what is drawn by one of the methods of axes, and draws it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.calls: list[tuple[Any, ...]] = []
        method = getattr(Axes, name)

        def noted(axes: Axes, *args: Any, **options: Any) -> Any:
            self.calls.append((*([*arg] for arg in args if not isinstance(arg, float)), options.get("label")))
            return method(axes, *args, **options)

        monkeypatch.setattr(Axes, name, noted)


def test_three_plots_are_drawn(tmp_path: Path) -> None:
    assert drawn(FULL, tmp_path / "new" / "plots") == [
        "quick-workloads.svg",
        "quick-batches.svg",
        "quick-predictions.svg",
    ]
    for path in (tmp_path / "new" / "plots").iterdir():
        assert ElementTree.parse(path).getroot().tag == "{http://www.w3.org/2000/svg}svg"


def test_a_bar_for_each_ratio_of_a_mode_and_a_name_for_each_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bars = Spy(monkeypatch, "barh")
    drawn(FULL, tmp_path)
    assert bars.calls == [([0.0, 1.0, 2.0], [2.0, 3.0, 0.5], "autostream")], "a mode without any ratio has no colour"
    said = words(tmp_path / "quick-workloads.svg")
    assert {"alpha ×8", "alpha", "beta", "autostream", "times the speed of cuda_graph"} <= said
    assert not {"gamma", "delta", "eager"} & said, "rows without the baseline are left out"


def test_a_line_for_each_workload_with_several_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = Spy(monkeypatch, "plot")
    drawn(result(*(row for row in FULL["rows"] if row["workload"] != "delta")), tmp_path)
    assert lines.calls[0] == ([1, 8], [3.0, 2.0], "alpha"), "by batch size, whatever the order of rows"
    assert "beta" not in words(tmp_path / "quick-batches.svg")


def test_predictions_are_drawn_against_device_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = Spy(monkeypatch, "scatter")
    drawn(FULL, tmp_path)
    assert points.calls == [([2.5, 2.0], [3.0, 2.0], None)]
    assert {"predicted µs", "measured device µs"} <= words(tmp_path / "quick-predictions.svg")
