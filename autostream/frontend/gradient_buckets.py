"""Writes averages of gradients in buckets into a program, in place of the op that stands for them.

    averages(gradients) ──▶ for each bucket: cat ──▶ all_reduce_ ──▶ wait_tensor ──▶ split, views

What uses the averages stays as it is, but for the memory that they lie in: fake values move to that of the bucket.
"""

from __future__ import annotations

import copy
import operator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map_only

from autostream.analysis.values import nodes_in, storages_in, value_of
from autostream.frontend.data_parallel import AVERAGES, DataParallel, buckets
from autostream.frontend.dynamo import compile_lock
from autostream.ir import Program
from autostream.utils.storages import byte_offset, storage_of


def bucketing(program: Program, size: int) -> list[list[list[int]]]:
    """The buckets of each backward whose gradients a program averages, by :func:`~.data_parallel.buckets`."""
    nodes = program.module.graph.find_nodes(op="call_function", target=AVERAGES)
    return [buckets([*map(value_of, nodes_in(node.args[1]))], size) for node in nodes]


def in_buckets(program: Program, size: int) -> Program:
    """The same program, with its averages in buckets.

    Args:
        program: of ATen ops; it stays as it is, and is returned if it averages nothing.
        size: of the buckets, in bytes, as for :func:`~.data_parallel.buckets`.
    """
    if not program.module.graph.find_nodes(op="call_function", target=AVERAGES):
        return program
    graph = copy.deepcopy(program.module.graph)
    for node in graph.find_nodes(op="call_function", target=AVERAGES):
        _write(graph, node, size)
    module = fx.GraphModule(program.module, graph)
    return replace(program, module=module, outputs=tuple(node.name for node in nodes_in(graph.output_node().args[0])))


def _write(graph: fx.Graph, averages: fx.Node, size: int) -> None:
    """Replace a node of averages by the ops of its buckets."""
    args: Any = averages.args
    gradients, parameters, *known = args
    data_parallel, sources = DataParallel(*known), [*gradients, *parameters]

    def run(*tensors: Tensor) -> list[Tensor]:
        return data_parallel.averages(tensors[: len(gradients)], tensors[len(gradients) :], size)

    with compile_lock(), torch.no_grad():
        traced = make_fx(run)(*map(value_of, sources)).graph
    copies = dict(zip(traced.find_nodes(op="placeholder"), sources, strict=True))
    with graph.inserting_before(averages):
        means: Any = graph.graph_copy(traced, copies)
    for node in traced.nodes:
        if node.op == "call_function":
            copies[node].meta = {**averages.meta, **node.meta}
    places: dict[int, Tensor] = {}
    for user in [*averages.users]:
        assert user.target is operator.getitem
        mean = means[user.args[1]]
        places[storage_of(value_of(user))] = value_of(mean)
        user.replace_all_uses_with(mean)
        graph.erase_node(user)
    graph.erase_node(averages)
    for node in graph.nodes:
        if places.keys() & storages_in(value_of(node)):
            node.meta["val"] = tree_map_only(Tensor, lambda value: _moved(value, places), value_of(node))


def _moved(value: Tensor, places: dict[int, Tensor]) -> Tensor:
    """A fake value in the memory of a bucket, if it lay in that of an average.

    Args:
        value: which may be a view, also as another type.
        places: the average in its bucket, by its storage before.
    """
    place = places.get(storage_of(value))
    if place is None:
        return value
    whole = place.as_strided([place.untyped_storage().nbytes() // place.itemsize], [1], 0).view(value.dtype)
    return whole.as_strided(value.shape, value.stride(), (byte_offset(place) + byte_offset(value)) // value.itemsize)
