"""Devices and times of the parts of a model, and the share of the time that is captured in CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autostream.reporting.report import Report


def devices(part: Report) -> tuple[str, ...]:
    """The devices of a part's ops, without the CPU."""
    ops = part.graph.ops.values() if part.graph else ()
    return tuple(sorted({op.device for op in ops} - {"cpu"}))


def time_us(part: Report) -> float | None:
    """Time of one run of a part, µs: measured if it was, else predicted; ``None`` where it has no schedule."""
    if part.chosen is None:
        return None
    return part.chosen.predicted_us if part.chosen.measured_us is None else part.chosen.measured_us


def captured_share(report: Report) -> float | None:
    """The share of the parts' time that is captured in CUDA graphs; ``None`` where no part on a GPU is timed.

    Each part counts once, however often it runs, and nested parts in place of the part that contains them. Python code
    between parts is not timed.

    Example:
        >>> from autostream.ir import Candidate, OpGraph, Schedule
        >>> from autostream.reporting.report import Report
        >>> graph, one = OpGraph({}, (), {}, (), "cuda:0"), Schedule("sequential", 1, ())
        >>> chosen = (Candidate(one, True, predicted_us=30.0), Candidate(one, False, predicted_us=10.0))
        >>> parts = tuple(Report("Net", "8:float32 on cuda:0", "", graph=graph, chosen=each) for each in chosen)
        >>> captured_share(Report("Net", "8:float32 on cuda:0", "graph breaks", parts=parts))
        0.75
    """
    parts = (inner for part in report.parts for inner in _innermost(part))
    on_gpu = [part for part in parts if part.graph is not None and part.graph.device != "cpu"]
    timed = [(part.chosen.captured, time_us(part) or 0.0) for part in on_gpu if part.chosen is not None]
    total_us = sum(us for _, us in timed)
    return sum(us for captured, us in timed if captured) / total_us if total_us else None


def _innermost(report: Report) -> Iterator[Report]:
    if not report.parts:
        yield report
    for part in report.parts:
        yield from _innermost(part)
