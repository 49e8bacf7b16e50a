"""The page of a pipeline, of two stages that share a device each: all that the text says, and every bar."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from xml.etree import ElementTree

from autostream.reporting.page.pipelines import render
from autostream.scheduling.microbatches import Comparison, action_of
from tests.reporting.test_pipelines import COMPARISON, run

SVG = re.compile(r"<svg .*?</svg>", re.DOTALL)


def drawings(comparison: Comparison) -> list[ElementTree.Element]:
    """The drawings of the page, which have to be well-formed XML."""
    return [ElementTree.fromstring(drawn) for drawn in SVG.findall(render(comparison))]


def test_a_bar_stands_for_each_action_in_the_lane_of_its_device() -> None:
    """GPipe of three microbatches: a forward takes 10 µs of 120, a backward 20."""
    gpipe, *_ = drawings(COMPARISON)
    bars = gpipe.findall("rect")
    slices = run("GPipe", 3).timeline.slices
    assert [bar.get("class") for bar in bars] == [action_of(piece.op).kind for piece in slices]
    tops = sorted({float(bar.get("y", "")) for bar in bars})
    assert [tops.index(float(bar.get("y", ""))) for bar in bars] == [piece.stream for piece in slices]
    forward, backward = (next(bar for bar in bars if bar.get("class") == kind) for kind in "FB")
    assert round(float(backward.get("width", "")) / float(forward.get("width", ""))) == 2
    assert forward.findtext("title") == "forward of microbatch 0, stage 0: 0.0 µs to 10.0 µs"
    assert [text.text for text in gpipe.findall("text")][:2] == ["device 0", "device 1"]


def test_bars_of_a_device_do_not_overlap_and_end_with_the_drawing() -> None:
    for drawing in drawings(COMPARISON):
        by_lane: dict[str, list[tuple[float, float]]] = {}
        for bar in drawing.findall("rect"):
            left, width, top = (float(bar.get(name, "")) for name in ("x", "width", "y"))
            by_lane.setdefault(str(top), []).append((left, left + width))
        for spans in by_lane.values():
            spans.sort()
            assert all(before[1] <= after[0] + 0.1 for before, after in pairwise(spans))
        *_, right, _ = map(float, drawing.get("viewBox", "").split())
        assert max(end for spans in by_lane.values() for _, end in spans) <= right


def test_runs_are_drawn_from_the_fastest_on_the_best_of_all_first() -> None:
    fast = replace(run("1F1B", 4), step_us=60.0)
    titles = re.findall(r"<h3>(.*?)</h3>", render(replace(COMPARISON, runs=(*COMPARISON.runs, fast))))
    assert [title.split(":")[0] for title in titles] == [
        "1F1B, 4 microbatches", "GPipe, 3 microbatches", "1F1B, 3 microbatches",
    ]  # fmt: skip


def test_what_the_text_says_is_there_and_names_are_no_markup() -> None:
    hostile = replace(
        COMPARISON, pipeline=replace(COMPARISON.pipeline, model="<b>Net</b>", submodules=(("<i>",), ("b",)))
    )
    page = render(hostile)
    assert "<b>" not in page
    assert "<i>" not in page
    for said in ("refused", "ZBVZeroBubble: no cut", "2 times GPU, joined by nvlink", "A step by 1F1B takes 120.0 µs"):
        assert said in page
    assert "<script" not in page
    assert " style=" not in page  # its policy would not allow it
