"""The interface of everything that runs in place of a model, or of a part of one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from torch.fx import GraphModule

from autostream.reporting.report import Report


class OptimizedCallable(ABC):
    """Runs a model, or a part of one, and has reports of how."""

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it."""

    @property
    @abstractmethod
    def reports(self) -> tuple[Report, ...]:
        """A report for each signature."""


MakeSection = Callable[[GraphModule, frozenset[int]], OptimizedCallable]
"""Compiles a graph, given the positions of its inputs that keep their addresses from call to call."""
