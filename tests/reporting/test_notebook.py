"""Reports as notebooks show them."""

from __future__ import annotations

import re
from dataclasses import replace
from html import unescape

from autostream.reporting.notebook import render
from autostream.reporting.text import lines
from tests.reporting.reports import REPORT


def test_the_table_says_what_the_text_does() -> None:
    cells = re.findall(r"<tr><th>(.*)</th><td>(.*)</td></tr>", render([REPORT]))
    assert [(unescape(key), unescape(value)) for key, value in cells] == list(lines(REPORT))
    assert ("runs as", "CUDA graph over 2 streams (critical_path)") in lines(REPORT)


def test_names_are_text() -> None:
    evil = '<script>alert("&")</script>'
    shown = render([replace(REPORT, model=evil, versions={evil: evil})])
    assert "<script" not in shown
    assert "&lt;script&gt;alert(&quot;&amp;&quot;)&lt;/script&gt;" in shown
