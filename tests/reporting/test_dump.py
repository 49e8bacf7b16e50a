"""Reports as JSON; expectations follow from the drawing in reports.py."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from autostream.reporting.dump import dump
from autostream.reporting.report import Report
from tests.reporting.reports import COSTS, PLAIN, REPORT


@pytest.mark.parametrize("report", [REPORT, PLAIN])
def test_json_gives_back_what_it_was_given(report: Report) -> None:
    dumped = dump(report)
    assert json.loads(json.dumps(dumped, allow_nan=False)) == dumped


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
