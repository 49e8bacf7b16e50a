"""Removes dropouts that drop nothing from captured graphs: they return their argument itself.

A tracer takes the result for a copy, or makes one, so that a write to one of the two would not be seen in the other.
"""

from __future__ import annotations

from inspect import Signature, signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

_DROPOUTS: dict[Any, Signature] = {
    **{each: signature(each) for each in (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d)},
    **{each: signature(each) for each in (F.alpha_dropout, F.feature_alpha_dropout)},
    **dict.fromkeys(
        (torch.dropout, torch.feature_dropout, torch.alpha_dropout, torch.feature_alpha_dropout),
        signature(lambda input, p, train: None),
    ),
}


def drop_idle_dropouts(module: fx.GraphModule) -> None:
    """Replace each dropout in a graph, in place, by its argument, if it is not in training or its probability is zero.

    Args:
        module: a graph of torch ops, as Dynamo captures it.

    Example:
        >>> from autostream.frontend.capture import capture
        >>> module = capture(torch.nn.Dropout(0.5).eval(), (torch.ones(2),), {}).module
        >>> module.graph.find_nodes(op="call_function", target=F.dropout)
        []
    """
    for node in list(module.graph.nodes):
        if node.op == "call_function" and node.target in _DROPOUTS and _is_idle(node):
            node.replace_all_uses_with(_given(node)["input"])
            module.graph.erase_node(node)
    module.recompile()


def _given(node: fx.Node) -> dict[str, Any]:
    bound = _DROPOUTS[node.target].bind(*node.args, **node.kwargs)
    bound.apply_defaults()
    return bound.arguments


def _is_idle(node: fx.Node) -> bool:
    given = _given(node)
    return bool(given["p"] == 0) or given.get("training", given.get("train")) is False
