"""Reports as JSON; expectations follow from the drawing in reports.py."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from autostream.reporting.dump import dump
from autostream.reporting.report import Report
from tests.reporting.reports import COSTS, PLAIN, REPORT


@pytest.mark.parametrize("report", [REPORT, PLAIN])
def test_json_gives_back_what_it_was_given(report: Report) -> None:
    dumped = dump(report)
    assert json.loads(json.dumps(dumped, allow_nan=False)) == dumped


def test_numbers_that_json_lacks_become_null() -> None:
    odd = {**COSTS, "d": replace(COSTS["d"], bandwidth_share=math.nan), "e": replace(COSTS["e"], sm_share=math.inf)}
    costs = dump(replace(REPORT, costs=odd))["costs"]
    assert costs["d"]["bandwidth_share"] is None
    assert costs["e"]["sm_share"] is None


def test_a_value_without_a_form_is_told_rather_than_lost() -> None:
    with pytest.raises(TypeError, match="a report holds a complex, which JSON has no form for: 1j"):
        dump(replace(REPORT, seconds={"trace": 1j}))  # type: ignore[dict-item]


def test_pieces_of_a_split_model_are_dumped_as_reports() -> None:
    part = Report("GraphModule", "s", "one stream")
    dumped = dump(Report("Net", "s", "graph breaks", parts=(part,)))
    assert dumped["parts"] == [dump(part)]
    assert dumped["parts"][0]["schema"] == dumped["schema"]
