"""``explain``: the reports of what ``optimize``, ``optimize_`` and ``train_step`` scheduled, as text."""

from __future__ import annotations

from torch import nn

from autostream.api import OptimizedModule, dispatcher_of
from autostream.dispatch.optimized_callable import OptimizedCallable
from autostream.dispatch.step_functions import StepFunction
from autostream.errors import TargetError, a_type
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
    runs = _runs(value)
    return () if runs is None else runs.reports


def _runs(value: object) -> TrainStep | StepFunction | OptimizedCallable | None:
    """What runs the calls or steps, and has reports of them."""
    return value if isinstance(value, TrainStep | StepFunction | OptimizedCallable) else dispatcher_of(value)


def explain(optimized: nn.Module | TrainStep | StepFunction | OptimizedCallable, *, ops: int | None = 10) -> str:
    """Explain how much faster an optimized module or step is, why not more, what runs in parallel, and what to try.

    Args:
        optimized: what ``optimize`` or ``train_step`` returned, a model that was given to ``optimize_``, or a graph
            that ``backend="autostream"`` compiled.
        ops: show this many ops of each signature, the longest ones; ``None`` shows all.

    Returns:
        One report for each signature that it was compiled for, the most recently used first.

    Raises:
        TargetError: it is something else.
    """
    runs = _runs(optimized)
    if runs is None:
        hint = ": give it to optimize_ first" if isinstance(optimized, nn.Module) else ""
        raise TargetError(f"explain takes what optimize or train_step returned, not {a_type(optimized)}{hint}")
    reports = reports_of(optimized)
    if not reports and getattr(runs, "disabled", False):
        return "it runs plainly: AUTOSTREAM_DISABLE was set when it was optimized"
    if not reports and isinstance(optimized, TrainStep | StepFunction):
        return "nothing is known yet: the first step makes the optimizer's state, the next one is scheduled"
    if not reports:
        return _NOTHING + (_OF_METHODS if isinstance(optimized, OptimizedModule) else "")
    return "\n\n\n".join(answers(report, Selection(ops=ops)) for report in reports)


_NOTHING = "nothing is known yet: call it once, or give optimize() example inputs"

_OF_METHODS = ". Methods of the model, such as generate, call the model itself: schedule those calls with optimize_"
