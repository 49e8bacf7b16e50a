"""What is known of the parts of a model that was split."""

from __future__ import annotations

from dataclasses import replace

from autostream.ir import Candidate, Op, OpGraph, Schedule
from autostream.reporting.parts import captured_share, devices
from autostream.reporting.report import Report

GRAPH = OpGraph({}, (), {}, (), "cuda:0")
CAPTURED = Candidate(Schedule("sequential", 1, ()), captured=True, predicted_us=5.0, measured_us=40.0)
PIECE = Report("GraphModule", "s", "cuda graph", graph=GRAPH, chosen=CAPTURED)


def whole(*parts: Report) -> Report:
    return Report("Net", "s", "graph breaks", parts=parts)


def test_a_piece_runs_where_its_ops_do_beside_the_host() -> None:
    places = ("cuda:1", "cpu", "cuda:0", "cuda:1")
    ops = [Op(f"n{at}", "f", (), frozenset(), frozenset(), device=each) for at, each in enumerate(places)]
    assert devices(replace(PIECE, graph=replace(GRAPH, ops={op.name: op for op in ops}))) == ("cuda:0", "cuda:1")
    assert devices(Report("GraphModule", "s", "plain")) == ()


def test_the_share_is_of_time_and_of_gpus_alone() -> None:
    uncaptured = replace(PIECE, chosen=replace(CAPTURED, captured=False, measured_us=10.0))
    on_cpu = replace(uncaptured, graph=replace(GRAPH, device="cpu"))
    assert captured_share(whole(PIECE, uncaptured, on_cpu, Report("GraphModule", "s", "plain"))) == 0.8
    assert captured_share(whole(uncaptured)) == 0.0
    assert captured_share(whole(on_cpu)) is None
    assert captured_share(PIECE) is None


def test_parts_of_parts_count_as_these_do() -> None:
    uncaptured = replace(PIECE, chosen=replace(CAPTURED, captured=False, measured_us=10.0))
    assert captured_share(whole(whole(PIECE, uncaptured), PIECE)) == 80 / 90
