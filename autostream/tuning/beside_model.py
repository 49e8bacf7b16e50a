"""On a CPU, measure a schedule beside the model itself.

Nothing is captured there: a schedule saves some of the model's Python, its guards cost some, and PyTorch has fused CPU
kernels, such as those of an LSTM, for what is many ops in a graph. So the clock decides, as between schedules.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

from autostream.errors import first_line
from autostream.ir import Decision
from autostream.options import Options, paranoid
from autostream.reporting.report import Report
from autostream.runtime.restore import Restore
from autostream.tuning.select import call_timer, interleaved

GAIN = 0.05
"""The share by which a schedule must be faster: a CPU has other work to do, which disturbs measurements."""


def is_contested(options: Options, report: Report) -> bool:
    """Whether the model itself may run in place of what a report describes.

    Not if a policy, ``strict`` or a check of all schedules asks for the schedule, nor if several processes run it: they
    communicate in its order.
    """
    graphs = [part.graph for part in (report, *report.parts) if part.graph is not None]
    here = bool(graphs) and all(graph.device == "cpu" and not graph.collectives for graph in graphs)
    return options.policy == "auto" and not options.strict and here and not paranoid()


def beside_model(model: Callable[[], object], scheduled: Callable[[], object], restore: Restore) -> Decision:
    """Whether the model itself runs a call (``"plain"``) or its schedule (``"not plain"``), with both times.

    Args:
        model: runs the call as it is.
        scheduled: runs it as scheduled, with all checks.
        restore: restores what either writes.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # the model's own, which PyTorch's functions give in each run
            own_us, scheduled_us = interleaved([call_timer(run, restore) for run in (model, scheduled)])
    except Exception as error:  # as where each run fills one more place of a cache
        return Decision("", "not plain", f"it cannot be timed beside the model itself: {first_line(error)}")
    times = f"a call takes {scheduled_us:,.1f} µs as scheduled"
    if scheduled_us < own_us * (1 - GAIN):
        return Decision("", "not plain", f"{times}, and {own_us:,.1f} µs as it is")
    return Decision("", "plain", f"{times}, which is not {GAIN:.0%} less than {own_us:,.1f} µs as it is")


def without_trial(report: Report) -> Decision:
    """The same where the clock cannot tell, since a run more would be seen: the model itself unless streams gain."""
    modes = {part.mode for part in (report, *report.parts)}
    if "threads" in modes:
        return Decision("", "not plain", f"{_NO_TRIAL}, and several streams are faster than one")
    return Decision("", "plain", f"{_NO_TRIAL}, and on one stream there is nothing to gain on a CPU")


_NO_TRIAL = "it cannot be timed beside the model itself, since effects of one more run might be seen"
