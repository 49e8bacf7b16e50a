"""Conclusions beside measurements: what backs which, and that what is wrong is said to be."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autostream.ir import Candidate
from autostream.reporting.report import Report
from benchmarks import explain as generator
from benchmarks.explain import claims, with_section
from tests.reporting.reports import CHOSEN, GRAPHED, REPORT

LARGER = replace(REPORT, candidates=(replace(GRAPHED, measured_us=63.0),))
UNFUSED = replace(REPORT, candidates=(replace(GRAPHED, measured_us=42.0),))


def test_each_conclusion_stands_beside_a_measurement() -> None:
    """18 µs of work on half of the bandwidth, 12 of it in line."""
    assert claims(replace(REPORT, level="inductor"), LARGER, UNFUSED) == [
        ("it takes 13.0 µs", "14.0 µs: the prediction is -7% off", "holds"),
        ("streams give at most 1.50×: 4 ops are in line, each of which needs the one before", "1.50× over 2", "holds"),
        (
            "one after the other, the ops keep 50% of the device busy: 8 times the work fits in 4.0×",
            "batch 8 takes 3.0× the time of batch 1",
            "holds",
        ),
        ("5 kernels, fused, instead of 5", "on one stream 21.0 µs instead of 42.0 µs", "holds"),
    ]


def chosen(candidate: Candidate, *others: Candidate) -> Report:
    return replace(REPORT, chosen=candidate, candidates=(candidate, *others))


@pytest.mark.parametrize(
    ("report", "larger", "at"),
    [
        (chosen(replace(CHOSEN, measured_us=16.0), GRAPHED), LARGER, 0),
        (chosen(CHOSEN, replace(GRAPHED, measured_us=30.0)), LARGER, 1),
        (REPORT, replace(LARGER, candidates=(replace(GRAPHED, measured_us=200.0),)), 2),
    ],
)
def test_what_is_wrong_is_said_to_be(report: Report, larger: Report, at: int) -> None:
    assert [verdict for _, _, verdict in claims(report, larger, UNFUSED)][at] == "**does not hold**"


def test_a_section_is_made_where_there_is_no_gpu_too() -> None:
    text = generator.section("mm_small")
    assert text.startswith("## mm_small\n\n```text\nmodel ")
    assert "| what it says" in text
    assert with_section("", "net", text).count(text) == 1
