"""``explain``: the reports of what ``optimize`` and ``train_step`` returned, as text."""

from __future__ import annotations

from autostream.api import OptimizedModule
from autostream.dispatch.optimized_callable import OptimizedCallable
from autostream.dispatch.step_functions import StepFunction
from autostream.errors import TargetError
from autostream.reporting.ops import Selection
from autostream.reporting.report import Report
from autostream.reporting.text import answers
from autostream.training import TrainStep


def reports_of(value: object) -> tuple[Report, ...]:
    """The reports of what ``optimize`` or ``train_step`` returned; none of anything else.

    Example:
        >>> reports_of(len)
        ()
    """
    if isinstance(value, TrainStep | StepFunction | OptimizedCallable):
        return value.reports
    return value._autostream.reports if isinstance(value, OptimizedModule) else ()


def explain(optimized: OptimizedModule | TrainStep | StepFunction | OptimizedCallable, *, ops: int | None = 10) -> str:
    """Explain how much faster an optimized module or step is, why not more, what runs in parallel, and what to try.

    Args:
        optimized: what ``optimize`` or ``train_step`` returned, or a graph that ``backend="autostream"`` compiled.
        ops: show this many ops of each signature, the longest ones; ``None`` shows all.

    Returns:
        One report for each signature that it was compiled for, the most recently used first.

    Raises:
        TargetError: it is something else.
    """
    if not isinstance(optimized, OptimizedModule | TrainStep | StepFunction | OptimizedCallable):
        raise TargetError(f"explain takes what optimize or train_step returned, not a {type(optimized).__name__}")
    reports = reports_of(optimized)
    runs = optimized._autostream if isinstance(optimized, OptimizedModule) else optimized
    if not reports and getattr(runs, "disabled", False):
        return "it runs plainly: AUTOSTREAM_DISABLE was set when it was optimized"
    if not reports and isinstance(optimized, TrainStep | StepFunction):
        return "nothing is known yet: the first step makes the optimizer's state, the next one is scheduled"
    if not reports:
        return "nothing is known yet: call it once, or give optimize() example inputs"
    return "\n\n\n".join(answers(report, Selection(ops=ops)) for report in reports)
