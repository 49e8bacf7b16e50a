"""Reports as text; expectations follow from the drawing in reports.py."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from autostream.ir import Decision
from autostream.reporting.report import Report
from autostream.reporting.text import render, summary
from tests.reporting.reports import (
    CHOSEN,
    DIAMOND,
    GRAPHED,
    ONE_STREAM,
    PLAIN,
    REFUSED,
    REPORT,
    TWO_STREAMS,
    UNCAPTURED,
    with_source,
)


def values(text: str) -> dict[str, list[str]]:
    """The summary's lines by key; a line without a key belongs to the key above."""
    found: dict[str, list[str]] = {}
    key = ""
    for line in text.split("\n\n")[0].splitlines():
        head, value = re.fullmatch(r"(\S+(?: \S+)*)?\s{2,}(.*)", line).groups()  # type: ignore[union-attr]
        key = head or key
        found.setdefault(key, []).append(value)
    return found


def rows(text: str, title: str) -> list[list[str]]:
    """The cells of a table's rows, cut where its rule has gaps."""
    section = next(part for part in text.split("\n\n") if part.startswith(title))
    _, _, rule, *body = section.splitlines()
    columns = [match.span() for match in re.finditer("-+", rule)]
    return [[line[start:end].strip() for start, end in columns] for line in body]


def test_the_summary_says_what_runs_and_how_fast() -> None:
    found = values(render(REPORT))
    assert found["model"] == ["Net"]
    assert found["signature"] == ["1x8:float16 on cuda:0, eval, no gradients"]
    assert found["device"] == ["NVIDIA H200: 132 SMs, 4,800 GB/s (profile: table)"]
    assert found["runs as"] == ["CUDA graph over 2 streams (critical_path)"]
    assert found["measured"] == [
        "14.0 µs, 1.50× the speed of sequential in a CUDA graph (21.0 µs), 3.00× the speed of sequential (42.0 µs)"
    ]
    assert found["predicted"] == [
        "13.0 µs, 1.50× the speed of sequential in a CUDA graph (19.5 µs), 2.00× the speed of sequential (26.0 µs)"
    ]
    assert found["graph"] == ["5 ops, width 2, 1 region of up to 2 independent branches, 2 streams, 2 waits"]
    assert found["work"] == ["18.0 µs (roofline costs), 12.0 µs of it on the critical path"]
    assert found["bound"] == ["67% of the work is in line, on the critical path: at most 1.50×"]
    assert found["prepared in"] == ["trace 1.25 s, schedule 0.50 s"]
    assert found["with"] == ["torch 2.11.0"]


def test_why_not_more_names_what_is_left_to_the_bound() -> None:
    (rest,) = values(summary(REPORT))["why not more"]
    assert rest.startswith("predicted 1.0 µs above that floor of 12.0 µs: edges between ops, 2 waits among them")
    at_the_floor = replace(CHOSEN, predicted_us=12.0)
    assert "why not more" not in values(summary(replace(REPORT, chosen=at_the_floor)))


def test_what_no_clock_has_shown_is_called_predicted() -> None:
    dry = replace(CHOSEN, measured_us=None)
    found = values(render(replace(REPORT, chosen=dry, candidates=(dry, GRAPHED))))
    assert found["measured"] == ["nothing: the times below are predicted"]
    assert found["predicted"] == ["13.0 µs, 1.50× the speed of sequential in a CUDA graph (19.5 µs)"]


def test_a_measured_time_is_compared_with_measured_times_alone() -> None:
    found = values(render(replace(REPORT, candidates=(CHOSEN, replace(GRAPHED, measured_us=None)))))
    assert found["measured"] == ["14.0 µs"]


def test_no_gain_is_a_result_with_a_number_and_a_reason() -> None:
    slow = replace(CHOSEN, measured_us=42.0)
    found = values(render(replace(REPORT, chosen=GRAPHED, candidates=(GRAPHED, slow))))
    assert found["runs as"] == ["CUDA graph on 1 stream (sequential)"]
    assert found["gain"] == [
        "none from streams: the best, critical_path over 2 streams, is measured at 0.50× the speed of one"
    ]
    assert found["bound"] == ["67% of the work is in line, on the critical path: at most 1.50×"]


def test_no_gain_says_why_the_best_rival_was_refused() -> None:
    found = values(render(replace(REPORT, chosen=GRAPHED, candidates=(GRAPHED, REFUSED))))
    assert found["gain"] == [
        "none from streams: the best, path_cover over 2 streams, is predicted at 1.44× the speed of one "
        "and was refused: predicted to be no faster"
    ]


def test_no_gain_without_rivals() -> None:
    found = values(render(replace(REPORT, chosen=GRAPHED, candidates=(GRAPHED, UNCAPTURED))))
    assert found["gain"] == ["none from streams: no schedule over several streams was a candidate"]


def test_the_plain_model_comes_with_its_reason_and_no_tables() -> None:
    assert values(render(PLAIN)) == {
        "model": ["Net"],
        "signature": ["1x8:float16 on cuda:0, eval, no gradients"],
        "runs as": ["the plain model"],
        "refused": ["not traced: forward branches on the value of a tensor (net.py:7)"],
    }
    assert "\n\n" not in render(PLAIN)


def test_a_refusal_names_the_op_and_its_source_line() -> None:
    report = replace(REPORT, graph=with_source(DIAMOND, "d", "net.py:3: y = f(x)"))
    assert values(summary(report))["refused"] == ["not fused: a hook watches it (op d, net.py:3: y = f(x))"]


def test_a_reason_that_names_the_source_line_is_not_given_it_twice() -> None:
    refusal = Decision("d", "not captured", "it synchronizes (net.py:3: y = f(x))")
    report = replace(REPORT, graph=with_source(DIAMOND, "d", "net.py:3: y = f(x)"), refusals=(refusal,))
    assert values(summary(report))["refused"] == ["not captured: it synchronizes (net.py:3: y = f(x)) (op d)"]


def test_of_many_refusals_of_a_kind_the_first_are_shown() -> None:
    many = [Decision(name, "not captured", "it synchronizes") for name in "abcde"]
    report = replace(REPORT, refusals=(*many[:4], Decision("", "no streams", "there is one"), many[4]))
    assert values(summary(report))["refused"] == [
        "no streams: there is one",
        *(f"not captured: it synchronizes (op {name})" for name in "abc"),
        "not captured: 2 more",
    ]


@pytest.mark.parametrize("directory", ["/usr/lib/", "../", r"C:\models" "\\", ""])
def test_source_lines_in_the_table_are_without_directories(directory: str) -> None:
    source = f"{directory}net.py:3: y = a / b  # a/b:1: c"
    report = replace(REPORT, graph=with_source(DIAMOND, "a", source))
    assert rows(render(report), "Ops")[0][-1] == "net.py:3: y = a / b # a/b:1: c"


def test_candidates_are_listed_and_the_chosen_one_is_marked() -> None:
    assert rows(render(REPORT), "Candidates") == [
        ["", "sequential", "1", "no", "0", "26.0", "42.0", ""],
        ["", "sequential", "1", "CUDA graph", "0", "19.5", "21.0", ""],
        ["*", "critical_path", "2", "CUDA graph", "2", "13.0", "14.0", "chosen"],
        ["", "path_cover", "2", "CUDA graph", "2", "13.5", "", "predicted to be no faster"],
    ]


def test_ops_are_listed_in_launch_order() -> None:
    relu = "aten.relu.default"
    assert rows(render(REPORT), "Ops") == [
        ["0", "a", relu, "0", "0.0", "2.0", "25%", "", "0.0", ""],
        ["1", "b", relu, "0", "2.5", "4.0", "25%", "", "0.0", ""],
        ["2", "d", relu, "1", "3.0", "6.0", "25%", "a", "2.0", ""],
        ["3", "c", relu, "0", "6.5", "4.0", "25%", "", "0.0", ""],
        ["4", "e", relu, "0", "11.0", "2.0", "25%", "d", "0.0", ""],
    ]


@pytest.mark.parametrize(("ops", "shown"), [(0, []), (1, ["d"]), (2, ["b", "d"]), (3, ["b", "d", "c"]), (9, "abdce")])
def test_the_costliest_ops_are_kept_in_launch_order(ops: int, shown: list[str]) -> None:
    text = render(REPORT, ops=ops)
    listed = [row[1] for row in rows(text, "Ops")] if shown else []
    assert listed == list(shown)
    assert ("\nOps" in text) == bool(shown)


def test_decisions_about_the_whole_come_first_and_follow_the_ops_shown() -> None:
    whole, of_d = ["", "2 streams", "the width is 2"], ["d", "stream 1", "b keeps stream 0 busy"]
    assert rows(render(REPORT), "Decisions") == [whole, of_d]
    assert rows(render(REPORT, ops=0), "Decisions") == [whole]


def test_many_waits_are_abbreviated() -> None:
    launches = (replace(TWO_STREAMS.launches[0], waits=("p", "q", "r", "s", "t")), *TWO_STREAMS.launches[1:])
    chosen = replace(CHOSEN, schedule=replace(TWO_STREAMS, launches=launches))
    assert rows(render(replace(REPORT, chosen=chosen)), "Ops")[0][7] == "p, q, r +2"


def test_text_from_the_model_cannot_break_the_page() -> None:
    hostile = "net.py:1:\x1b[2J\r\n  y =\tx" + "#" * 100
    text = render(replace(REPORT, model="N\x1bet\nwork", graph=with_source(DIAMOND, "a", hostile)))
    assert not {"\x1b", "\r", "\t"} & set(text)
    assert values(text)["model"] == ["N et work"]
    source = rows(text, "Ops")[0][-1]
    assert source.startswith("net.py:1: [2J y = x####")
    assert source.endswith("…")
    assert len(source) == 60


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("streams", "ops on CUDA streams, uncaptured, on 1 stream (sequential)"),
        ("threads", "CPU threads, on 1 stream (sequential)"),
    ],
)
def test_each_mode_has_words(mode: str, said: str) -> None:
    assert values(summary(replace(REPORT, mode=mode, chosen=UNCAPTURED)))["runs as"] == [said]


@pytest.mark.parametrize(
    ("device", "captured", "said"),
    [
        ("cuda:0", True, "CUDA graph over 2 streams (critical_path)"),
        ("cuda:0", False, "ops on CUDA streams, uncaptured, over 2 streams (critical_path)"),
        ("cpu", False, "CPU threads, over 2 streams (critical_path)"),
    ],
)
def test_a_dry_run_says_that_nothing_runs(device: str, captured: bool, said: str) -> None:
    chosen = replace(CHOSEN, captured=captured)
    report = replace(REPORT, mode="dry run", graph=replace(DIAMOND, device=device), chosen=chosen)
    assert values(summary(report))["runs as"] == [f"nothing, this is a dry run; the best by prediction: {said}"]


def test_a_cpu_has_cores() -> None:
    report = replace(REPORT, graph=replace(DIAMOND, device="cpu"))
    assert "132 cores" in values(summary(report))["device"][0]


def test_a_report_of_nothing_but_a_name() -> None:
    assert render(Report("N", "s", "plain")).splitlines() == [
        "model      N",
        "signature  s",
        "runs as    the plain model",
    ]


def test_names_that_look_like_numbers_stay_names() -> None:
    decision = Decision("", "1e5", "007")
    chosen = replace(CHOSEN, schedule=replace(ONE_STREAM, decisions=(decision,)))
    assert rows(render(replace(REPORT, chosen=chosen)), "Decisions") == [["", "1e5", "007"]]


def test_pieces_of_a_split_model_are_shown() -> None:
    piece = Report("GraphModule", "3:float32 on cpu, eval, no gradients", "one stream")
    whole = Report("Net", "3:float32 on cpu, eval, no gradients", "graph breaks", parts=(piece, piece))
    shown = render(whole)
    assert "pieces between graph breaks" in shown
    assert shown.index("Piece 0") < shown.index("Piece 1")
    assert shown.count("GraphModule") == 2
