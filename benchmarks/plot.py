"""Plots of a result, as SVG files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autostream.cli.changes import Measure, ratio, spread
from benchmarks.harness.table import title
from benchmarks.result import Result


def plots(result: Result, baseline: str, measure: Measure, folder: Path) -> list[Path]:
    """Plot ratio by workload, ratio by batch size, and predicted against measured time, where there is data.

    Returns:
        the files written.
    """
    from matplotlib import rc_context

    folder.mkdir(parents=True, exist_ok=True)
    drawn = (
        _by_workload(result["rows"], baseline, measure),
        _by_batch(result["rows"], baseline, measure),
        _predictions(result["rows"]),
    )
    paths = []
    for name, figure in zip(("workloads", "batches", "predictions"), drawn, strict=True):
        if figure is not None:
            paths.append(folder / f"{result['suite']}-{name}.svg")
            with rc_context({"svg.hashsalt": "autostream"}):  # the same result gives the same file, ids included
                figure.savefig(paths[-1], bbox_inches="tight", metadata={"Date": None})
    return paths


def _by_workload(rows: Sequence[Any], baseline: str, measure: Measure) -> Any:
    rows = [row for row in rows if row["cells"].get(baseline, {}).get(f"{measure}_us")]
    bars: dict[str, list[tuple[int, float]]] = {}
    for at, row in enumerate(rows):
        for mode in row["cells"]:
            if mode != baseline and (found := ratio(row["cells"], mode, baseline, measure)):
                bars.setdefault(mode, []).append((at, found.median))
    if not bars:
        return None
    figure, axes = _figure(width=7, height=1 + 0.16 * len(rows) * len(bars))
    height = 0.8 / len(bars)
    for place, (mode, points) in enumerate(bars.items()):
        offset = (place - (len(bars) - 1) / 2) * height
        axes.barh([at + offset for at, _ in points], [median for _, median in points], height, label=mode)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [title(row) for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel(f"times the speed of {baseline}")
    axes.legend(fontsize="small")
    return figure


def _by_batch(rows: Sequence[Any], baseline: str, measure: Measure) -> Any:
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        if found := ratio(row["cells"], "autostream", baseline, measure):
            lines.setdefault(row["workload"], []).append((row["batch"], found.median))
    lines = {name: sorted(points) for name, points in lines.items() if len(points) > 1}
    if not lines:
        return None
    figure, axes = _figure(width=6, height=4)
    for name, points in lines.items():
        axes.plot(*zip(*points, strict=True), marker="o", label=name)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("batch size")
    axes.set_ylabel(f"autostream, times the speed of {baseline}")
    axes.legend(fontsize="small")
    return figure


def _predictions(rows: Sequence[Any]) -> Any:
    points = [
        (cell["schedule"]["predicted_us"], spread(cell["device_us"]).median)
        for row in rows
        for cell in row["cells"].values()
        if cell.get("device_us") and "predicted_us" in cell.get("schedule", {})
    ]
    if not points:
        return None
    figure, axes = _figure(width=5, height=5)
    ends = [min(min(point) for point in points), max(max(point) for point in points)]
    axes.plot(ends, ends, color="black", linewidth=0.8)
    axes.scatter(*zip(*points, strict=True))
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("predicted µs")
    axes.set_ylabel("measured device µs")
    return figure


def _figure(width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    return figure, figure.add_subplot()
