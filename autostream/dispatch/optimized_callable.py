"""What runs in the place of a model, or of a part of one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from torch.fx import GraphModule

from autostream.reporting.report import Report


class OptimizedCallable(ABC):
    """Runs a model, or a part of one, and can tell about it."""

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it."""

    @property
    @abstractmethod
    def reports(self) -> tuple[Report, ...]:
        """What is known of each signature."""


MakeSection = Callable[[GraphModule, frozenset[int]], OptimizedCallable]
"""Takes a graph and the positions of its inputs that stay where they are from call to call."""
