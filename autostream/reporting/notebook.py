"""A report in a notebook: its summary as an HTML table."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import TYPE_CHECKING

from autostream.reporting.text import lines

if TYPE_CHECKING:
    from autostream.reporting.report import Report


def render(reports: Iterable[Report]) -> str:
    """A table for each report.

    Example:
        >>> from autostream.reporting.report import Report
        >>> print(render([Report("A<B>", "1x8:float32 on cpu, eval, no gradients", "plain")]))
        <table>
        <tr><th>model</th><td>A&lt;B&gt;</td></tr>
        <tr><th>signature</th><td>1x8:float32 on cpu, eval, no gradients</td></tr>
        <tr><th>runs as</th><td>the plain model</td></tr>
        </table>
    """
    return "\n".join(_table(report) for report in reports)


def _table(report: Report) -> str:
    rows = (f"<tr><th>{escape(key)}</th><td>{escape(value)}</td></tr>" for key, value in lines(report))
    return "\n".join(["<table>", *rows, "</table>"])
