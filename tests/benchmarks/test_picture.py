"""A picture of traces; what is drawn follows from the drawing in tests/reporting/reports.py."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

from autostream.reporting.report import Report
from autostream.reporting.timeline import render
from benchmarks import picture
from tests.reporting.reports import REPORT


def run(report: Report) -> picture.Run:
    return picture.run_of(json.loads(render(report)))


def test_a_run_has_a_lane_for_each_stream() -> None:
    found = run(REPORT)
    assert found.title == "Net, 1x8:float16 on cuda:0, eval, no gradients, NVIDIA H200"
    assert (found.source, found.end_us) == ("predicted", 13.0)
    assert [[(start, took) for start, took, _ in lane] for lane in found.lanes] == [
        [(0.0, 2.0), (2.5, 4.0), (6.5, 4.0), (11.0, 2.0)],
        [(3.0, 6.0)],
    ]


def test_traces_become_one_picture_and_the_same_ones_the_same(tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text(render(REPORT))
    drawn = []
    for name in ("one.svg", "two.svg"):
        assert picture.main([*[str(tmp_path / "trace.json")] * 2, "--out", str(tmp_path / name)]) == 0
        drawn.append((tmp_path / name).read_bytes())
    assert drawn[0] == drawn[1]
    texts = [text.text for text in ElementTree.fromstring(drawn[0]).iter("{http://www.w3.org/2000/svg}text")]
    assert texts.count("2 streams: 13 µs predicted") == 2
