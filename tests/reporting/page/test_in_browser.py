"""The page in a real browser, as its readers use it: with a mouse, with keys, on a phone, in the dark.

Expectations follow from the drawing in reports.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from autostream.ir import Candidate, Timeline
from autostream.reporting.page.assemble import render
from autostream.reporting.report import Report
from autostream.scheduling.policies import POLICIES
from autostream.scheduling.simulate import simulate
from autostream.scheduling.synchronize import synchronize
from tests.reporting.page.browser import Visit, browser
from tests.reporting.reports import DIAMOND, PLAIN, REPORT, SPLIT, with_source
from tests.scheduling.graphs import costs_of, graph_of, profile_with

HOSTILE = "<img src=x onerror=alert(1)></script><script>alert(2)</script>"
VIEWS = ["summary", "timeline", "memory", "graph", "ops", "candidates", "environment"]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as running:
        yield running


@pytest.fixture
def visit(chromium: Any) -> Iterator[Visit]:
    """A new window of a desktop."""
    context = chromium.new_context(viewport={"width": 1280, "height": 900})
    yield Visit(context.new_page())
    context.close()


@pytest.fixture
def shown(visit: Visit, tmp_path: Path) -> Visit:
    """The page of the report made by hand."""
    visit.open(render(REPORT), tmp_path / "report.html")
    return visit


def wide_report(ops: int) -> Report:
    """Ops of two readers each, over four streams."""
    names = [f"op_{at}" for at in range(ops)]
    edges = [(names[at // 2], names[at]) for at in range(1, ops)]
    graph, profile = graph_of(edges, names=names), profile_with(same_stream_edge_us=0.5, cross_stream_edge_us=1.0)
    costs = costs_of(graph, {name: 1.0 + at % 7 for at, name in enumerate(names)}, sm_share=0.4)
    schedule = synchronize(graph, POLICIES["critical_path"](graph, costs, profile, 4, frozenset()))
    timeline = simulate(schedule, costs, profile)
    chosen = Candidate(schedule, captured=True, predicted_us=timeline.makespan_us)
    return replace(
        REPORT,
        graph=graph,
        costs=costs,
        profile=profile,
        chosen=chosen,
        candidates=(chosen,),
        timeline=timeline,
        refusals=(),
    )


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


def test_what_was_not_scheduled_has_a_summary_and_no_empty_views(visit: Visit, tmp_path: Path) -> None:
    visit.open(render(PLAIN), tmp_path / "plain.html")
    there = [view for view in VIEWS if visit.page.locator(f"section#{view}").is_visible()]
    assert there == ["summary", "environment"]
    assert "forward branches on the value of a tensor" in visit.text("#facts")
    assert visit.complaints == []


def test_pieces_are_told_of_and_each_is_looked_at_by_itself(visit: Visit, tmp_path: Path) -> None:
    """14 of 21 µs are the first piece's, and captured; the second runs as it is, and nobody knows how long."""
    visit.open(render(SPLIT), tmp_path / "split.html")
    assert "67 % of the time of its pieces" in visit.text("#facts")
    assert [row.inner_text().split("\t") for row in visit.page.locator("#pieces tbody tr").all()] == [
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
    assert visit.text("#model") == "Net, piece 2"
    assert visit.drawn("#lanes") > 5
    assert visit.column(1)[-1] == "4"
    beside = visit.page.get_by_role("navigation", name="Pieces")
    assert beside.get_by_role("link").all_inner_texts() == ["All of Net", "Piece 1"]
    beside.get_by_role("link", name="Piece 1").click()
    assert "a branch depends on the value of a tensor" in visit.text("#facts")
    assert not visit.page.locator("#lanes").is_visible()
    beside.get_by_role("link", name="All of Net").click()
    assert visit.text("#model") == "Net"
    assert not beside.is_visible()
    assert visit.complaints == []


def test_forward_and_backward_are_called_so(visit: Visit, tmp_path: Path) -> None:
    halves = (replace(REPORT, half="forward"), replace(PLAIN, half="backward"))
    visit.open(render(Report("Net", "8:float32", "forward and backward", parts=halves)), tmp_path / "halves.html")
    assert [row.inner_text().split("\t")[0] for row in visit.page.locator("#pieces tr").all()] == [
        "half",
        "forward",
        "backward",
    ]
    assert "ends because" not in visit.text("#pieces")
    visit.page.get_by_role("link", name="forward", exact=True).click()
    assert visit.text("#model") == "Net, forward"
    assert visit.page.get_by_role("navigation", name="Pieces").get_by_role("link").all_inner_texts() == [
        "All of Net",
        "backward",
    ]
    assert visit.complaints == []


@pytest.mark.parametrize(
    ("asked", "title"),
    [("0.2", "Net, piece 0.2"), ("0.9", "Net, piece 0"), ("map", "Net"), (HOSTILE, "Net")],
)
def test_of_a_piece_that_is_not_there_what_it_would_be_in_is_shown(
    visit: Visit, tmp_path: Path, asked: str, title: str
) -> None:
    (tmp_path / "nested.html").write_text(render(replace(SPLIT, parts=(SPLIT,))), encoding="utf-8")
    visit.page.goto(f"{(tmp_path / 'nested.html').as_uri()}?{urlencode({'piece': asked})}")
    assert visit.text("#model") == title
    assert visit.complaints == []


def test_why_pieces_end_is_text(visit: Visit, tmp_path: Path) -> None:
    visit.open(render(replace(SPLIT, model=HOSTILE, parts=(replace(PLAIN, ended=HOSTILE),))), tmp_path / "page.html")
    assert HOSTILE in visit.text("#pieces")
    visit.page.get_by_role("link", name="0", exact=True).click()
    assert HOSTILE in visit.text("#facts")
    assert visit.text("#beside") == f"All of {HOSTILE}"
    assert visit.complaints == []


def test_memory_in_use_and_memory_taken_are_told_apart(shown: Visit) -> None:
    """At most a, b, c and d are needed at once, 1 KiB each; 4.5 MB are planned, and cuBLAS has 32 MiB a stream."""
    said = shown.text("#counted")
    assert "4.1 kB at most as predicted." in said
    assert "what is taken for that, 4.5 MB, the memory in the summary" in said
    assert "those of cuBLAS are 67.1 MB at most" in said
    assert "4.5 MB at most" in shown.text("#facts")


def test_work_is_told_from_the_gaps_between(visit: Visit, tmp_path: Path) -> None:
    """op_0 1 µs ── op_1 2 µs ── op_2 3 µs, and half a µs from each to the next."""
    visit.open(render(wide_report(3)), tmp_path / "line.html")
    assert "6.0 µs, 6.0 µs of it on the critical path, 7.0 µs with its gaps" in visit.text("#facts")


def test_ops_are_sorted_by_any_column_both_ways(shown: Visit) -> None:
    assert "".join(shown.column(2)) == "abdce", "in launch order"
    cost = shown.page.get_by_role("button", name="cost µs")
    cost.click()
    assert shown.column(6) == ["2.0", "2.0", "4.0", "4.0", "6.0"]
    cost.click()
    assert "".join(shown.column(2)) == "dbcae", "of equal ones, the first to be launched goes first"
    assert shown.page.locator("#rows th[aria-sort=descending]").inner_text() == "cost µs"


def test_ops_are_filtered_by_text_stream_and_path(shown: Visit) -> None:
    shown.page.locator("#stream").select_option("1")
    assert shown.column(2) == ["d"]
    assert shown.text("#shown") == "1 of 5 ops"
    shown.page.locator("#stream").select_option("")
    shown.page.locator("#critical").check()
    assert "".join(shown.column(2)) == "abce"
    shown.page.locator("#filter").fill("no such op")
    assert shown.column(2) == []


def test_search_finds_ops_one_after_the_other(shown: Visit) -> None:
    search = shown.page.locator("#search")
    search.fill("RELU")
    assert shown.text("#matches") == "1 of 5"
    search.press("Enter")
    assert shown.text("#matches") == "2 of 5"
    assert shown.page.locator("#selected dd").first.inner_text() == "b"
    search.press("Shift+Enter")
    search.press("Shift+Enter")
    assert shown.text("#matches") == "5 of 5"
    search.fill("no such op")
    assert shown.text("#matches") == "nothing found"


def test_the_timeline_is_zoomed_and_moved_by_keys_and_buttons(shown: Visit) -> None:
    lanes = shown.page.locator("#lanes")
    whole = shown.text("#range")
    assert whole == "0.0 to 13.0 µs"
    lanes.focus()
    lanes.press("+")
    zoomed = shown.text("#range")
    lanes.press("ArrowRight")
    moved = shown.text("#range")
    assert len({whole, zoomed, moved}) == 3
    lanes.press("0")
    assert shown.text("#range") == whole
    tools = shown.page.get_by_role("group", name="Timeline tools")
    tools.get_by_role("button", name="Zoom in").click()
    assert shown.text("#range") != whole
    tools.get_by_role("button", name="Fit").click()
    assert shown.text("#range") == whole


@pytest.mark.parametrize("at_us", [3.3, 8.7])
def test_the_wheel_zooms_at_the_pointer(shown: Visit, at_us: float) -> None:
    """Near its start and near its end, at 3 and 9 of 13 µs, d stays under the pointer."""
    lanes = shown.page.locator("#lanes")
    width = lanes.bounding_box()["width"]
    lanes.hover(position={"x": 122 + (width - 122) * at_us / 13, "y": 79})
    assert shown.text("#tip").splitlines()[0] == "d"
    shown.page.keyboard.down("Control")
    shown.page.mouse.wheel(0, -300)
    shown.page.keyboard.up("Control")
    shown.page.wait_for_function("document.getElementById('range').textContent !== '0.0 to 13.0 µs'")
    shown.page.mouse.move(0, 0)
    lanes.hover(position={"x": 122 + (width - 122) * at_us / 13, "y": 79})
    assert shown.text("#tip").splitlines()[0] == "d"
    assert shown.page.locator("#tip").is_visible()


def test_an_op_is_told_of_under_the_pointer_and_pointed_at_in_all_views(shown: Visit) -> None:
    """The first op lasts from 0 to 2 of 13 µs, in the first lane below the axis and the name of the process."""
    spot = {"x": 160, "y": 55}
    shown.page.locator("#lanes").hover(position=spot)
    assert shown.text("#tip").splitlines()[0] == "a"
    shown.page.locator("#lanes").click(position=spot)
    assert shown.page.locator("#selected dd").first.inner_text() == "a"
    assert shown.page.locator("#rows tr[aria-selected=true] td.name").first.inner_text() == "a"


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


def test_it_is_dark_where_the_reader_is_in_the_dark(chromium: Any, tmp_path: Path) -> None:
    grounds = []
    for scheme in ("light", "dark"):
        context = chromium.new_context(color_scheme=scheme)
        visit = Visit(context.new_page())
        visit.open(render(REPORT), tmp_path / "report.html")
        grounds.append(visit.page.evaluate("getComputedStyle(document.body).backgroundColor"))
        context.close()
    assert grounds == ["rgb(255, 255, 255)", "rgb(20, 23, 26)"]


def test_of_many_ops_those_in_sight_are_in_the_table(visit: Visit, tmp_path: Path) -> None:
    visit.open(render(wide_report(1000)), tmp_path / "wide.html")
    assert visit.text("#shown") == "1,000 of 1,000 ops"
    assert len(visit.column(1)) < 32, "20 in sight, and a few to spare"
    visit.page.locator("#rows").evaluate("rows => { rows.scrollTop = rows.scrollHeight; }")
    visit.settle()
    assert visit.column(1)[-1] == "999"
    assert visit.complaints == []


def test_of_wide_layers_no_more_is_drawn_than_can_be_seen(visit: Visit, tmp_path: Path) -> None:
    """From afar thousands of lines are one area, and take a browser long; what is near is drawn whole, as curves."""
    visit.open(render(wide_report(1000)), tmp_path / "wide.html")
    visit.page.evaluate("""() => {
        window.calls = { lineTo: 0, bezierCurveTo: 0 };
        for (const name of Object.keys(calls)) {
            const draw = CanvasRenderingContext2D.prototype[name];
            CanvasRenderingContext2D.prototype[name] = function (...args) {
                if (this.canvas.id === "drawing") calls[name] += 1;
                return draw.apply(this, args);
            };
        }
    }""")

    def calls(key: str) -> dict[str, int]:
        visit.page.evaluate("() => { for (const name of Object.keys(calls)) calls[name] = 0; }")
        visit.page.locator("#drawing").press(key)
        visit.settle()
        return visit.page.evaluate("calls")  # type: ignore[no-any-return]

    for _ in range(10):
        far = calls("-")
    assert 0 < far["lineTo"] <= 2 * 400, "of 999 edges, within a stream and between two"
    assert far["bezierCurveTo"] == 0
    near = calls("Home")
    assert near["bezierCurveTo"] > 0
    assert visit.complaints == []


def test_what_was_measured_stands_below_what_was_predicted(visit: Visit, tmp_path: Path) -> None:
    """Twice as slow in fact, so the second process ends where the first is long over."""
    assert REPORT.timeline is not None
    slower = tuple(replace(s, start_us=2 * s.start_us, end_us=2 * s.end_us) for s in REPORT.timeline.slices)
    heights = []
    for report in (REPORT, replace(REPORT, measured=Timeline(slower, "measured"))):
        visit.open(render(report), tmp_path / "report.html")
        heights.append(visit.page.locator("#lanes").bounding_box()["height"])
    assert heights[1] > 1.8 * heights[0]
    assert visit.text("#range") == "0.0 to 26.0 µs"
    visit.page.locator("#used").hover(position={"x": 1000, "y": 60})
    assert [line.split(":")[0] for line in visit.text("#tip").splitlines()[1:]] == ["predicted", "measured"]
    assert visit.complaints == []
