"""The interface of everything that runs in place of a model, or of a part of one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

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


class SharingCallable(OptimizedCallable):
    """Runs a part of a model, and may leave results in the memory where a CUDA graph computes them."""

    @abstractmethod
    def share_outputs(self, values: Sequence[Any], indices: frozenset[int], *, aliased: bool = False) -> frozenset[int]:
        """Return outputs without a copy from now on, where that can be; the next call overwrites them.

        Args:
            values: inputs like those of the calls that this is for.
            indices: of outputs.
            aliased: whether several of them may share memory.

        Returns:
            The indices of the outputs that are shared.
        """


class MakeSection(Protocol):
    """Compiles a part of a program."""

    def __call__(
        self, module: GraphModule, bound: frozenset[int], *, alone: bool = False, of: int = 1
    ) -> SharingCallable:
        """Compile a graph.

        Args:
            module: the graph.
            bound: the positions of its inputs that keep their addresses from call to call.
            alone: whether it has a memory pool of its own.
            of: how many parts share the seconds of tuning.
        """
