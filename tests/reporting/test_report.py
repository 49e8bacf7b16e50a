"""Reports as values; what is told of them is tested where it is told."""

from __future__ import annotations

import json

import pytest

from autostream.reporting import notebook
from autostream.reporting.dump import dump
from autostream.reporting.page import assemble
from autostream.reporting.report import Report
from tests.reporting.reports import PLAIN, REPORT, SPLIT


@pytest.mark.parametrize("report", [REPORT, PLAIN])
def test_json_is_what_is_dumped(report: Report) -> None:
    assert json.loads(report.to_json()) == dump(report)


def test_the_page_is_the_one_of_the_command_line() -> None:
    assert SPLIT.to_html() == assemble.render(SPLIT)


def test_a_notebook_shows_the_summary() -> None:
    assert REPORT._repr_html_() == notebook.render([REPORT])
