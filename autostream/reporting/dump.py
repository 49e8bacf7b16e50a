"""A report as JSON: its fields, and the numbers derived from them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any

from autostream.errors import a_type
from autostream.reporting.explanation import explanation_of
from autostream.reporting.parts import captured_share
from autostream.reporting.summary import summary_of

if TYPE_CHECKING:
    from autostream.reporting.report import Report

SCHEMA = 2
"""Incremented when a key is renamed, removed or changes its meaning; not for new keys."""


def dump(report: Report) -> dict[str, Any]:
    """Turn a report into dicts, lists, strings, numbers and ``None``, for :func:`json.dumps`.

    The keys are the fields of :class:`autostream.reporting.report.Report` and, recursively, of its values. Sets become
    sorted lists, enum members their values, and numbers that are not finite ``None``. These keys are added:

    - ``schema``
    - ``summary``: a :class:`autostream.reporting.summary.Summary`; ``None`` where nothing was priced.
    - ``explanation``: an :class:`autostream.reporting.explanation.Explanation`; ``None`` where nothing was scheduled.
    - ``captured_share``: of the time of a model's parts; ``None`` where none of them is timed.

    Example:
        >>> from autostream.reporting.report import Report
        >>> dumped = dump(Report("Net", "1x8:float32 on cpu, eval, no gradients", "plain"))
        >>> dumped["schema"], dumped["model"], dumped["refusals"], dumped["summary"]
        (2, 'Net', [], None)
    """
    numbers, parts = summary_of(report), [dump(part) for part in report.parts]
    answers = _plain(explanation_of(report, numbers))
    added = {"summary": _plain(numbers), "explanation": answers, "captured_share": captured_share(report)}
    return {"schema": SCHEMA, **_plain(report), "parts": parts, **added}


def _plain(value: Any) -> Any:
    match value:
        case Enum():
            return value.value
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {str(key): _plain(inner) for key, inner in value.items()}
        case frozenset():
            return sorted(_plain(inner) for inner in value)
        case tuple() | list():
            return [_plain(inner) for inner in value]
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    raise TypeError(f"a report holds {a_type(value)}, which JSON has no form for: {value!r}")
