"""The scheduler that ``torch.compile`` does not have.

fast = autostream.optimize(model)      # same module, same outputs
with torch.inference_mode():
    y = fast(x)
print(autostream.explain(fast))        # what runs in parallel, how much faster that is, and why not more

autostream.optimize_(model)            # the same in place, for code that has the model already: trainers, generate

step = autostream.train_step(model, optimizer, loss_fn)    # forward, loss, backward, optimizer: one graph
loss = step(x, y)

@autostream.step(optimizers=[first, second])               # any other step, as you write it
def update(batch): ...

both = autostream.Parallel(left, right)                    # side by side, by hand

for batch in autostream.prefetch(loader, "cuda"):          # the next ones are copied meanwhile
    ...

print(autostream.split(model, [x], 4, device="h200"))      # balanced stages for torch.distributed.pipelining
"""

from autostream.api import OptimizedModule, optimize, optimize_, restore
from autostream.errors import (
    AutostreamError,
    CaptureError,
    MismatchError,
    OptionError,
    ScheduleError,
    TargetError,
    TraceError,
)
from autostream.explaining import explain
from autostream.frontend.buckets import Bucket
from autostream.parallel import Parallel
from autostream.prefetching import prefetch
from autostream.reporting.report import Report
from autostream.splitting import split
from autostream.training import step, train_step
from autostream.utils import logs
from autostream.version import VERSION

__version__ = VERSION

logs.start()

__all__ = [
    "AutostreamError",
    "Bucket",
    "CaptureError",
    "MismatchError",
    "OptimizedModule",
    "OptionError",
    "Parallel",
    "Report",
    "ScheduleError",
    "TargetError",
    "TraceError",
    "explain",
    "optimize",
    "optimize_",
    "prefetch",
    "restore",
    "split",
    "step",
    "train_step",
]
