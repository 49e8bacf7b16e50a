"""Lets kernels write gradients into the bucket in which they are reduced, instead of copying them there.

    grad = aten.empty_strided(…)                  bucket = aten.empty_strided(…)
    aten.mm.out(…, out=grad)                      grad = inductor._reinterpret_tensor(bucket, …)
    other = aten.convolution_backward(…)   ──▶    aten.mm.out(…, out=grad)
    bucket = prims.cat([grad, other])             other = aten.convolution_backward(…)
                                                  part = inductor._reinterpret_tensor(bucket, …)
                                                  aten._foreach_copy_([part], [other])

TorchInductor's own kernels for ``aten.cat`` write there as well, but copy what operators compute, such as products.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate

import torch
from torch import fx

from autostream.frontend.aten import tensors_in
from autostream.fusion.kernel_values import arguments_of, evaluate, fake_mode_of
from autostream.utils.storages import storage_of

aten = torch.ops.aten

_REINTERPRET = torch.ops.inductor._reinterpret_tensor.default

_ALIGNMENT = 16
"""Bytes: Triton kernels are compiled for pointers to multiples of it."""

_MOST = 256
"""Gradients of a bucket with parts. A storage of more is not divided, so kernels would wait for each other."""


def write_into_buckets(module: fx.GraphModule) -> None:
    """Replace concatenations of flat tensors by memory that is allocated before the tensors, which become its parts.

    A tensor becomes a part if it is all of an allocation, in order, that nothing uses later, and lies at a multiple of
    16 bytes in the bucket. One call copies all others of a bucket.

    Args:
        module: a graph of kernels with fake values; it is changed in place.
    """
    found = module.graph.find_nodes(op="call_function", target=torch.ops.prims.cat.default)
    buckets = [node for node in found if node.meta["val"].dim() == 1]
    if not buckets:
        return
    allocated = {
        storage_of(node.meta["val"]): node
        for node in module.graph.find_nodes(op="call_function", target=aten.empty_strided.default)
    }
    last_uses = _last_uses(module.graph)
    for bucket, parts in [(bucket, _parts(bucket, allocated, last_uses)) for bucket in buckets]:
        _replace(bucket, _filled(bucket, parts))
    values = arguments_of(module)
    with fake_mode_of(values), torch.no_grad():
        evaluate(module, values)
    module.recompile()


def _last_uses(graph: fx.Graph) -> dict[int, fx.Node]:
    """The last node that takes a tensor of a storage."""
    return {
        storage_of(tensor): node
        for node in graph.nodes
        for source in node.all_input_nodes
        for tensor in tensors_in(source.meta.get("val"))
    }


def _offsets(bucket: fx.Node) -> Iterator[tuple[int, fx.Node]]:
    """What a node concatenates, and where in the result it begins, in elements."""
    sources: list[fx.Node] = bucket.args[0]  # type: ignore[assignment]
    sizes = [source.meta["val"].numel() for source in sources]
    ends = accumulate(sizes)
    return ((end - size, source) for size, end, source in zip(sizes, ends, sources, strict=True) if size)


def _parts(bucket: fx.Node, allocated: Mapping[int, fx.Node], last_uses: Mapping[int, fx.Node]) -> dict[int, fx.Node]:
    """The allocations that become parts of a bucket, by their offsets in it."""
    parts: dict[int, fx.Node] = {}
    if len(bucket.all_input_nodes) > _MOST:
        return parts
    for offset, source in _offsets(bucket):
        value = source.meta["val"]
        storage = storage_of(value)
        if (
            storage in allocated
            and allocated[storage] not in parts.values()
            and last_uses[storage] is bucket
            and value.is_contiguous()
            and value.numel() * value.itemsize == value.untyped_storage().nbytes()
            and value.dtype == allocated[storage].meta["val"].dtype
            and offset * value.itemsize % _ALIGNMENT == 0
        ):
            parts[offset] = allocated[storage]
    return parts


def _filled(bucket: fx.Node, parts: Mapping[int, fx.Node]) -> fx.Node:
    """Allocate a bucket in front of its parts, and copy what is no part."""
    graph, value = bucket.graph, bucket.meta["val"]
    moved = {bucket, *parts.values()}
    with graph.inserting_before(next(node for node in graph.nodes if node in moved)):
        options = {"dtype": value.dtype, "device": value.device}
        memory = graph.call_function(aten.empty_strided.default, ([value.numel()], [1]), options)
    for offset, part in parts.items():
        with graph.inserting_before(part):
            _replace(part, graph.call_function(_REINTERPRET, (memory, *part.args, offset)))
    others = {offset: source for offset, source in _offsets(bucket) if offset not in parts}
    with graph.inserting_before(bucket):
        targets = [
            graph.call_function(_REINTERPRET, (memory, [source.meta["val"].numel()], [1], offset))
            for offset, source in others.items()
        ]
        copies = [graph.call_function(aten._foreach_copy_.default, (targets, [*others.values()]))] if others else []
    for node in (*targets, *copies):
        node.meta = dict(bucket.meta)
    return memory


def _replace(old: fx.Node, new: fx.Node) -> None:
    """Use a node in place of another one, under its name, and drop the views that only the other one took."""
    new.meta = dict(old.meta)
    old.replace_all_uses_with(new)
    name, sources = old.name, old.all_input_nodes
    old.graph.erase_node(old)
    new.name = name
    for source in sources:
        if source.target is _REINTERPRET and not source.users:
            old.graph.erase_node(source)
