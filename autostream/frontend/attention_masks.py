"""Removes constant attention masks from captured graphs, where no mask or ``is_causal=True`` gives the same.

In eager code, models such as transformers' leave out a mask whose values keep everything or are causal. A tracer does
not know these values, so a captured graph has the mask, and attention gets a slower kernel than in eager code. Here the
value of a mask that depends on no input is computed, once for each graph.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from autostream.errors import first_line
from autostream.utils.logs import Log

log = Log(__name__)

_MOST_ELEMENTS = 1 << 26
"""The largest mask that is computed here, for 8,192 tokens: 64 MiB."""

_PARAMETERS = ("attn_mask", "dropout_p", "is_causal")
"""The parameters of attention behind query, key and value that may be given by position."""

_DETERMINISTIC = frozenset({
    "add", "and_", "arange", "bitwise_and", "bitwise_not", "bitwise_or", "cumsum", "diff", "eq", "expand", "full", "ge",
    "getitem", "gt", "invert", "le", "logical_and", "logical_not", "logical_or", "lt", "mul", "ne", "new_full",
    "new_ones", "new_zeros", "ones", "or_", "reshape", "squeeze", "sub", "to", "tril", "triu", "unsqueeze", "view",
    "zeros",
})  # fmt: skip
"""Names of functions and methods that compute the same each time and write to nothing."""


def simplify_masks(module: fx.GraphModule) -> None:
    """Remove masks from attention in a graph, in place, where they keep everything, or what ``is_causal`` keeps.

    Ops that compute only such a mask are removed too.

    Args:
        module: a graph of torch ops, as Dynamo captures it.

    Example:
        >>> class Causal(torch.nn.Module):
        ...     def forward(self, x):
        ...         at = torch.arange(4)
        ...         return F.scaled_dot_product_attention(x, x, x, attn_mask=at[:, None] >= at)
        >>> from autostream.frontend.capture import capture
        >>> module = capture(Causal(), (torch.ones(1, 2, 4, 8),), {}).module
        >>> (attention,) = module.graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention)
        >>> attention.kwargs
        {'attn_mask': None, 'is_causal': True}
    """
    masks: dict[fx.Node, Tensor | None] = {}
    for node in module.graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention):
        arguments = {**dict(zip(_PARAMETERS, node.args[3:], strict=False)), **node.kwargs}
        mask = arguments.get("attn_mask")
        if not isinstance(mask, fx.Node) or arguments.get("is_causal") or len(node.args) < 3:
            continue
        if mask not in masks:
            masks[mask] = _constant(mask)
        value = masks[mask]
        if value is None:
            continue
        if bool(value.all()):
            arguments |= {"attn_mask": None}
        elif _is_causal(value, *node.args[:2]):
            arguments |= {"attn_mask": None, "is_causal": True}
        node.args, node.kwargs = node.args[:3], arguments
    for mask, value in masks.items():
        for node in reversed((value is not None and _ancestors(mask)) or []):
            if not node.users:
                module.graph.erase_node(node)
    module.recompile()


def _is_causal(mask: Tensor, query: Any, key: Any) -> bool:
    """Whether a mask is that of ``is_causal``: as many queries as keys, and each sees itself and those before."""
    lengths = {node.meta["example_value"].shape[-2] for node in (query, key)}
    if lengths != {mask.shape[-1]} or mask.dim() < 2 or mask.shape[-2] != mask.shape[-1]:
        return False
    return bool((mask == torch.ones(mask.shape[-2:], dtype=torch.bool, device="cpu").tril()).all())


def _constant(mask: fx.Node) -> Tensor | None:
    """The value of a mask of booleans that depends on no input; ``None`` for another."""
    example = mask.meta.get("example_value")
    if not isinstance(example, Tensor) or example.dtype != torch.bool or example.numel() > _MOST_ELEMENTS:
        return None
    order = _ancestors(mask)
    if order is None:
        return None
    values: dict[fx.Node, Any] = {}
    try:
        with torch.device("cpu"), torch.inference_mode(False), torch.no_grad():
            for node in order:
                args, kwargs = map_aggregate((node.args, node.kwargs), lambda a: _on_cpu(a, values))
                values[node] = (
                    getattr(args[0], str(node.target))(*args[1:], **kwargs)
                    if node.op == "call_method"
                    else node.target(*args, **kwargs)  # type: ignore[operator]
                )
    except Exception as error:  # whatever it is, the mask stays
        log.debug("the mask %s stays in the graph: %s", mask.name, first_line(error))
        return None
    value = values[mask]
    return value if isinstance(value, Tensor) else None


def _ancestors(mask: fx.Node) -> list[fx.Node] | None:
    """The nodes that a mask is computed from, itself the last; ``None`` if it depends on more than constants."""
    ancestors, order = {mask}, list[fx.Node]()
    for node in reversed(mask.graph.nodes):
        if node in ancestors:
            name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
            if node.op not in ("call_function", "call_method") or name not in _DETERMINISTIC:
                return None
            order.append(node)
            ancestors.update(node.all_input_nodes)
    return order[::-1]


def _on_cpu(argument: Any, values: dict[fx.Node, Any]) -> Any:
    if isinstance(argument, fx.Node):
        return values[argument]
    return torch.device("cpu") if isinstance(argument, torch.device) else argument
