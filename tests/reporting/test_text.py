"""Reports as text; expectations follow from the drawing in reports.py."""

from __future__ import annotations

import re
from dataclasses import replace

from autostream.ir import Candidate, Decision, Limit, Schedule, Timeline
from autostream.reporting.ops import Selection
from autostream.reporting.report import Report
from autostream.reporting.text import answers, render, summary
from tests.reporting.reports import CHOSEN, DIAMOND, GRAPHED, PLAIN, REFUSED, REPORT, with_source
from tests.scheduling.graphs import graph_of


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


def test_exposed_communication_is_told_where_there_are_collectives() -> None:
    """``c`` runs from 6.5 to 10.5 µs, beside ``d`` until 9."""
    assert "communication" not in values(render(REPORT))
    group = replace(DIAMOND, ops={**DIAMOND.ops, "c": replace(DIAMOND.ops["c"], group="0")})
    (said,) = values(render(replace(REPORT, graph=group)))["communication"]
    assert said == "4.0 µs in 1 collective as predicted, 1.5 µs of it exposed: nothing else runs then"


def test_why_it_is_not_faster_is_told_with_shares() -> None:
    title = "Why critical_path over 2 streams is not faster: 9.0 µs if its streams were always busy, and beyond that"
    assert rows(answers(REPORT), title) == [
        ["3.0", "60%", "chain of data", "4 ops in line take 12.0 µs"],
        ["2.0", "40%", "not explained by the model", "measured less predicted"],
    ]
    exact = replace(REPORT, chosen=replace(CHOSEN, measured_us=12.01))
    assert len(rows(answers(exact), title)) == 1, "what is next to nothing is left out"


def test_no_gain_is_a_result_with_a_number_and_a_reason() -> None:
    slow = replace(CHOSEN, measured_us=42.0)
    found = values(render(replace(REPORT, chosen=GRAPHED, candidates=(GRAPHED, slow))))
    assert found["runs as"] == ["CUDA graph on 1 stream (sequential)"]
    assert found["gain"] == [
        "none from streams: the best, critical_path over 2 streams, is measured at 0.50× the speed of one"
    ]
    assert found["at most"][0].startswith("1.50×: 4 ops are in line")


def test_where_nothing_is_launched_there_is_nothing_to_schedule() -> None:
    """Outputs are inputs, or constants."""
    schedule = Schedule("sequential", 1, (), decisions=(Decision("", "1 stream", "program order"),))
    chosen = Candidate(schedule, captured=True, predicted_us=1.5)
    empty = replace(
        REPORT, graph=graph_of(()), costs={}, chosen=chosen, candidates=(chosen,), timeline=Timeline(()), mode="dry run"
    )
    found = values(render(empty))
    assert found["predicted"] == ["1.5 µs"]
    assert found["gain"] == ["none: the model launches nothing, so there is nothing to schedule"]
    assert found["graph"] == ["0 ops (ATen), width 0, 1 stream, 0 waits"]
    assert not {"uncertain", "at most", "work"} & found.keys()
    assert [part.split()[0] for part in render(empty).split("\n\n")] == ["model", "Candidates"]


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


def test_what_is_allocated_is_told_beside_one_stream_and_workspaces() -> None:
    assert values(summary(REPORT))["memory"] == [
        "4.5 MB at most, 1.45× one stream (3.1 MB), weights and inputs not included",
        "workspaces come on top, and no budget counts them: on Hopper, cuBLAS takes 33.6 MB for each stream that it is "
        "used on, 67.1 MB at most; CUBLAS_WORKSPACE_CONFIG=:4096:2:16:8 in the environment makes that a quarter",
        "so does what nothing uses of a segment: for each stream, PyTorch takes 2.1 MB or 21.0 MB at a time",
    ]
    on_cpu = replace(REPORT, graph=replace(DIAMOND, device="cpu"))
    assert values(summary(on_cpu))["memory"] == [
        "4.5 MB at most, 1.45× one stream (3.1 MB), weights and inputs not included"
    ]
    alone = replace(REPORT, chosen=GRAPHED, candidates=(GRAPHED,))
    assert values(summary(alone))["memory"] == ["3.1 MB at most, weights and inputs not included"]


def test_a_schedule_that_the_budget_keeps_out_is_told_with_what_that_costs() -> None:
    why = "needs 9.0 MB, the budget is 5.0 MB (memory_budget)"
    too_large = replace(REFUSED, predicted_us=10.5, refusal=why, limit=Limit.BUDGET)
    report = replace(REPORT, candidates=(*REPORT.candidates, too_large))
    assert values(summary(report))["budget"] == [
        "costs 2.5 µs, as predicted: path_cover over 2 streams would take 10.5 µs, the best within it 13.0 µs; "
        f"it {why}"
    ]
    assert rows(render(report), "Candidates")[-1][-1] == why
    title = "Why path_cover over 2 streams, which the memory budget keeps out, is not faster: 9.0 µs if"
    assert rows(answers(report), title)[1] == [
        "2.5", "50%", "memory budget", f"{why}: the best within it takes 13.0 µs instead of 10.5 µs, as predicted",
    ]  # fmt: skip
    assert "budget" not in values(summary(REPORT))


def test_decisions_about_the_whole_come_first_and_follow_the_ops_shown() -> None:
    whole, of_d = ["", "2 streams", "the width is 2"], ["d", "stream 1", "b keeps stream 0 busy"]
    assert rows(answers(REPORT), "Why on")[0] == whole
    assert rows(answers(REPORT), "Why on")[3] == of_d
    assert [row[0] for row in rows(answers(REPORT), "Why on")] == ["", *"abdce"]
    assert rows(answers(REPORT, Selection(ops=1)), "Why on") == [whole, of_d]
    assert rows(answers(REPORT, Selection(ops=0)), "Why on") == [whole]


def test_text_from_the_model_cannot_break_the_page() -> None:
    hostile = "net.py:1:\x1b[2J\r\n  y =\tx" + "#" * 100
    text = render(replace(REPORT, model="N\x1bet\nwork", graph=with_source(DIAMOND, "a", hostile)))
    assert not {"\x1b", "\r", "\t"} & set(text)
    assert values(text)["model"] == ["N et work"]
    source = rows(text, "Ops")[0][-1]
    assert source.startswith("net.py:1: [2J y = x####")
    assert source.endswith("…")
    assert len(source) == 60


def test_forward_and_backward_are_named_each_with_what_it_is() -> None:
    """And are no parts, which have numbers and ends."""
    forward = replace(REPORT, half="forward")
    backward = replace(
        REPORT, model="NetBackward", half="backward", chosen=replace(GRAPHED, measured_us=None), candidates=(GRAPHED,)
    )
    whole = Report("Net", "s", "forward and backward", parts=(forward,))
    assert values(summary(whole))["backward"] == ["not run yet: it is scheduled when it first runs"]
    whole = replace(whole, parts=(forward, backward))
    assert values(summary(whole)) == {
        "model": ["Net"],
        "signature": ["s"],
        "runs as": ["a forward and a backward, each scheduled for itself"],
        "forward": ["14.0 µs, 5 ops: CUDA graph over 2 streams (critical_path)"],
        "backward": ["19.5 µs, as predicted, 5 ops: CUDA graph on 1 stream (sequential)"],
        "captured": ["100% of the time of its parts, each run once; what runs between them is not timed"],
    }
    for tell in (answers, render):
        text = tell(whole)
        assert [line for line in text.splitlines() if line in ("Forward", "Backward")] == ["Forward", "Backward"]
        assert text.partition("\n\nForward\n")[2] == f"{tell(forward)}\n\nBackward\n{tell(backward)}"
        assert "Part" not in text
    plain = replace(PLAIN, half="backward")
    assert values(summary(replace(whole, parts=(forward, plain))))["backward"] == ["the plain model"]


def test_each_piece_is_listed_with_its_end_and_how_much_of_them_is_captured() -> None:
    graph, ended = replace(DIAMOND, device="cuda:0"), "Tensor.item() (net.py:7: k = y.item())"
    captured, plain = (Candidate(Schedule("sequential", 1, ()), each, 99.0, measured_us=30.0) for each in (True, False))
    first = Report("GraphModule", "3:float32 on cuda:0", "cuda graph", graph=graph, chosen=captured, ended=ended)
    parts = (
        first,
        replace(first, mode="streams", chosen=replace(plain, measured_us=None, predicted_us=10.0), ended=""),
    )
    whole = Report("Net", "3:float32 on cuda:0", "graph breaks", parts=(*parts, Report("GraphModule", "s", "plain")))
    said = summary(whole)
    assert values(said)["captured"] == [
        "75% of the time of its parts, each run once; what runs between them is not timed"
    ]
    _, _, table = render(whole).partition("Parts\n")
    head, _, *rows = table.split("\n\n")[0].splitlines()
    assert head.split() == ["part", "µs", "ops", "runs", "as", "ends", "because"]
    assert [re.split(r"  +", row.strip()) for row in rows] == [
        ["0", "30.0", "5", "CUDA graph", ended],
        ["1", "10.0", "5", "ops on CUDA streams, uncaptured", "the model returns"],
        ["2", "the plain model", "the model returns"],
    ]
