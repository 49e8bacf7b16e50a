"""The table of ops; expectations follow from the drawing in reports.py."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from autostream.errors import OptionError
from autostream.ir import Candidate, Launch, Schedule
from autostream.reporting.ops import FOLDED, Selection, ops_table, selected
from autostream.reporting.report import Report
from autostream.reporting.summary import summary_of
from tests.reporting.reports import REPORT, with_source
from tests.scheduling.graphs import costs_of, graph_of


def table_of(report: Report, selection: Selection) -> str:
    return ops_table(report, summary_of(report), selection)


def listed(report: Report, selection: Selection) -> list[list[str]]:
    """The cells of the table's rows, cut where its rule has gaps."""
    _, _, rule, *body = table_of(report, selection).splitlines()
    columns = [match.span() for match in re.finditer("-+", rule)]
    return [[line[start:end].strip() for start, end in columns] for line in body]


def names(report: Report, selection: Selection) -> str:
    return "".join(row[0] for row in listed(report, replace(selection, columns=("op",))))


def experts(count: int) -> Report:
    """A router, so many experts of two ops beside each other on three streams, and what adds them up.

           ┌─ up_0 ── down_0 ─┐
    router ┤       …          ├─ sum
           └─ up_n ── down_n ─┘
    """
    ups, downs = [f"up_{at}" for at in range(count)], [f"down_{at}" for at in range(count)]
    pairs = list(zip(ups, downs, strict=True))
    edges = [*(("router", up) for up in ups), *pairs, *((down, "sum") for down in downs)]
    order = ["router", *(name for pair in pairs for name in pair), "sum"]
    graph = graph_of(edges, names=order)
    for up, down in pairs:
        graph = with_source(with_source(graph, up, "moe.py:7: h = up(x)"), down, "moe.py:8: y = down(h)")
    durations = {"router": 1.0, "sum": 2.0, **dict.fromkeys(ups, 4.0), **dict.fromkeys(downs, 3.0)}
    streams = {name: at % 3 for at, pair in enumerate(pairs) for name in pair}
    launches = tuple(Launch(name, streams.get(name, 0)) for name in order)
    chosen = Candidate(Schedule("drawn", 3, launches), captured=True, predicted_us=9.0)
    costs = costs_of(graph, durations)
    return replace(REPORT, graph=graph, costs=costs, chosen=chosen, candidates=(chosen,), timeline=None, refusals=())


def test_ops_are_chosen_by_stream_path_and_cost() -> None:
    assert names(REPORT, Selection()) == "abdce"
    assert names(REPORT, Selection(stream=1)) == "d"
    assert names(REPORT, Selection(critical=True)) == "abce"
    assert names(REPORT, Selection(critical=True, ops=2)) == "bc"
    assert names(REPORT, Selection(stream=0, ops=1)) == "b", "of equally costly ones, the first"
    assert table_of(REPORT, Selection(stream=1, critical=True)) == ""


@pytest.mark.parametrize(
    ("sort", "order"), [("launch", "abdce"), ("cost", "dbcae"), ("slack", "abced"), ("op", "abcde"), ("waits", "deabc")]
)
def test_rows_are_sorted_and_equal_ones_stay_in_launch_order(sort: str, order: str) -> None:
    assert names(REPORT, Selection(sort=sort)) == order


def test_the_title_says_what_was_left_out_and_how_it_is_sorted() -> None:
    def title(selection: Selection) -> str:
        return table_of(REPORT, selection).splitlines()[0]

    assert title(Selection()) == "Ops in launch order; starts are predicted"
    assert title(Selection(ops=2)) == "Ops in launch order, the 2 costliest of 5; starts are predicted"
    assert title(Selection(sort="cost", critical=True)) == (
        "Ops in the order of cost µs, the 4 of 5 on the critical path; starts are predicted"
    )


def test_of_many_ops_those_that_are_alike_share_a_row() -> None:
    many = experts(FOLDED // 2)
    selection = Selection(columns=("op", "stream", "cost", "slack", "source"))
    assert listed(many, selection) == [
        ["router", "0", "1.0", "0.0", ""],
        ["up_0 +19", "0, 1, 2", "4.0", "0.0", "moe.py:7: h = up(x)"],
        ["down_0 +19", "0, 1, 2", "3.0", "0.0", "moe.py:8: y = down(h)"],
        ["sum", "0", "2.0", "0.0", ""],
    ]
    said = "alike ones in one of 4 rows, with the cost of each"
    assert f"Ops in launch order, {said}; starts" in table_of(many, Selection())
    assert listed(many, replace(selection, sort="cost"))[0][0] == "up_0 +19"


def test_ops_that_differ_in_cost_or_line_are_not_alike() -> None:
    many = experts(FOLDED // 2)
    assert many.graph is not None
    costs = {**many.costs, "up_3": replace(many.costs["up_3"], duration_us=4.2)}
    odd = replace(many, costs=costs, graph=with_source(many.graph, "up_5", "moe.py:9: other"))
    assert [row[0] for row in listed(odd, Selection(columns=("op",)))] == [
        "router", "up_0 +17", "down_0 +19", "up_3", "up_5", "sum",
    ]  # fmt: skip


def test_what_is_not_there_is_one_line() -> None:
    with pytest.raises(OptionError, match=r"there is no column 'costs' \(did you mean 'cost'\?\): use launch, op, "):
        Selection(columns=("op", "costs"))
    with pytest.raises(OptionError, match="there is no stream 2: the schedule has 0 to 1"):
        selected(REPORT, summary_of(REPORT), Selection(stream=2))
