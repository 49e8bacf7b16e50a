"""Collectives in place, such as ``all_reduce_``, as functional ones, which TorchInductor keeps between its kernels.

    sum = all_reduce_(x)                 sum = all_reduce(x)
    mean = wait_tensor(sum)       ──▶    mean = copy_(x, wait_tensor(sum))

AOTAutograd functionalizes no operator outside of ATen whose result aliases an argument. It removes the copy, and where
nothing else needs ``x``, TorchInductor reduces in place again. What fills a bucket is fused with the ops before it,
what reads it with those behind it, and collectives and waits are ops between these kernels, in the order given.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

_FUNCTIONAL = {"_c10d_functional::all_reduce_": "all_reduce", "_c10d_functional::broadcast_": "broadcast"}


def functional_collectives(module: fx.GraphModule) -> fx.GraphModule:
    """A graph without collectives in place, or the same one if it has none.

    One that anything but waits uses stays.

    Args:
        module: a graph of ATen ops with values; it is not changed.
    """
    if not any(map(_functional, module.graph.nodes)):
        return module
    graph, copied, taken = fx.Graph(), dict[fx.Node, fx.Node](), dict[Any, Any]()
    for node in module.graph.nodes:
        made = copied[node] = graph.node_copy(node, copied.__getitem__)
        if (name := _functional(node)) and all(map(_waits, node.users)):
            made.target = getattr(torch.ops._c10d_functional, name).default
            taken[node] = made.args[0]
        elif _waits(node) and node.args[0] in taken:
            copied[node] = graph.call_function(torch.ops.aten.copy_.default, (taken[node.args[0]], made))
            copied[node].meta = dict(node.meta)
    return fx.GraphModule(module, graph)


def _functional(node: fx.Node) -> str:
    """The name of the functional form of a collective in place; ``""`` for other nodes."""
    return _FUNCTIONAL.get(_operator(node), "")


def _waits(node: fx.Node) -> bool:
    return _operator(node) == "_c10d_functional::wait_tensor"


def _operator(node: fx.Node) -> str:
    return node.target._schema.name if isinstance(node.target, OpOverload) else ""
