"""Keeps products that are added in place in place, through TorchInductor.

    addmm_(sum, x, y)  ──▶  an op of our own that writes ``sum``  ──Inductor──▶  the same  ──▶  addmm_(sum, x, y)

AOTAutograd would make ``addmm`` of it, whose result is new memory: the sum is copied there first, and copied back if
it is an argument. It also makes an op functional that is not ATen's and writes an argument (``auto_functionalized``),
but that Inductor runs in place where the old value is not needed any more, and on a copy where it is.

Products whose matrices Inductor may pad, as cuBLAS is slow where rows are no multiples of 16 bytes, stay as they are.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, fx

aten = torch.ops.aten

_LIBRARY = torch.library.Library("autostream", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("addmm_(Tensor(a!) total, Tensor x, Tensor y) -> ()")  # type: ignore[no-untyped-call]


def _addmm_(total: Tensor, x: Tensor, y: Tensor) -> None:
    total.addmm_(x, y)


_LIBRARY.impl("addmm_", _addmm_, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("autostream::addmm_", lambda total, x, y: None)

_ALIGNMENT = 16
"""Bytes."""

_KEPT = torch.ops.autostream.addmm_.default


def keep_in_place(module: fx.GraphModule) -> fx.GraphModule:
    """A graph with an op that Inductor keeps for each ``addmm_``; the same graph if it has none.

    Args:
        module: a graph of ATen ops with values; it is not changed.
    """
    if not any(map(_stays_in_place, module.graph.nodes)):
        return module
    graph = copy.deepcopy(module.graph)
    for node in filter(_stays_in_place, graph.nodes):
        node.replace_all_uses_with(node.args[0])
        node.target, node.meta["val"] = _KEPT, None
    return fx.GraphModule(module, graph)


def restore_in_place(module: fx.GraphModule) -> fx.GraphModule:
    """Put ``addmm_`` back into a graph of kernels, which is changed and returned."""
    for node in module.graph.find_nodes(op="call_function", target=_KEPT):
        node.target = aten.addmm_.default
    module.recompile()
    return module


def _stays_in_place(node: fx.Node) -> bool:
    if node.target is not aten.addmm_.default or node.kwargs:
        return False
    values: list[Tensor] = [source.meta["val"] for source in node.all_input_nodes]
    sizes = [(size, value.itemsize) for value in values for size in value.shape]
    return all(isinstance(size, int) and size * itemsize % _ALIGNMENT == 0 for size, itemsize in sizes)
