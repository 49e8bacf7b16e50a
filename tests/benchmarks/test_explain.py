"""Conclusions beside measurements: what backs which, and that what is wrong is said to be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autostream.ir import Candidate
from autostream.reporting.report import Report
from benchmarks import explain as generator
from benchmarks.explain import by_streams, claims, main, with_section
from tests.reporting.reports import CHOSEN, GRAPHED, ONE_STREAM, PLAIN, REPORT, UNCAPTURED

LARGER = replace(REPORT, candidates=(replace(GRAPHED, measured_us=63.0),))
UNFUSED = replace(REPORT, candidates=(replace(GRAPHED, measured_us=42.0),))


def test_the_best_time_of_each_number_of_streams_counts() -> None:
    slower = replace(CHOSEN, measured_us=15.0)
    report = replace(REPORT, candidates=(UNCAPTURED, CHOSEN, slower, GRAPHED, replace(CHOSEN, measured_us=None)))
    assert by_streams(report) == {1: 21.0, 2: 14.0}
    assert by_streams(PLAIN) == {}


def test_each_conclusion_stands_beside_a_measurement() -> None:
    """18 µs of work on half of the bandwidth, 12 of it in line."""
    assert claims(replace(REPORT, level="inductor"), LARGER, UNFUSED) == [
        ("it takes 13.0 µs", "14.0 µs: the prediction is -7% off", "holds"),
        (
            "streams give at most 1.50×: 4 ops are in line, each of which needs the one before",
            "1.50× over 2",
            "holds",
        ),
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
    assert [verdict for _, _, verdict in claims(report, larger, UNFUSED)][at] == "**does not compare_modes**"


def test_without_measurements_nothing_is_claimed() -> None:
    assert claims(PLAIN, PLAIN, PLAIN) == []
    alone = Candidate(ONE_STREAM, captured=True, predicted_us=19.5)
    assert claims(chosen(alone), chosen(alone), chosen(alone)) == []


def test_sections_are_replaced_and_others_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "explain.md"
    monkeypatch.setattr(generator, "section", lambda name: f"first {name}")
    assert main(["towers8", "bert_base", "--out", str(out)]) == 0
    monkeypatch.setattr(generator, "section", lambda name: f"second {name}")
    assert main(["towers8", "--out", str(out)]) == 0
    text = out.read_text()
    assert text.startswith("# What explain says of six models\n")
    assert [line for line in text.splitlines() if line.startswith(("first", "second"))] == [
        "second towers8",
        "first bert_base",
    ]


def test_all_six_are_there_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generator, "section", lambda name: name)
    main(["--out", str(tmp_path / "explain.md")])
    assert (tmp_path / "explain.md").read_text().count(":begin -->") == 6


def test_unknown_workloads_are_refused_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["towers9", "--out", str(tmp_path / "explain.md")])
    assert "towers9: use googlenet, " in capsys.readouterr().err


def test_a_section_is_made_where_there_is_no_gpu_too() -> None:
    text = generator.section("mm_small")
    assert text.startswith("## mm_small\n\n```text\nmodel ")
    assert "| what it says" in text
    assert with_section("", "net", text).count(text) == 1
