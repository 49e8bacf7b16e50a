"""The page from its parts: data, style and scripts, all within one file that asks the network for nothing.

dump     ──▶ what Report.to_json() has, less what no view shows ─┐
events   ──▶ the trace, less what is told of the op already     ─┼─▶ JSON within page.html, read by its scripts
places   ──▶ where ops are drawn                                ─┘

The pieces of a model that was split are the same again, within it. The page shows one of all these at a time, the one
that its address asks for, so going to another is following a link.

Nothing of a report becomes markup: scripts set text only. The page's policy (CSP) lets it run its own scripts, known by
their hash, and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from autostream.reporting.dump import dump
from autostream.reporting.page.layers import places
from autostream.reporting.timeline import Event, events

if TYPE_CHECKING:
    from autostream.reporting.report import Report

_NAMES = ("data", "text", "canvas", "summary", "timeline", "memory", "graph", "table", "main")
SCRIPTS = tuple(f"{name}.js" for name in _NAMES)
"""In the order in which they build on each other."""


def render(report: Report) -> str:
    """A report as an HTML page.

    Example:
        >>> from autostream.reporting.report import Report
        >>> page = render(Report("<b>Net</b>", "1x8:float32 on cpu, eval, no gradients", "plain"))
        >>> page.startswith("<!doctype html>"), "<b>" in page
        (True, False)
    """
    style, script = _file("page.css"), "\n".join(map(_file, SCRIPTS))
    parts = {
        "style": style,
        "script": script,
        "style-hash": _hash(style),
        "script-hash": _hash(script),
        "data": _json(_data(report, dump(report))),
    }
    # All at once: what is put in is not looked at again, whatever it says.
    return re.sub(r"\{\{([\w-]+)\}\}", lambda found: parts[found[1]], _file("page.html"))


def _data(report: Report, dumped: dict[str, Any]) -> dict[str, Any]:
    """What there is to show of a report, and of each of its pieces."""
    return {
        "report": _shown(dumped),
        "trace": [_lean(event) for event in events(report)],
        "places": places(report.graph) if report.graph else {},
        "pieces": [_data(*piece) for piece in zip(report.parts, dumped["parts"], strict=True)],
    }


_OP = ("target", "source", "flops", "bytes_read", "bytes_written")
"""What views say of an op."""


def _shown(dumped: dict[str, Any]) -> dict[str, Any]:
    """The report without what is large and in no view, without the timelines, which the trace has, and its pieces."""
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
    """A trace event without what the report says of the op already."""
    return {**event, "args": {"slowdown": event["args"]["slowdown"]}} if event["ph"] == "X" else event


def _json(value: object) -> str:
    """JSON that can stand within a script element: no character of it opens or closes one."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _file(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")
