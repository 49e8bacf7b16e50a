"""Reports as JSON; expectations follow from the drawing in reports.py."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import replace
from typing import Any

import pytest

from autostream.reporting.dump import dump
from autostream.reporting.report import Report
from autostream.reporting.text import render
from tests.reporting.reports import COSTS, PLAIN, REPORT


@pytest.mark.parametrize("report", [REPORT, PLAIN])
def test_json_gives_back_what_it_was_given(report: Report) -> None:
    dumped = dump(report)
    assert json.loads(json.dumps(dumped, allow_nan=False)) == dumped


def test_every_field_is_there() -> None:
    assert dump(REPORT).keys() == {"schema", "summary", "explanation", "captured_share"} | {
        field.name for field in dataclasses.fields(Report)
    }


def test_values_keep_their_meaning() -> None:
    dumped: dict[str, Any] = dump(REPORT)
    assert dumped["schema"] == 2
    assert list(dumped["graph"]["ops"]) == list("abcde")
    assert dumped["graph"]["ops"]["e"]["reads"] == ["c", "d"], "a set becomes a sorted list"
    assert dumped["graph"]["dependencies"][0] == {
        "before": "a",
        "after": "b",
        "hazard": "read after write",
        "resource": "a",
    }
    assert dumped["graph"]["storages"]["x_in"]["role"] == "input"
    assert dumped["costs"]["d"]["duration_us"] == 6.0
    assert dumped["chosen"]["schedule"]["launches"][2] == {"op": "d", "stream": 1, "waits": ["a"], "releases": []}
    assert dumped["candidates"][3]["measured_us"] is None
    assert dumped["timeline"]["slices"][1] == {"op": "b", "stream": 0, "start_us": 2.5, "end_us": 6.5}
    assert dumped["seconds"] == {"trace": 1.25, "schedule": 0.5}


def test_the_numbers_of_the_text_are_there() -> None:
    summary = dump(REPORT)["summary"]
    assert (summary["work_us"], summary["width"]) == (18.0, 2)
    assert summary["critical_path"] == {"ops": ["a", "b", "c", "e"], "work_us": 12.0, "us": 12.0}
    assert summary["slack_us"]["d"] == 2.0
    assert summary["regions"] == [{"fork": "a", "join": "e", "branches": [["b", "c"], ["d"]]}]


def test_the_answers_of_the_text_are_there() -> None:
    """In the same words, and with the same numbers."""
    answers = dump(REPORT)["explanation"]
    assert [gain["times"] for gain in answers["gains"]] == [1.5, 3.0, 1.5, 2.0]
    assert answers["spread"] is None
    assert [(reason["cause"], reason["us"], reason["share"]) for reason in answers["reasons"]] == [
        ("chain of data", 3.0, 0.6),
        ("not explained by the model", 2.0, 0.4),
    ]
    assert answers["concurrency"] == {"0": 1.0, "1": 6.0, "2": 6.0}
    assert answers["memory"]["bytes"] == 4_500_000
    assert answers["memory"]["holders"][0] == {
        "storage": "a", "bytes": 1024, "pool": "stream 0", "op": "a", "source": "",
    }  # fmt: skip
    assert answers["kept_out"] is None
    text = render(REPORT)
    said = [*answers["advice"], *answers["placements"].values(), *(reason["why"] for reason in answers["reasons"])]
    assert [words for words in said if words not in text] == []
    assert dump(PLAIN)["explanation"] is None


def test_numbers_that_json_lacks_become_null() -> None:
    odd = {**COSTS, "d": replace(COSTS["d"], bandwidth_share=math.nan), "e": replace(COSTS["e"], sm_share=math.inf)}
    costs = dump(replace(REPORT, costs=odd))["costs"]
    assert costs["d"]["bandwidth_share"] is None
    assert costs["e"]["sm_share"] is None


def test_a_value_without_a_form_is_told_rather_than_lost() -> None:
    with pytest.raises(TypeError, match="a report holds a complex, which JSON has no form for: 1j"):
        dump(replace(REPORT, seconds={"trace": 1j}))  # type: ignore[dict-item]


def test_pieces_of_a_split_model_are_dumped_as_reports() -> None:
    piece = Report("GraphModule", "s", "one stream")
    dumped = dump(Report("Net", "s", "graph breaks", parts=(piece,)))
    assert dumped["parts"] == [dump(piece)]
    assert dumped["parts"][0]["schema"] == dumped["schema"]
