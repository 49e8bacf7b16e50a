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


def test_the_same_result_gives_the_same_files(tmp_path: Path) -> None:
    for name in "ab":
        drawn(FULL, tmp_path / name)
    for first in (tmp_path / "a").iterdir():
        assert first.read_bytes() == (tmp_path / "b" / first.name).read_bytes()
        assert "<dc:date>" not in first.read_text(encoding="utf-8")


def test_a_bar_for_each_ratio_of_a_mode_and_a_name_for_each_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bars = Spy(monkeypatch, "barh")
    drawn(FULL, tmp_path)
    assert bars.calls == [([0.0, 1.0, 2.0], [2.0, 3.0, 0.5], "autostream")], "a mode without any ratio has no colour"
    said = words(tmp_path / "quick-workloads.svg")
    assert {"alpha ×8", "alpha", "beta", "autostream", "times the speed of cuda_graph"} <= said
    assert not {"gamma", "delta", "eager"} & said, "rows without the baseline are left out"


def test_bars_of_a_row_stand_beside_one_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bars = Spy(monkeypatch, "barh")
    timed = {mode: cell(3.0, 3.0) for mode in ("cuda_graph", "one", "two")}
    drawn(result(row("a", **timed), row("b", **timed)), tmp_path)
    assert [(places, label) for places, _, label in bars.calls] == [([-0.2, 0.8], "one"), ([0.2, 1.2], "two")]


def test_either_time_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bars = Spy(monkeypatch, "barh")
    lines = Spy(monkeypatch, "plot")
    slow = cells(6.0)
    slow["autostream"]["device_us"] = [12.0, 12.0, 12.0]
    drawn(result(row("a", **slow), row("a", 8, **slow)), tmp_path, "device")
    assert bars.calls == [([0.0, 1.0], [0.5, 0.5], "autostream")]
    assert lines.calls == [([1, 8], [0.5, 0.5], "a")]


def test_rows_are_those_that_have_the_time_that_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mode without it leaves a gap; a baseline without it leaves the row out."""
    bars = Spy(monkeypatch, "barh")
    host = {"device_us": []}
    rows = [
        row("none", cuda_graph=cell(4.0, 4.0) | host, autostream=cell(2.0, 2.0)),
        row("gap", cuda_graph=cell(4.0, 4.0), autostream=cell(2.0, 2.0) | host, eager=cell(8.0, 8.0)),
        row("both", cuda_graph=cell(4.0, 4.0), autostream=cell(2.0, 2.0), eager=cell(8.0, 8.0)),
    ]
    drawn(result(*rows), tmp_path, "device")
    assert [(median, label) for _, median, label in bars.calls] == [([0.5, 0.5], "eager"), ([2.0], "autostream")]
    assert bars.calls[1][0] == [pytest.approx(1.2)], "in the place of its row"
    said = words(tmp_path / "quick-workloads.svg")
    assert {"gap", "both"} <= said
    assert "none" not in said


def test_the_first_row_is_on_top_and_times_are_on_scales_that_fit_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turned, across, up = (Spy(monkeypatch, name) for name in ("invert_yaxis", "set_xscale", "set_yscale"))
    drawn(FULL, tmp_path)
    assert len(turned.calls) == 1
    assert (across.calls, up.calls) == ([([*"log"], None)] * 2, [([*"log"], None)])


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


@pytest.mark.parametrize(
    ("rows", "names"),
    [
        ([], []),
        ([row("a", failure="no")], []),
        ([row("a", cuda_graph=cell(1.0, 2.0))], []),
        ([row("a", cuda_graph=cell(1.0, 2.0), autostream=failed() | {"schedule": {"predicted_us": 1.0}})], []),
        ([row("a", cuda_graph=failed(), autostream=cell(1.0, 2.0, schedule={"predicted_us": 1.0}))], ["predictions"]),
        ([row("a", **cells(6.0)), row("b", 8, **cells(6.0))], ["workloads"]),
        ([row("a", **cells(6.0)), row("a", 8, **cells(6.0))], ["workloads", "batches"]),
    ],
)
def test_what_has_no_data_is_not_drawn(tmp_path: Path, rows: list[dict[str, Any]], names: list[str]) -> None:
    assert drawn(result(*rows), tmp_path) == [f"quick-{name}.svg" for name in names]
