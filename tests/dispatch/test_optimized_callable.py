"""What runs in the place of a model."""

from __future__ import annotations

from typing import Any

import pytest

from autostream.dispatch.optimized_callable import OptimizedCallable
from autostream.reporting.report import Report


class Doubles(OptimizedCallable):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return 2 * args[0]

    @property
    def reports(self) -> tuple[Report, ...]:
        return ()


def test_what_runs_and_tells_is_enough() -> None:
    doubles = Doubles()
    assert doubles(3) == 6
    assert doubles.reports == ()


def test_what_tells_nothing_is_refused() -> None:
    class Silent(OptimizedCallable):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return None

    with pytest.raises(TypeError, match="abstract"):
        Silent()  # type: ignore[abstract]
