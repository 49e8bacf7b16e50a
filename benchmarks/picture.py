"""Draws trace files of ``autostream trace`` below each other on one time axis, with a lane for each stream.

autostream trace googlenet --input 1x3x224x224:float16 --device h200 --policy sequential --out one.json
autostream trace googlenet --input 1x3x224x224:float16 --device h200 --out streams.json
python -m benchmarks.picture one.json streams.json --out docs/pictures/googlenet.svg

A measured run is drawn if there is one, else the predicted one; the picture is labelled accordingly.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_HEAVY = ("conv", "addmm", "mm.", "linear", "bmm", "matmul", "attention")
"""Substrings of the targets of convolutions and matrix products."""

_COLOURS = {"convolutions and products": "#2f6fb0", "all else": "#e0913a"}


@dataclass(frozen=True, slots=True)
class Run:
    """One timeline of a file.

    Attributes:
        title: model, signature and device.
        source: ``"measured"`` or ``"predicted"``.
        lanes: slices of each stream as (start, duration, whether it is a convolution or matrix product), µs.
    """

    title: str
    source: str
    lanes: tuple[tuple[tuple[float, float, bool], ...], ...]

    @property
    def end_us(self) -> float:
        """When the last op ends."""
        return max((start + took for lane in self.lanes for start, took, _ in lane), default=0.0)


def main(argv: Sequence[str] | None = None) -> int:
    """Draw, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.picture", description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE.json")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.svg")
    options = parser.parse_args(argv)
    draw([run_of(json.loads(path.read_text())) for path in options.traces], options.out)
    return 0


def run_of(trace: dict[str, Any]) -> Run:
    """The run of a trace file: the measured one, if there is one.

    Example:
        >>> op = {"ph": "X", "cat": "op", "pid": 1, "tid": 1, "ts": 1.0, "dur": 2.0, "args": {"target": "aten.mm.out"}}
        >>> about = {"model": "Net", "signature": "1x8:float16", "device": "GPU"}
        >>> run_of({"otherData": about, "traceEvents": [op]})
        Run(title='Net, 1x8:float16, GPU', source='predicted', lanes=(((1.0, 2.0, True),),))
    """
    ops = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["cat"] == "op"]
    shown = max((event["pid"] for event in ops), default=1)
    ops = [event for event in ops if event["pid"] == shown]
    lanes = [
        tuple((event["ts"], event["dur"], _heavy(event)) for event in ops if event["tid"] == lane)
        for lane in sorted({event["tid"] for event in ops})
    ]
    about = trace["otherData"]
    title = f"{about['model']}, {about['signature']}, {about['device']}"
    return Run(title, ("predicted", "measured")[shown - 1], tuple(lanes))


def _heavy(event: dict[str, Any]) -> bool:
    target = event["args"]["target"]
    return "triton" not in target and any(name in target for name in _HEAVY)


def draw(runs: Sequence[Run], out: Path) -> None:
    """Write the picture; equal runs give equal files."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    heights = [len(run.lanes) for run in runs]
    with rc_context({"svg.hashsalt": "autostream", "svg.fonttype": "none", "font.family": "sans-serif"}):
        figure = Figure(figsize=(9, 0.9 + 0.75 * len(runs) + 0.28 * sum(heights)), layout="constrained")
        panels = figure.subplots(len(runs), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
        for axes, run in zip(panels, runs, strict=True):
            for lane, slices in enumerate(run.lanes):
                colours = [[*_COLOURS.values()][not heavy] for _, _, heavy in slices]
                axes.broken_barh([(start, took) for start, took, _ in slices], (lane - 0.4, 0.8), facecolors=colours)
            streams = "1 stream" if len(run.lanes) == 1 else f"{len(run.lanes)} streams"
            axes.set_title(f"{streams}: {run.end_us:,.0f} µs {run.source}", loc="left", fontsize="medium")
            axes.set_yticks(range(len(run.lanes)), [f"stream {lane}" for lane in range(len(run.lanes))])
            axes.set_ylim(len(run.lanes) - 0.5, -0.5)
            axes.spines[["top", "right"]].set_visible(False)
        panels[-1].set_xlim(left=0)
        panels[-1].set_xlabel("µs")
        figure.suptitle(runs[0].title, fontsize="medium")
        patches = [Patch(color=colour, label=kind) for kind, colour in _COLOURS.items()]
        figure.legend(handles=patches, loc="outside lower right", fontsize="small", ncols=2, frameon=False)
        figure.savefig(out, metadata={"Date": None})


if __name__ == "__main__":
    raise SystemExit(main())
