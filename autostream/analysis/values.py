"""Helpers for the fake values and arguments of fx nodes."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from autostream.utils.storages import storage_of


def value_of(node: fx.Node) -> Any:
    """The node's fake value: a tensor, a number, a tuple of them, or ``None`` if there is none."""
    return node.meta.get("val")


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors in a (nested) value."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def input_tensors(node: fx.Node) -> list[torch.Tensor]:
    """All tensors among the values of a node's arguments."""
    return [tensor for source in node.all_input_nodes for tensor in tensors_in(value_of(source))]


def storages_in(value: Any) -> set[int]:
    """The identities of the storages of all tensors in a value; sparse tensors have none."""
    return {storage_of(tensor) for tensor in tensors_in(value) if tensor.layout is torch.strided}


def nodes_in(argument: Any) -> tuple[fx.Node, ...]:
    """The nodes in one (nested) argument.

    Example:
        >>> x = fx.Graph().placeholder("x")
        >>> nodes_in([x, 1, (x, None)])
        (x, x)
    """
    if isinstance(argument, fx.Node):
        return (argument,)
    if isinstance(argument, (list, tuple)):
        return tuple(node for item in argument for node in nodes_in(item))
    return ()


def submodule_graph(node: fx.Node) -> fx.Graph:
    """The graph of the submodule that a ``get_attr`` node names."""
    owner = node.graph.owning_module
    assert owner is not None, "a graph with submodules belongs to a module"
    module = owner.get_submodule(str(node.target))
    assert isinstance(module, fx.GraphModule)
    return module.graph


def concrete(size: Any) -> int:
    """A size as a number: that of the traced example if it is symbolic, 1 if it depends on data.

    Example:
        >>> concrete(3)
        3
    """
    if isinstance(size, int):
        return size
    hint = getattr(getattr(size, "node", None), "hint", None)
    return int(hint) if isinstance(hint, (int, float)) else 1
