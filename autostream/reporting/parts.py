"""Of a model that runs in parts: where they run, how long they take, and how much of that lies in CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autostream.reporting.report import Report


def devices(piece: Report) -> tuple[str, ...]:
    """Where the ops of a piece run, but for the host."""
    ops = piece.graph.ops.values() if piece.graph else ()
    return tuple(sorted({op.device for op in ops} - {"cpu"}))


def time_us(piece: Report) -> float | None:
    """What one run of a piece takes, µs: measured where it was, else predicted; ``None`` where it runs as it is."""
    if piece.chosen is None:
        return None
    return piece.chosen.predicted_us if piece.chosen.measured_us is None else piece.chosen.measured_us


def captured_share(report: Report) -> float | None:
    """The share of its pieces' time that lies in CUDA graphs; ``None`` where none that runs on a GPU is timed.

    Each piece counts once, however often it runs; one that has parts of its own, as these. What runs between pieces at
    graph breaks is not timed.

    Example:
        >>> from autostream.ir import Candidate, OpGraph, Schedule
        >>> from autostream.reporting.report import Report
        >>> graph, one = OpGraph({}, (), {}, (), "cuda:0"), Schedule("sequential", 1, ())
        >>> chosen = (Candidate(one, True, predicted_us=30.0), Candidate(one, False, predicted_us=10.0))
        >>> parts = tuple(Report("Net", "8:float32 on cuda:0", "", graph=graph, chosen=each) for each in chosen)
        >>> captured_share(Report("Net", "8:float32 on cuda:0", "graph breaks", parts=parts))
        0.75
    """
    pieces = (piece for part in report.parts for piece in _innermost(part))
    on_gpu = [piece for piece in pieces if piece.graph is not None and piece.graph.device != "cpu"]
    timed = [(piece.chosen.captured, time_us(piece) or 0.0) for piece in on_gpu if piece.chosen is not None]
    total_us = sum(took for _, took in timed)
    return sum(took for captured, took in timed if captured) / total_us if total_us else None


def _innermost(report: Report) -> Iterator[Report]:
    if not report.parts:
        yield report
    for part in report.parts:
        yield from _innermost(part)
