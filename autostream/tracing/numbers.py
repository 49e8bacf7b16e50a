"""Numbers that a model takes from tensors (``.item()``), which are symbols while it is traced, and where they go.

Those that only ops of the graph use are values like any other. One that Python gets to see or to keep, in a list, in
a sum over calls or in a line of text, would be a symbol for good, and a graph would never put another one there.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from autostream.errors import BranchError
from autostream.frontend.tree import UnknownNumberError
from autostream.operators import is_unknown, symbols_of
from autostream.tracing.leaks import Watched
from autostream.tracing.lines import users_frame, users_line


@dataclass(frozen=True, slots=True)
class _Taken:
    """Numbers that one call took: the names of their symbols, the user's line, and whether it looked at a value."""

    symbols: frozenset[str]
    line: str
    looked: bool


class Numbers:
    """Notes the numbers that are taken in a trace.

    Args:
        outermost: the code that calls the model; lines are those of what it calls.

    Attributes:
        seen: the numbers; each dies when nobody holds it any more.
    """

    def __init__(self, outermost: CodeType) -> None:
        self._outermost = outermost
        self._taken: list[_Taken] = []
        self._told = frozenset[str]()
        self.seen: Watched = []

    def note(self, func: Any, result: Any, frame: FrameType) -> None:
        """Remember the numbers that a function of PyTorch's returned, which was called in this frame."""
        if isinstance(result, Tensor) or not (found := unknown_in(result)):
            return
        self.seen += map(weakref.ref, found)
        symbols = frozenset[str]().union(*map(symbols_of, found))
        line = users_line(users_frame(frame, self._outermost))
        self._taken.append(_Taken(symbols, line, func in _LOOKING))

    @contextmanager
    def untold(self) -> Iterator[None]:
        """Refuse, in this thread, that somebody makes text of a number, or a float.

        Whoever catches that, as logging does, is found by :meth:`check_used`.
        """
        tracing: int | None = threading.get_ident()

        def telling(method: Callable[..., Any]) -> Callable[..., Any]:
            def tell(number: Any, *format_spec: str) -> Any:
                if threading.get_ident() == tracing and not _is_torchs(sys._getframe(1)):
                    self._told = symbols_of(number)
                    raise UnknownNumberError(number)
                return method(number, *format_spec)

            return tell

        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(logging, "raiseExceptions", False))  # it would print them
            for kind, name in _TELLING:
                stack.enter_context(mock.patch.object(kind, name, telling(getattr(kind, name))))
            try:
                yield
            finally:
                tracing = None  # somebody may have kept a patched method

    def refusal(self, symbols: frozenset[str]) -> BranchError:
        """What to raise where a number that is computed from these symbols goes to Python."""
        return _refusal(next((own.line for own in self._taken if not symbols.isdisjoint(own.symbols)), ""))

    def check_used(self, module: fx.GraphModule) -> None:
        """See that of what each line looked at, ops of the graph use something, and that nobody else was told.

        Raises:
            BranchError: what was looked at can have gone to Python only.
        """
        if self._told:
            raise self.refusal(self._told)
        looks = defaultdict[str, set[str]](set)  # by line: of a tensor's list of numbers, ops may use some
        for own in self._taken:
            if own.looked:
                looks[own.line] |= own.symbols
        used = frozenset[str]().union(*map(_used, _graphs(module))) if looks else frozenset()
        for line, symbols in looks.items():
            if used.isdisjoint(symbols):
                raise _refusal(line)

    def kept(self) -> BranchError | None:
        """What to raise where somebody outside of the graph holds on to a number; nothing where nobody does."""
        alive = (number for number in (own() for own in self.seen) if number is not None)
        return next((self.refusal(symbols_of(number)) for number in alive), None)


def unknown_in(value: Any) -> list[Any]:
    """The numbers in a value that only a run tells.

    Example:
        >>> unknown_in({"one": 1.0, "shape": torch.Size([2])})
        []
    """
    return [leaf for leaf in tree_leaves(value) if is_unknown(leaf)]


def _refusal(line: str) -> BranchError:
    return BranchError(
        f"the number of a tensor goes to Python, which a graph would do only once: return the tensor instead{line}"
    )


def _graphs(module: fx.GraphModule) -> Iterator[fx.Graph]:
    return (part.graph for part in module.modules() if isinstance(part, fx.GraphModule))


def _used(graph: fx.Graph) -> frozenset[str]:
    """The symbols of the numbers that a graph takes for something else than to compute numbers."""
    users = (node for node in graph.nodes if not is_unknown(node.meta.get("val")))
    taken = (value for node in users for value in (own.meta.get("val") for own in node.all_input_nodes))
    return frozenset[str]().union(*(symbols_of(value) for value in taken if is_unknown(value)))


_LOOKING = {Tensor.item, Tensor.tolist}
"""What looks at the value of a tensor; others look at sizes that depend on one."""

_TELLING = (
    *((kind, name) for kind in (torch.SymInt, torch.SymFloat, torch.SymBool) for name in ("__repr__", "__format__")),
    (torch.SymFloat, "__float__"),
)

_TORCH = os.path.dirname(torch.__file__) + os.sep


def _is_torchs(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_TORCH)
