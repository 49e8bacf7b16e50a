"""Checks that ``as_strided`` reads no memory between or beyond the elements of an argument.

A strided input has gaps, and its storage may be larger than the input. A captured graph copies only the elements of
its inputs, and so does the code that undoes the writes of a trial run: the memory around them is not copied.
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

_AS_STRIDED = frozenset({aten.as_strided.default, aten.as_strided_.default, aten.as_strided_copy.default})


def check_as_strided(graph: fx.Graph) -> None:
    """Refuse ``as_strided`` of an argument, unless an argument without gaps covers all memory that the result has.

    Raises:
        TraceError: the message has the user's line.

    Example:
        >>> graph = fx.Graph()
        >>> x = graph.placeholder("x")
        >>> x.meta["val"] = torch.empty(8)[::2]
        >>> pairs = graph.call_function(aten.as_strided.default, (x, [4, 2], [2, 1]))
        >>> check_as_strided(graph)
        Traceback (most recent call last):
        autostream.errors.TraceError: as_strided reaches memory of an argument between or behind its elements
    """
    arguments: dict[int, list[Tensor]] = {}
    for node in graph.find_nodes(op="placeholder"):
        if isinstance(value := node.meta.get("val"), Tensor):
            arguments.setdefault(storage_of(value), []).append(value)
    for node in graph.nodes:
        if node.target in _AS_STRIDED:
            base = node.args[0].meta["val"]
            sharing = arguments.get(storage_of(base), [])
            dense = [argument for argument in sharing if not has_gaps(argument)]
            if sharing and not any(_within(_bytes_read(node, base), argument) for argument in dense):
                line = user_line(node.stack_trace)
                raise TraceError(
                    "as_strided reaches memory of an argument between or behind its elements" + (line and f": {line}")
                )


def _bytes_read(node: fx.Node, base: Tensor) -> tuple[int, int]:
    """The range of bytes in the storage of ``base`` that a call's result covers, end excluded."""
    size: Any
    stride: Any
    size, stride = node.args[1:3]
    offset: Any = node.args[3] if len(node.args) > 3 else node.kwargs.get("storage_offset")
    if not all(isinstance(number, int) for number in (*size, *stride, offset or 0)):
        return 0, sys.maxsize  # it depends on values of tensors
    with torch.no_grad():
        return span_of(base.as_strided(size, stride, offset))


def _within(span: tuple[int, int], argument: Tensor) -> bool:
    start, end = span_of(argument)
    return start <= span[0] and span[1] <= end
