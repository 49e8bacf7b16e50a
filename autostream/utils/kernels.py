"""Compiled kernels as functions of an fx graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


class Kernel:
    """A compiled kernel as a call target in an fx graph, which prints it by its name.

    Kernels are compared by identity.

    Args:
        name: e.g. ``"triton_poi_fused_relu_0"``.
        launch: launches it on the current stream; takes tensors and numbers, returns nothing.
        written: positions of the arguments that it mutates.
        overwritten: those of them that it does not read.
        content: distinguishes it from kernels with the same name, in every process, e.g. its source code.
        recipe: JSON from which another process can make it, or ``None``.

    Example:
        >>> import torch
        >>> double = Kernel("double", lambda x, out: torch.mul(x, 2, out=out), frozenset({1}), frozenset({1}))
        >>> x, out = torch.ones(2), torch.empty(2)
        >>> double(x, out)
        >>> out
        tensor([2., 2.])
    """

    def __init__(
        self,
        name: str,
        launch: Callable[..., Any],
        written: frozenset[int],
        overwritten: frozenset[int],
        content: str = "",
        recipe: Mapping[str, Any] | None = None,
    ) -> None:
        self.__name__ = self.__qualname__ = name
        self.written = written
        self.overwritten = overwritten
        self.content = content
        self.recipe = recipe
        self._launch = launch

    def __call__(self, *args: Any) -> None:
        """Launch it."""
        self._launch(*args)

    def __repr__(self) -> str:
        """Its name."""
        return self.__name__
