"""A report made by hand, whose numbers are easy to check.

      ┌─ b 4 ── c 4 ─┐       18 µs of work, 12 of it in line (a, b, c, e): at most 1.5 times faster;
a 2 ──┤              ├─ e 2  d may start 2 µs late; every op fills a quarter of the multiprocessors
      └───── d 6 ────┘       and half of the bandwidth
"""

from __future__ import annotations

from dataclasses import replace

from autostream.ir import Candidate, Decision, Launch, OpGraph, Schedule, Slice, Timeline
from autostream.reporting.report import Report
from tests.scheduling.graphs import costs_of, graph_of, profile_with

DIAMOND = graph_of("a-b a-d b-c c-e d-e", names="abcde", outputs="e")
COSTS = costs_of(DIAMOND, {"a": 2.0, "b": 4.0, "c": 4.0, "d": 6.0, "e": 2.0}, sm_share=0.25, bandwidth_share=0.5)

TWO_STREAMS = Schedule(
    "critical_path",
    streams=2,
    launches=(
        Launch("a", 0),
        Launch("b", 0),
        Launch("d", 1, waits=("a",)),
        Launch("c", 0, releases=("b",)),
        Launch("e", 0, waits=("d",)),
    ),
    decisions=(Decision("d", "stream 1", "b keeps stream 0 busy"), Decision("", "2 streams", "the width is 2")),
)
ONE_STREAM = Schedule("sequential", streams=1, launches=tuple(Launch(name, 0) for name in "abcde"))

CHOSEN = Candidate(TWO_STREAMS, captured=True, predicted_us=13.0, measured_us=14.0, memory_bytes=4_500_000)
GRAPHED = Candidate(ONE_STREAM, captured=True, predicted_us=19.5, measured_us=21.0, memory_bytes=3_100_000)
UNCAPTURED = Candidate(ONE_STREAM, captured=False, predicted_us=26.0, measured_us=42.0)
REFUSED = replace(
    CHOSEN,
    schedule=replace(TWO_STREAMS, policy="path_cover"),
    predicted_us=13.5,
    measured_us=None,
    refusal="predicted to be no faster",
)

REPORT = Report(
    model="Net",
    signature="1x8:float16 on cuda:0, eval, no gradients",
    mode="cuda graph",
    level="aten",
    profile=profile_with(name="NVIDIA H200", multiprocessors=132, bandwidth=4.8e6),
    graph=DIAMOND,
    costs=COSTS,
    chosen=CHOSEN,
    timeline=Timeline(
        (
            Slice("a", 0, 0.0, 2.0),
            Slice("b", 0, 2.5, 6.5),
            Slice("d", 1, 3.0, 9.0),
            Slice("c", 0, 6.5, 10.5),
            Slice("e", 0, 11.0, 13.0),
        )
    ),
    candidates=(UNCAPTURED, GRAPHED, CHOSEN, REFUSED),
    refusals=(Decision("d", "not fused", "a hook watches it"),),
    seconds={"trace": 1.25, "schedule": 0.5},
    versions={"torch": "2.11.0"},
)

PLAIN = Report(
    model="Net",
    signature="1x8:float16 on cuda:0, eval, no gradients",
    mode="plain",
    refusals=(Decision("", "not traced", "forward branches on the value of a tensor (net.py:7)"),),
)

SPLIT = Report(
    model="Net",
    signature="1x8:float16 on cuda:0, eval, no gradients",
    mode="graph breaks",
    parts=(
        replace(REPORT, model="GraphModule", ended='a print (net.py:9: print("here"))'),
        replace(PLAIN, model="GraphModule", ended="a branch depends on the value of a tensor (net.py:11: if x.any():)"),
        replace(REPORT, model="GraphModule", chosen=replace(UNCAPTURED, measured_us=7.0), mode="one stream"),
    ),
)
"""Of 21 µs that its parts take, those of the first lie in a CUDA graph: 14."""


def with_source(graph: OpGraph, name: str, source: str) -> OpGraph:
    return replace(graph, ops={**graph.ops, name: replace(graph.ops[name], source=source)})
