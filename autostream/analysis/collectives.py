"""What a collective asks of the other processes of its group, beside the kind of op and its bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._ops import OpOverload

from autostream.analysis.effects import group_of
from autostream.analysis.process_groups import processes_in
from autostream.analysis.values import concrete, input_tensors, tensors_in, value_of
from autostream.utils.operators import base_name, bound_arguments


class Terms(NamedTuple):
    """What the processes of a group have to say alike, and to each other.

    Attributes:
        alike: constants that have to be the same everywhere, such as ``"reduce_op=sum"``.
        sends: bytes for each process of the group, where they need not be the same everywhere; ``()`` if they are, or
            if they depend on data.
        receives: bytes from each.
    """

    alike: str = ""
    sends: tuple[int, ...] = ()
    receives: tuple[int, ...] = ()


def terms_of(node: fx.Node) -> Terms:
    """The terms of a collective; those of other nodes are empty.

    Example:
        >>> import torch.distributed._functional_collectives
        >>> graph = fx.Graph()
        >>> x = graph.placeholder("x")
        >>> terms_of(graph.call_function(torch.ops._c10d_functional.all_reduce.default, (x, "sum", "0"))).alike
        'reduce_op=sum'
    """
    if not isinstance(node.target, OpOverload) or not (group := group_of(node)):
        return Terms()
    arguments = bound_arguments(node, node.target)
    alike = ", ".join(f"{name}={arguments[name]}" for name in _ALIKE if name in arguments)
    if base_name(node.target) != "all_to_all_single":
        return Terms(alike)
    sent, received = (_numbers(arguments[name]) for name in ("input_split_sizes", "output_split_sizes"))
    if sent is None or received is None:
        return Terms(alike)
    (source,), (result,), processes = input_tensors(node), tensors_in(value_of(node)), processes_in(group)
    return Terms(alike, _bytes(source, sent, processes), _bytes(result, received, processes))


_ALIKE = ("reduce_op", "src", "root")
"""The names of constants in the schemas of PyTorch's collectives: the last two are ranks in the group."""


def _numbers(sizes: Sequence[Any]) -> tuple[int, ...] | None:
    """Sizes as numbers: those of the traced example if they are symbolic, ``None`` if they depend on data."""
    known = [value_of(size) if isinstance(size, fx.Node) else size for size in sizes]
    if any(not isinstance(size, int) and getattr(size.node, "hint", None) is None for size in known):
        return None
    return tuple(map(concrete, known))


def _bytes(tensor: torch.Tensor, rows: Sequence[int], processes: int) -> tuple[int, ...]:
    """The bytes of each part of a tensor that is split into so many rows, or evenly."""
    shape = [concrete(size) for size in tensor.shape]
    row = tensor.itemsize * torch.Size(shape[1:]).numel()
    return tuple(size * row for size in rows or [shape[0] // processes] * processes)
