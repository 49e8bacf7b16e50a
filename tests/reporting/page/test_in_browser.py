"""The page in a real browser, as its readers use it: with a mouse, with keys, on a phone, in the dark.

Expectations follow from the drawing in reports.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autostream.reporting.page.assemble import render
from autostream.reporting.report import Report
from tests.reporting.page.browser import Visit, browser
from tests.reporting.reports import DIAMOND, PLAIN, REPORT, SPLIT, with_source

HOSTILE = "<img src=x onerror=alert(1)></script><script>alert(2)</script>"
VIEWS = ["summary", "timeline", "memory", "graph", "ops", "candidates", "environment"]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as running:
        yield running


@pytest.fixture
def visit(chromium: Any) -> Iterator[Visit]:
    context = chromium.new_context(viewport={"width": 1280, "height": 900})
    yield Visit(context.new_page())
    context.close()


@pytest.fixture
def shown(visit: Visit, tmp_path: Path) -> Visit:
    """The page of the report made by hand."""
    visit.open(render(REPORT), tmp_path / "report.html")
    return visit


def test_every_view_is_there_and_nothing_is_complained_of_or_asked_for(shown: Visit) -> None:
    assert [link.inner_text().lower() for link in shown.page.locator("nav a").all()] == VIEWS
    assert all(shown.page.locator(f"section#{view}").is_visible() for view in VIEWS)
    assert shown.text("#model") == "Net"
    assert shown.text("#headline") == "1.50× the speed of sequential in a CUDA graph, measured"
    assert all(shown.drawn(canvas) > 5 for canvas in ("#lanes", "#used", "#drawing"))
    assert "chain of data" in shown.text("#reasons")
    assert shown.text("#compared tr.chosen").split("\t")[:2] == ["critical_path", "2"]
    assert "NVIDIA H200" in shown.text("#device")
    assert shown.complaints == []
    assert len(shown.asked_for) == 1, "the page itself"


def test_hostile_names_are_text(visit: Visit, tmp_path: Path) -> None:
    graph = with_source(DIAMOND, "a", HOSTILE)
    visit.open(render(replace(REPORT, model=HOSTILE, graph=graph, versions={HOSTILE: HOSTILE})), tmp_path / "page.html")
    assert visit.text("#model") == HOSTILE
    assert visit.column(11)[0] == HOSTILE
    visit.page.locator("#rows tbody tr:not(.spacer)").first.click()
    assert HOSTILE in visit.text("#details")
    visit.page.locator("#lanes").hover(position={"x": 200, "y": 55})
    assert visit.page.locator("img, body script:not([type]):not(:last-child)").count() == 0
    assert visit.complaints == []


def test_pieces_are_told_of_and_each_is_looked_at_by_itself(visit: Visit, tmp_path: Path) -> None:
    """14 of 21 µs are the first part's, and captured; the second runs as it is, for an unknown time."""
    visit.open(render(SPLIT), tmp_path / "split.html")
    assert "67 % of the time of its parts" in visit.text("#facts")
    assert [row.inner_text().split("\t") for row in visit.page.locator("#parts tbody tr").all()] == [
        ["0", 'a print (net.py:9: print("here"))', "a CUDA graph", "5", "14.0", "13.0", " 67 %"],
        [
            "1",
            "a branch depends on the value of a tensor (net.py:11: if x.any():)",
            "the plain model: forward branches on the value of a tensor (net.py:7)",
            *[""] * 4,
        ],
        ["2", "the model returns", "one op after another, uncaptured", "5", "7.0", "26.0", " 33 %"],
    ]
    visit.page.get_by_role("link", name="2", exact=True).press("Enter")
    assert visit.text("#model") == "Net, part 2"
    assert visit.drawn("#lanes") > 5
    assert visit.column(1)[-1] == "4"
    beside = visit.page.get_by_role("navigation", name="Parts")
    assert beside.get_by_role("link").all_inner_texts() == ["All of Net", "Part 1"]
    beside.get_by_role("link", name="Part 1").click()
    assert "a branch depends on the value of a tensor" in visit.text("#facts")
    assert not visit.page.locator("#lanes").is_visible()
    beside.get_by_role("link", name="All of Net").click()
    assert visit.text("#model") == "Net"
    assert not beside.is_visible()
    assert visit.complaints == []


def test_all_can_be_reached_and_done_with_keys(shown: Visit) -> None:
    reached = set()
    for _ in range(60):
        shown.page.keyboard.press("Tab")
        reached.add(shown.page.evaluate("document.activeElement.id"))
    assert {"lanes", "used", "drawing", "search", "filter", "stream", "critical", "rows"} <= reached
    shown.page.locator("#lanes").press("ArrowDown")
    shown.page.locator("#lanes").press("ArrowDown")
    assert shown.page.locator("#selected dd").first.inner_text() == "b", "the second to start"
    shown.page.locator("#rows").press("ArrowDown")
    assert shown.page.locator("#selected dd").first.inner_text() == "d", "the next row"
    shown.page.keyboard.press("Escape")
    assert not shown.page.locator("#details").is_visible()


@pytest.mark.parametrize("report", [REPORT, PLAIN, SPLIT])
def test_it_fits_a_phone(chromium: Any, tmp_path: Path, report: Report) -> None:
    context = chromium.new_context(viewport={"width": 360, "height": 700}, has_touch=True, is_mobile=True)
    visit = Visit(context.new_page())
    visit.open(render(report), tmp_path / "report.html")
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= 360
    assert visit.complaints == []
    context.close()
