"""Seconds by stage, for reports, and for the limit on tuning time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from autostream.options import Options
from autostream.utils.logs import Log

log = Log(__name__)

TUNING = ("price", "search", "select")
"""The stages that ``tuning_seconds`` limits."""


@dataclass(slots=True)
class Stopwatch:
    """Wall-clock seconds by stage."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Add the time spent inside to a stage, and log it (``TORCH_LOGS="+autostream"``)."""
        start = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds
            log.debug("%s: %.3f s", stage, seconds)

    def left(self, options: Options) -> float:
        """The remaining seconds for tuning, at least 0."""
        return max(0.0, options.tuning_seconds - sum(self.seconds.get(stage, 0.0) for stage in TUNING))
