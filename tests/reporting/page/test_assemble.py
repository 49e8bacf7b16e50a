"""The page as a file: one, small, complete, and without a way for a report to become markup."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest

from autostream.reporting.page.assemble import render
from autostream.reporting.report import Report
from autostream.reporting.timeline import events
from tests.reporting.reports import PLAIN, REPORT, SPLIT, with_source


class Parts(HTMLParser):
    """Elements of a page: scripts and styles by what they hold, ids, and whatever names another file."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.held: dict[str, list[str]] = {"script": [], "style": []}
        self.data: dict[str, Any] = {}
        self.ids: list[str] = []
        self.links: list[str] = []
        self.policy = ""
        self._open: tuple[str, str] = ("", "")
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.ids += [value for key, value in attrs if key == "id" and value]
        self.links += [value for key, value in attrs if key in {"src", "href", "action", "data"} and value]
        if found.get("http-equiv") == "Content-Security-Policy":
            self.policy = found["content"] or ""
        self._open = (tag, found.get("id") or "")

    def handle_data(self, data: str) -> None:
        tag, name = self._open
        if tag == "script" and name:
            self.data[name] = json.loads(data)
        elif tag in self.held:
            self.held[tag].append(data)
        self._open = ("", "")


def test_all_that_views_need_is_within() -> None:
    parts = Parts(render(REPORT))
    data = parts.data["data"]
    assert data.keys() == {"report", "trace", "places", "parts"}
    assert [(e["ph"], e["name"], e["ts"], e.get("dur")) for e in data["trace"]] == [
        (e["ph"], e["name"], e["ts"], e.get("dur")) for e in events(REPORT)
    ]
    assert data["places"].keys() == set("abcde")
    assert data["parts"] == []
    shown, whole = data["report"], json.loads(REPORT.to_json())
    for key in ("model", "signature", "summary", "explanation", "costs", "refusals", "versions", "profile"):
        assert shown[key] == whole[key], key
    assert [(c["chosen"], c["schedule"]["waits"]) for c in shown["candidates"]] == [
        (False, 0), (False, 0), (True, 2), (False, 2),
    ]  # fmt: skip
    assert shown["graph"]["dependencies"][0] == ["a", "b"]


def test_what_views_need_of_a_piece_is_there_once_and_pieces_have_pieces() -> None:
    data = Parts(render(replace(SPLIT, parts=(SPLIT,)))).data["data"]
    (split,) = data["parts"]
    assert split["parts"][0] | {"report": None} == Parts(render(REPORT)).data["data"] | {"report": None}
    assert [part["report"]["ended"] for part in split["parts"]] == [part.ended for part in SPLIT.parts]
    assert [data["report"]["parts"], split["report"]["parts"]] == [None, None]


def test_it_asks_for_no_other_file_and_may_run_nothing_but_its_own_script() -> None:
    parts = Parts(render(REPORT))
    assert [link for link in parts.links if not link.startswith("#")] == []
    assert {link.removeprefix("#") for link in parts.links} <= set(parts.ids)
    (script,), (style,) = parts.held["script"], parts.held["style"]
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, script)]
    assert parts.policy.startswith(
        f"default-src 'none'; style-src 'sha256-{hashes[0]}'; script-src 'sha256-{hashes[1]}'"
    )
    assert not re.search(r"https?://|@import|url\(", script + style)


def test_ids_are_there_once_and_scripts_know_no_others() -> None:
    parts = Parts(render(REPORT))
    assert len(parts.ids) == len(set(parts.ids))
    used = set(re.findall(r'(?<!\.)(?:get|read)\("([\w-]+)"\)', parts.held["script"][0]))
    assert used <= set(parts.ids)


HOSTILE = "</script><script>alert(1)</script><!--<script> {{script}} \\u003c \u2028 \ud800"


@pytest.mark.parametrize("report", [REPORT, PLAIN, SPLIT])
def test_nothing_that_a_report_says_becomes_markup(report: Report) -> None:
    parts = tuple(replace(part, ended=HOSTILE, mode=HOSTILE) for part in report.parts)
    evil = replace(report, model=HOSTILE, signature=HOSTILE, versions={HOSTILE: HOSTILE}, parts=parts)
    if report.graph:
        evil = replace(evil, graph=with_source(report.graph, "a", HOSTILE))
    page, innocent = Parts(render(evil)), Parts(render(report))
    assert page.held == innocent.held
    assert page.ids == innocent.ids
    assert page.data["data"]["report"]["model"] == HOSTILE
    assert render(evil).count("<") == render(report).count("<")
