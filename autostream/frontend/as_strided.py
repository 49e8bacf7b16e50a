"""Memory around a program's arguments, which ``as_strided`` reaches and nothing else does.

A strided input has gaps, and behind an input its storage may go on. Whoever copies arguments, as a captured graph does
and whoever puts back what a trial run has written, copies their elements. What lies between or beyond stays behind.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, fx

from autostream.analysis.source import user_line
from autostream.errors import TraceError
from autostream.utils.storages import has_gaps, span_of, storage_of

aten = torch.ops.aten

_LAYING_OUT = frozenset({aten.as_strided.default, aten.as_strided_.default, aten.as_strided_copy.default})


def check_reach(graph: fx.Graph) -> None:
    """Refuse a graph that lays out memory of its arguments anew, unless one of them fills all that it then covers.

    Raises:
        TraceError: which line does.

    Example:
        >>> graph = fx.Graph()
        >>> x = graph.placeholder("x")
        >>> x.meta["val"] = torch.empty(8)[::2]
        >>> pairs = graph.call_function(aten.as_strided.default, (x, [4, 2], [2, 1]))
        >>> check_reach(graph)
        Traceback (most recent call last):
        autostream.errors.TraceError: as_strided reaches memory of an argument between or behind its elements
    """
    arguments: dict[int, list[Tensor]] = {}
    for node in graph.find_nodes(op="placeholder"):
        if isinstance(value := node.meta.get("val"), Tensor):
            arguments.setdefault(storage_of(value), []).append(value)
    for node in graph.nodes:
        if node.target in _LAYING_OUT:
            given = node.args[0].meta["val"]
            around = arguments.get(storage_of(given), [])
            filled = [argument for argument in around if not has_gaps(argument)]
            if around and not any(_within(_reached(node, given), argument) for argument in filled):
                line = user_line(node.stack_trace)
                raise TraceError(
                    "as_strided reaches memory of an argument between or behind its elements" + (line and f": {line}")
                )


def _reached(node: fx.Node, given: Tensor) -> tuple[int, int]:
    """First byte and the byte after the last, in the storage of ``given``, of what a call lays out."""
    size: Any
    stride: Any
    size, stride = node.args[1:3]
    offset: Any = node.args[3] if len(node.args) > 3 else node.kwargs.get("storage_offset")
    if not all(isinstance(number, int) for number in (*size, *stride, offset or 0)):
        return 0, sys.maxsize  # it depends on data
    with torch.no_grad():
        return span_of(given.as_strided(size, stride, offset))


def _within(reached: tuple[int, int], argument: Tensor) -> bool:
    start, end = span_of(argument)
    return start <= reached[0] and reached[1] <= end
