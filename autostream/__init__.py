"""The scheduler that ``torch.compile`` does not have.

fast = autostream.optimize(model)      # same module, same outputs
with torch.inference_mode():
    y = fast(x)
print(autostream.explain(fast))        # what runs beside what, what it gained, and why not more
"""

from autostream.api import OptimizedModule, explain, optimize
from autostream.errors import (
    AutostreamError,
    CaptureError,
    MismatchError,
    OptionError,
    ScheduleError,
    TargetError,
    TraceError,
)
from autostream.reporting.report import Report
from autostream.version import VERSION

__version__ = VERSION

__all__ = [
    "AutostreamError",
    "CaptureError",
    "MismatchError",
    "OptimizedModule",
    "OptionError",
    "Report",
    "ScheduleError",
    "TargetError",
    "TraceError",
    "__version__",
    "explain",
    "optimize",
]
