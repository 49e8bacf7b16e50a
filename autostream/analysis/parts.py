"""Divides storages into parts, so that ops that access different parts do not depend on each other.

A concatenation is one storage of which each branch writes a slice. Slices share no byte, but slices of columns
interleave in memory:

    row:      0                1                2
    bytes:    AAAAAABBBBCCCCCC AAAAAABBBBCCCCCC AAAAAABBBBCCCCCC      A, B, C: three slices, so three parts

A storage is treated as rows of one length, and a tensor as the range of bytes that it touches in every row. The ends of
the ranges cut a row into parts. For any row length, tensors with no part in common have no byte in common. The length
that separates most pairs of tensors is chosen. A row as long as the storage gives plain ranges.

Only results of calls that take no tensor, like ``empty``, are divided: their strides are in the call. Other results may
have other strides on the device than in the trace, and arguments may alias in ways that only storages tell.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from autostream.analysis.effects import Effects
from autostream.analysis.values import concrete, storages_in, value_of
from autostream.utils.kernels import Kernel
from autostream.utils.operators import base_name
from autostream.utils.storages import storage_of

MOST_PARTS = 256
"""A storage of more parts stays whole: an op that uses all of it accesses every part."""

Span = tuple[int, int]
"""A range of bytes of every row, end excluded."""


@dataclass(frozen=True, slots=True)
class Division:
    """A storage that ops use in parts.

    Attributes:
        base: the node that allocates it; the storage has the same name.
        views: all nodes that alias it and launch nothing; each is a view of the base or of another view.
        parts: names of its parts, in their order in a row.
        touched: node to the parts that its value touches; a node that is missing touches all.
    """

    base: fx.Node
    views: tuple[fx.Node, ...]
    parts: tuple[str, ...]
    touched: Mapping[fx.Node, tuple[str, ...]]


def divide(effects: Mapping[fx.Node, Effects]) -> tuple[Division, ...]:
    """Divide the storages of which ops write slices that other ops do not touch.

    Args:
        effects: what each node of a program does, in program order.

    Example:
        >>> from autostream.analysis.effects import effects_of
        >>> graph = fx.Graph()
        >>> both = graph.call_function(torch.ops.aten.empty.memory_format, ([2, 6],))
        >>> left = graph.call_function(torch.ops.aten.slice.Tensor, (both, 1, 0, 4))
        >>> right = graph.call_function(torch.ops.aten.slice.Tensor, (both, 1, 4, 6))
        >>> filled = graph.call_function(torch.ops.aten.fill_.Scalar, (left, 1.0))
        >>> both.meta["val"] = torch.empty(2, 6)
        >>> left.meta["val"] = filled.meta["val"] = both.meta["val"][:, :4]
        >>> right.meta["val"] = both.meta["val"][:, 4:]
        >>> (division,) = divide({node: effects_of(node) for node in graph.nodes})
        >>> division.touched[left], division.touched[right]
        (('empty_memory_format[0]',), ('empty_memory_format[1]',))
    """
    written = (value_of(node) for effect in effects.values() for node in effect.writes)
    sliced = {storage_of(value) for value in written if _is_known(value) and _is_slice(value)}
    if not sliced:
        return ()
    viewers: dict[int, list[fx.Node]] = {storage: [] for storage in sliced}
    for node in effects:
        if node.op == "output":
            continue
        for storage in storages_in(value_of(node)) & sliced:
            viewers[storage].append(node)
    divisions = (_divided(nodes, effects) for nodes in viewers.values() if _is_divisible(nodes, effects))
    return tuple(division for division in divisions if division is not None)


def spans(tensors: Sequence[Tensor]) -> tuple[int, list[Span | None]]:
    """The length of a row, in bytes, and the range of each tensor in it: ``None`` if the tensor is no range of a row.

    Args:
        tensors: views of one storage, of known sizes.

    Example:
        Rows of a matrix are contiguous; columns recur in each row of 3 · 4 bytes:

        >>> x = torch.empty(4, 3)
        >>> spans([x[:2], x[2:]]), spans([x[:, :1], x[:, 1:]])
        ((48, [(0, 24), (24, 48)]), (12, [(0, 4), (4, 12)]))
    """
    size = tensors[0].untyped_storage().nbytes()
    steps = {stride * t.itemsize for t in tensors for n, stride in zip(t.shape, t.stride(), strict=True) if n > 1}
    candidates = [
        (row, [_span(tensor, row) for tensor in tensors]) for row in sorted({size} | steps - {0}, reverse=True)
    ]
    return max(candidates, key=lambda candidate: _disjoint_pairs(candidate[1]))


def _span(tensor: Tensor, row: int) -> Span | None:
    """The range that a tensor touches in each row, unless it touches nothing or runs over the end of a row."""
    start = concrete(tensor.storage_offset()) * tensor.itemsize % row
    end = start + tensor.itemsize
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        # A stride of whole rows leads to the same bytes of another row.
        end += (size - 1) * stride * tensor.itemsize if stride * tensor.itemsize % row else 0
    return (start, end) if tensor.numel() and end <= row else None


def _disjoint_pairs(ranges: Iterable[Span | None]) -> int:
    """How many pairs of different ranges do not overlap."""
    known = {span for span in ranges if span is not None}
    starts = sorted(start for start, _ in known)
    return sum(len(starts) - bisect_left(starts, end) for _, end in known)


def _divided(nodes: Sequence[fx.Node], effects: Mapping[fx.Node, Effects]) -> Division | None:
    """Cut a storage at the ends of the ranges that its tensors touch."""
    base = nodes[0]
    known = [node for node in nodes if _is_known(value_of(node))]
    row, ranges = spans([value_of(node) for node in known])
    cuts = sorted({0, row}.union(*(span for span in ranges if span is not None)))
    parts = tuple(f"{base.name}[{at}]" for at in range(len(cuts) - 1))
    if not _disjoint_pairs(ranges) or len(parts) > MOST_PARTS:
        return None
    at = {cut: index for index, cut in enumerate(cuts)}
    touched = {
        node: parts[at[span[0]] : at[span[1]]]
        for node, span in zip(known, ranges, strict=True)
        if span is not None and span != (0, row)
    }
    return Division(base, tuple(node for node in nodes[1:] if not effects[node].launches), parts, touched)


# --- what may be divided ---------------------------------------------------------------------------------------------


def _is_known(value: object) -> bool:
    """Whether a value is one tensor whose sizes are plain numbers, like that of its storage."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return False
    numbers = (value.untyped_storage().nbytes(), value.storage_offset(), *value.shape, *value.stride())
    return all(isinstance(number, int) for number in numbers)


def _is_slice(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.itemsize < tensor.untyped_storage().nbytes()


def _is_divisible(nodes: Sequence[fx.Node], effects: Mapping[fx.Node, Effects]) -> bool:
    """Whether the fake values tell which bytes of a storage each op touches, given all nodes whose values alias it.

    A node that launches nothing must be a view of the base, directly or through others: it is issued with the base.
    """
    base, *others = nodes
    if not isinstance(base.target, OpOverload) or base.all_input_nodes or not _is_known(value_of(base)):
        return False
    views = {base}
    for node in others:
        if not effects[node].launches:
            if effects[node].may_copy or not views.issuperset(node.all_input_nodes):
                return False
            views.add(node)
    users = {user for node in nodes for user in node.users if user not in views and user.op != "output"}
    return all(effects[user].launches and _keeps_to_its_arguments(user.target) for user in users)


def _keeps_to_its_arguments(target: object) -> bool:
    """Whether a call touches no bytes outside the tensors that it takes, and does not resize them."""
    if not isinstance(target, OpOverload):
        return isinstance(target, Kernel)
    if target.namespace not in ("aten", "inductor", "_c10d_functional") or torch.Tag.inplace_view in target.tags:
        return False
    return not base_name(target).startswith("as_strided")
