"""The HTML page of a report: data, style and scripts in one file that makes no network requests.

dump     ──▶ Report.to_json() without what no view shows  ─┐
events   ──▶ the trace without what the report has        ─┼─▶ JSON within page.html, read by its scripts
places   ──▶ coordinates of the ops                       ─┘

The parts of a split model are nested in the same form. The page shows one part at a time, chosen by the address.

Nothing of a report becomes markup: scripts set text only. The page's content security policy allows its scripts, by
their hash, and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from autostream.reporting.dump import dump
from autostream.reporting.page.layers import places
from autostream.reporting.page.template import filled, hash_of, text_of
from autostream.reporting.timeline import Event, events

if TYPE_CHECKING:
    from autostream.reporting.report import Report

_NAMES = ("data", "text", "canvas", "summary", "timeline", "memory", "graph", "table", "main")
SCRIPTS = tuple(f"{name}.js" for name in _NAMES)
"""In the order in which they depend on each other."""


def render(report: Report) -> str:
    """A report as an HTML page.

    Example:
        >>> from autostream.reporting.report import Report
        >>> page = render(Report("<b>Net</b>", "1x8:float32 on cpu, eval, no gradients", "plain"))
        >>> page.startswith("<!doctype html>"), "<b>" in page
        (True, False)
    """
    style, script = text_of("page.css"), "\n".join(map(text_of, SCRIPTS))
    parts = {
        "style": style,
        "script": script,
        "style-hash": hash_of(style),
        "script-hash": hash_of(script),
        "data": _json(_data(report, dump(report))),
    }
    return filled("page.html", parts)


def _data(report: Report, dumped: dict[str, Any]) -> dict[str, Any]:
    """The data of a report and of each of its parts."""
    return {
        "report": _shown(dumped),
        "trace": [_lean(event) for event in events(report)],
        "places": places(report.graph) if report.graph else {},
        "parts": [_data(*part) for part in zip(report.parts, dumped["parts"], strict=True)],
    }


_OP = ("target", "source", "flops", "bytes_read", "bytes_written")
"""Fields of an op that views show."""


def _shown(dumped: dict[str, Any]) -> dict[str, Any]:
    """The report without large fields that no view shows, without timelines, which the trace has, and without parts."""
    graph = dumped["graph"] and {
        "ops": {name: {key: op[key] for key in _OP} for name, op in dumped["graph"]["ops"].items()},
        "dependencies": [(each["before"], each["after"]) for each in dumped["graph"]["dependencies"]],
    }
    chosen = dumped["chosen"] and {**dumped["chosen"], "schedule": {**dumped["chosen"]["schedule"], "decisions": []}}
    candidates = [_brief(candidate, chosen=candidate == dumped["chosen"]) for candidate in dumped["candidates"]]
    return {
        **dumped,
        "graph": graph,
        "chosen": chosen,
        "candidates": candidates,
        "timeline": None,
        "measured": None,
        "parts": None,
    }


def _brief(candidate: Mapping[str, Any], chosen: bool) -> dict[str, Any]:
    schedule = candidate["schedule"]
    waits = sum(len(launch["waits"]) for launch in schedule["launches"]) + len(schedule["join_waits"])
    brief = {"policy": schedule["policy"], "streams": schedule["streams"], "waits": waits}
    return {**candidate, "schedule": brief, "chosen": chosen}


def _lean(event: Event) -> Event:
    """A trace event without what the report has of the op."""
    return {**event, "args": {"slowdown": event["args"]["slowdown"]}} if event["ph"] == "X" else event


def _json(value: object) -> str:
    """JSON that cannot end the script element that it is in."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
