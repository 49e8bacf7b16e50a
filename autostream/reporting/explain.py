"""``autostream.explain``."""

from __future__ import annotations

from autostream.api import OptimizedModule, reports_of
from autostream.errors import TargetError
from autostream.reporting.text import render


def explain(optimized: OptimizedModule, *, ops: int | None = None) -> str:
    """Say what runs beside what in an optimized module, what that gained, and why not more.

    Args:
        optimized: what :func:`autostream.optimize` returned, or a piece of a model that ``torch.compile`` made of it.
        ops: show only this many ops of each signature, the longest ones; ``None`` shows all.

    Returns:
        One report for each signature that it was prepared for or called with, the most recently used first.

    Raises:
        TargetError: it is something else.
    """
    if not isinstance(optimized, OptimizedModule):
        raise TargetError(f"explain takes what optimize returned, not a {type(optimized).__name__}")
    reports = reports_of(optimized)
    if not reports:
        return "nothing is known yet: call it once, or give optimize() example inputs"
    return "\n\n\n".join(render(report, ops=ops) for report in reports)
