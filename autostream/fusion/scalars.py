"""Makes Inductor compute expensive scalars once, in a kernel of their own, and not in every thread.

Inductor fuses the computation of a scalar into the kernel that uses it, so each thread computes it again. Usually that
is faster than another kernel, but not for expensive scalars: Adam corrects its averages by powers in float64, for each
parameter by its own step count. ``as_strided`` requires its input in memory, so the scalar in front of it is computed
by an earlier kernel::

    step ─▶ + 1 ─▶ beta ** … ─▶ 1 - … ─▶ sqrt ─▶ as_strided ─▶ the update of a parameter
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from autostream.frontend.aten import tensors_in
from autostream.utils.storages import storage_of

aten = torch.ops.aten

_CHEAP = {
    *(aten.add, aten.sub, aten.rsub, aten.mul, aten.neg, aten.clone, aten._to_copy),
    torch.ops.prims.convert_element_type,
}
"""Packets of ops that take an instruction or two, which each thread may repeat."""


def compute_once(graph: fx.Graph) -> None:
    """Insert ``as_strided`` behind expensive scalars that non-scalar tensors are computed from.

    Args:
        graph: a functional graph of ATen ops with values; it is changed in place.

    Example:
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> args = torch.ones(2), torch.ones((), dtype=torch.float64)
        >>> graph = make_fx(lambda x, step: x * 0.9**step, tracing_mode="fake")(*args).graph
        >>> compute_once(graph)
        >>> [node.name for node in graph.nodes]
        ['x_1', 'step_1', 'pow_1', 'as_strided_default', 'mul', 'output']
    """
    expensive: dict[fx.Node, None] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or value.dim():
            continue
        if _is_expensive(node) or any(source in expensive for source in node.all_input_nodes):
            expensive[node] = None
    for node in expensive:
        users = [user for user in node.users if any(tensor.dim() for tensor in tensors_in(user.meta.get("val")))]
        if users:
            with graph.inserting_after(node):
                in_memory = graph.call_function(aten.as_strided.default, (node, [], []))
            in_memory.meta = dict(node.meta)
            for user in users:
                user.replace_input_with(node, in_memory)


def _is_expensive(node: fx.Node) -> bool:
    """Whether an op computes a scalar from scalars in float64 and is not cheap; views compute nothing."""
    packet = getattr(node.target, "overloadpacket", node.target)
    if node.op != "call_function" or packet in _CHEAP or node.meta["val"].dtype is not torch.float64:
        return False
    sources = [tensor for source in node.all_input_nodes for tensor in tensors_in(source.meta.get("val"))]
    scalars = bool(sources) and not any(tensor.dim() for tensor in sources)
    return scalars and storage_of(node.meta["val"]) not in map(storage_of, sources)
