"""All-reduces of a traced program: joined where that delays none, and written in buckets.

    all_reduce(a), wait_tensor, all_reduce(b), wait_tensor ──gathered──▶ all_reduces(a, b)
    all_reduces(a, b) ──in_buckets──▶ for each bucket: cat ──▶ all_reduce_ ──▶ wait_tensor ──▶ split, views

What uses the results stays as it is, but for the memory that they lie in: fake values move to that of the bucket.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map_only

from autostream.analysis.effects import effects_of
from autostream.analysis.values import nodes_in, storages_in, value_of
from autostream.frontend.all_reduces import ALL_REDUCES, Bucket, all_reduced
from autostream.frontend.dynamo import compile_lock
from autostream.ir import Program
from autostream.utils.operators import is_unknown
from autostream.utils.storages import byte_offset, layout_of, storage_of

_BY_OFFSET, _OFFSET = (torch.ops.aten.as_strided.default, torch.ops.aten.as_strided_copy.default), 3
"""Ops that count from the beginning of a storage, and the place of that number among their arguments."""


def gathered(program: Program) -> Program:
    """The same program, with all-reduces whose inputs are there when the first of them begins as one op.

    So are those of a step that sums up its gradients after the backward: ``for p in parameters: all_reduce(p.grad)``.
    Results that are returned, seen as views, or written are left alone: they have memory of their own.

    Args:
        program: of ATen ops; it stays as it is, and is returned if no all-reduces can be joined.
    """
    runs = [run for run in _runs(program.module.graph) if len(run) > 1]
    if not runs:
        return program
    graph = copy.deepcopy(program.module.graph)
    copies = {node.name: node for node in graph.nodes}
    for run in runs:
        _join(graph, [copies[node.name] for node in run])
    return _with_graph(program, graph)


def joinable(program: Program) -> list[list[int]]:
    """Which all-reduces of a program can be joined, by their number among all of them."""
    numbers = {node: at for at, node in enumerate(_all_reduces(program.module.graph))}
    return [[numbers[node] for node in run] for run in _runs(program.module.graph) if len(run) > 1]


def _all_reduces(graph: fx.Graph) -> Sequence[fx.Node]:
    if not dist.is_available():  # PyTorch may be built without it
        return ()
    return [*graph.find_nodes(op="call_function", target=torch.ops._c10d_functional.all_reduce.default)]


def _runs(graph: fx.Graph) -> list[list[fx.Node]]:
    """All-reduces of one kind, of each of which the input is there, and not written any more, when the first begins."""
    candidates = set(filter(_can_be_joined, _all_reduces(graph)))
    if len(candidates) < 2:
        return []
    place = {node: at for at, node in enumerate(graph.nodes)}
    runs: list[list[fx.Node]] = []
    latest: dict[object, tuple[list[fx.Node], set[int]]] = {}
    """For each kind, the run, and the storages that were written since it began."""
    for node in place:
        if node in candidates:
            source, *kind = node.args
            run, written = latest.get(repr(kind), ([], set()))
            if run and place[source] < place[run[0]] and written.isdisjoint(storages_in(value_of(source))):
                run.append(node)
            else:
                runs.append([node])
                latest[repr(kind)] = runs[-1], set()
        for changed in effects_of(node).writes:
            for _, written in latest.values():
                written |= storages_in(value_of(changed))
    return runs


def _can_be_joined(node: fx.Node) -> bool:
    """Whether the result of an all-reduce is only read, and laid out like its input."""
    if [user.target for user in node.users] != [torch.ops._c10d_functional.wait_tensor.default]:
        return False
    (wait,) = node.users
    if not all(_only_reads(user, wait) for user in wait.users):
        return False
    given, result = value_of(node.all_input_nodes[0]), value_of(node)
    if any(map(is_unknown, (*given.shape, *given.stride()))):
        return False
    (like,) = ALL_REDUCES([given], [given], "sum", 1.0, "")
    return layout_of(like) == layout_of(result)


def _only_reads(user: fx.Node, value: fx.Node) -> bool:
    """Whether a user of a value neither writes nor returns it, or a view of it."""
    effects = effects_of(user)
    own = storages_in(value_of(user)).isdisjoint(storages_in(value_of(value)))
    return user.op == "call_function" and own and value not in (*effects.writes, *effects.aliases)


def _join(graph: fx.Graph, run: Sequence[fx.Node]) -> None:
    """Replace all-reduces, and the waits for them, by one op at the place of the first."""
    first, sources = run[0], [node.args[0] for node in run]
    waits = [next(iter(node.users)) for node in run]
    with graph.inserting_before(first):
        joined = graph.call_function(ALL_REDUCES, (sources, sources, first.args[1], 1.0, first.args[2]))
        results = [graph.call_function(operator.getitem, (joined, at)) for at in range(len(run))]
    joined.meta = {**first.meta, "val": [*map(value_of, waits)]}
    for node, wait, result in zip(run, waits, results, strict=True):
        result.meta = {**wait.meta}
        wait.replace_all_uses_with(result)
        graph.erase_node(wait)
        graph.erase_node(node)


def _with_graph(program: Program, graph: fx.Graph) -> Program:
    outputs = tuple(node.name for node in nodes_in(graph.output_node().args[0]))
    return replace(program, module=fx.GraphModule(program.module, graph), outputs=outputs)


class Sums(NamedTuple):
    """An op for all-reduces.

    Attributes:
        sources: what it reduces.
        like: for each, a tensor as which the result is laid out.
        reduction: of the group's backend, such as ``"sum"``.
        group: the name of the process group.
    """

    sources: Sequence[fx.Node]
    like: Sequence[Tensor]
    reduction: str
    group: str


def sums_of(program: Program) -> list[Sums]:
    """The ops for all-reduces of a program, in order."""
    found = []
    for node in program.module.graph.find_nodes(op="call_function", target=ALL_REDUCES):
        args: Any = node.args
        sources, like, reduction, _, group = args
        found.append(Sums(sources, [*map(value_of, like)], reduction, group))
    return found


def summands(program: Program) -> list[str]:
    """What a program reduces, in order, in words: all processes have to do the same."""
    said = []
    for sums in sums_of(program):
        said += [f"{sums.reduction} of a tensor of {tuple(like.shape)} and {like.dtype}" for like in sums.like]
        said.append("no more at once")
    return said


def in_buckets(program: Program, filled: Sequence[Sequence[Bucket]] = ()) -> Program:
    """The same program, with buckets in place of each op for all-reduces.

    Args:
        program: of ATen ops; it stays as it is, and is returned if it has none of them.
        filled: the buckets of each op; by default, those of the usual sizes.
    """
    if not program.module.graph.find_nodes(op="call_function", target=ALL_REDUCES):
        return program
    graph = copy.deepcopy(program.module.graph)
    nodes = graph.find_nodes(op="call_function", target=ALL_REDUCES)
    for node, own in zip(nodes, filled or [()] * len(nodes), strict=True):
        _write(graph, node, own)
    return _with_graph(program, graph)


def _write(graph: fx.Graph, joined: fx.Node, filled: Sequence[Bucket]) -> None:
    """Replace an op for all-reduces by the ops of its buckets.

    Args:
        graph: of the op.
        joined: the op.
        filled: the buckets; none for those of the usual sizes.
    """
    args: Any = joined.args
    tensors, like, reduction, scale, group = args
    sources = [*tensors, *like]

    def run(*given: Tensor) -> list[Tensor]:
        return all_reduced(given[: len(tensors)], given[len(tensors) :], reduction, scale, group, filled)

    with compile_lock(), torch.no_grad():
        traced = make_fx(run)(*map(value_of, sources)).graph
    copies = dict(zip(traced.find_nodes(op="placeholder"), sources, strict=True))
    with graph.inserting_before(joined):
        results: Any = graph.graph_copy(traced, copies)
    for node in traced.nodes:
        if node.op == "call_function":
            copies[node].meta = {**joined.meta, **node.meta}
    moved = {user: results[user.args[1]] for user in joined.users}
    places = {storage_of(value_of(user)): value_of(result) for user, result in moved.items()}
    for node in graph.nodes:
        if node.target in _BY_OFFSET and isinstance((*node.args, None, None)[_OFFSET], int):
            given = value_of(node.all_input_nodes[0])
            if (place := places.get(storage_of(given))) is not None:
                node.update_arg(_OFFSET, node.args[_OFFSET] + byte_offset(place) // given.itemsize)
    for user, result in moved.items():
        assert user.target is operator.getitem
        user.replace_all_uses_with(result)
        graph.erase_node(user)
    graph.erase_node(joined)
    for node in graph.nodes:
        if places.keys() & storages_in(value_of(node)):
            node.meta["val"] = tree_map_only(Tensor, lambda value: _moved(value, places), value_of(node))


def _moved(value: Tensor, places: dict[int, Tensor]) -> Tensor:
    """A fake value in the memory of a bucket, if it lay in that of a result.

    Args:
        value: which may be a view, also as another type.
        places: the result in its bucket, by its storage before.
    """
    place = places.get(storage_of(value))
    if place is None:
        return value
    whole = place.as_strided([place.untyped_storage().nbytes() // place.itemsize], [1], 0).view(value.dtype)
    return whole.as_strided(value.shape, value.stride(), (byte_offset(place) + byte_offset(value)) // value.itemsize)
