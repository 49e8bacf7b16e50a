"""What each stage made of a graph; expectations follow from the drawing in reports.py."""

from __future__ import annotations

from dataclasses import replace

from autostream.ir import Dependency, Hazard
from autostream.reporting.report import Report
from autostream.reporting.stages import render
from tests.reporting.reports import CHOSEN, DIAMOND, REPORT, TWO_STREAMS


def sections(report: Report = REPORT) -> dict[str, list[list[str]]]:
    """By title, the words of each line below."""
    parts = [part.splitlines() for part in render(report, "def traced(): ...", "def lowered(): ...").split("\n\n")]
    return {title: [line.split() for line in lines] for title, *lines in parts}


def test_ops_come_with_what_they_must_come_after() -> None:
    rows = sections()["After analyze: 5 ops of 5 nodes, and what each must come after"][2:]
    assert [row[0] for row in rows] == [*"abcde"]
    assert rows[-1][-2:] == ["c,", "d"]


def test_hazards_other_than_reads_of_what_was_written_are_named() -> None:
    overwritten = Dependency("b", "d", Hazard.WAR, "a")
    graph = replace(DIAMOND, dependencies=(*DIAMOND.dependencies, overwritten))
    rows = sections(replace(REPORT, graph=graph))["After analyze: 5 ops of 5 nodes, and what each must come after"][2:]
    assert rows[3][-3:] == ["a,", "b", "(WAR)"]


def test_launches_come_with_their_waits_and_what_they_let_go_of() -> None:
    title = "After assign and synchronize: 2 streams (critical_path), 2 waits, in the order of launches"
    assert sections()[title][2:] == [["0", "a"], ["0", "b"], ["1", "a", "d"], ["0", "c", "b"], ["0", "d", "e"]]
    ending = replace(CHOSEN, schedule=replace(TWO_STREAMS, join_waits=("d",)))
    (rows,) = (rows for head, rows in sections(replace(REPORT, chosen=ending)).items() if "3 waits" in head)
    assert rows[-1] == ["0", "d", "<join>"]
