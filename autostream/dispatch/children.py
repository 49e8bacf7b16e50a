"""Whole modules as ops of a schedule that runs them side by side on streams; what ``Parallel`` runs.

    stream 0:  ──────── call ───────────────────────────────╮ leave ─ leave_1 ─▶
    stream 1:  enter ── call_1 ─────────────────────────────┤
    stream 2:  enter_1 ─ call_2 ────────────────────────────╯

The inputs of a child on a side stream are copied there (*enter*), and its results are copied to the caller's stream
(*leave*). So all its intermediate tensors and saved activations are allocated and read on its own stream, in the
backward too, and the caching allocator may reuse their memory in stream order whenever they are freed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor, fx, nn

from autostream.analysis.hazards import AccessHistory
from autostream.errors import TargetError, TraceError
from autostream.frontend.tree import flatten, unflatten
from autostream.ir import Assignment, Dependency, Op, OpGraph, Placeholder, Program, Role, Storage
from autostream.runtime.lower import lower
from autostream.scheduling.releases import place_releases
from autostream.scheduling.synchronize import synchronize
from autostream.scheduling.verify import verify
from autostream.utils.storages import storage_of

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""``args`` and ``kwargs`` of one call."""

Shared = tuple[frozenset[int], ...]
"""For each child, the storages of buffers that it shares with others, as numbers. It may write them, so children that
share one do not run at the same time."""


@cache
def side_by_side(device: str, streams: int, shared: Shared) -> fx.GraphModule:
    """A function of the children and their arguments, ``(children, inputs)``, that returns the tuple of their results.

    Child ``i`` is called with the arguments ``inputs[i]`` on stream ``i % streams``. The host calls them in order, so
    they generate the same random numbers as one after another.

    Args:
        device: a CUDA device, e.g. ``"cuda:0"``.
        streams: how many, the caller's among them, at most as many as there are children.
        shared: see :data:`Shared`.

    Example:
        >>> graph = side_by_side("cuda:0", 2, (frozenset(), frozenset()))
        >>> [node.name for node in graph.graph.nodes if node.target in (enter, call, leave)]
        ['enter', 'call', 'call_1', 'leave']
    """
    program, stream = _program(device, streams, len(shared))
    graph = _op_graph(program, shared)
    schedule = place_releases(graph, synchronize(graph, Assignment("children", streams, tuple(graph.ops), stream)))
    verify(graph, schedule, pinned=graph.pinned)
    return lower(program, graph, schedule)


def shared_buffers(children: Sequence[nn.Module]) -> Shared:
    """The storages of buffers that several children have.

    Example:
        >>> norm = nn.BatchNorm1d(4)
        >>> alone, *both = shared_buffers([nn.Linear(4, 4), norm, nn.Sequential(norm)])
        >>> len(alone), len(both[0]), both[0] == both[1]
        (0, 3, True)
    """
    owned = [{_memory(buffer) for buffer in child.buffers()} for child in children]
    owners = Counter(chain.from_iterable(owned))
    number = {memory: at for at, memory in enumerate(memory for memory, count in owners.items() if count > 1)}
    return tuple(frozenset(number[memory] for memory in memories if memory in number) for memories in owned)


def _memory(buffer: Tensor) -> int:
    try:
        return storage_of(buffer)
    except (NotImplementedError, ValueError):  # a sparse buffer has several storages, one of a lazy module none yet
        return id(buffer)


def enter(inputs: Sequence[Arguments], child: int, kind: str) -> tuple[Arguments]:
    """A child's arguments; tensors on devices of this type are copied into memory of the current stream."""
    return (_copied(inputs[child], kind),)


def call(children: Sequence[nn.Module], child: int, inputs: Sequence[Arguments], at: int) -> Any:
    """Call a child with the arguments at an index.

    Raises:
        TargetError: it writes to one of them, which others may be reading, or changes a container among them, of which
            others may have a copy.
    """
    name = type(children[child]).__name__
    tensors, structure = flatten(inputs[at])
    versions = [_version(tensor) for tensor in tensors]
    args, kwargs = inputs[at]
    result = children[child](*args, **kwargs)
    if versions != [_version(tensor) for tensor in tensors]:
        raise TargetError(f"child {child} ({name}) writes to its input, which others may read: let it make another")
    now, structure_now = flatten(inputs[at])
    if structure != structure_now or any(tensor is not before for tensor, before in zip(now, tensors, strict=True)):
        raise TargetError(
            f"child {child} ({name}) changes a container that it is given, of which others may have a copy: "
            "let it return what it found"
        )
    return result


def leave(result: Any, child: int, kind: str) -> Any:
    """A child's result; tensors on devices of this type are copied into memory of the current stream.

    Raises:
        TargetError: it is a container of an unknown type.
    """
    try:
        return _copied(result, kind)
    except TraceError as error:
        raise TargetError(f"child {child} returns what cannot be copied from its stream: {error}") from error


def _copied(value: Any, kind: str) -> Any:
    tensors, structure = flatten(value)
    return unflatten(structure, [tensor.clone() if tensor.device.type == kind else tensor for tensor in tensors])


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _program(device: str, streams: int, count: int) -> tuple[Program, dict[str, int]]:
    """The program and the stream of each op: copies of inputs first, then the children, then copies of results."""
    graph = fx.Graph()
    children, inputs = graph.placeholder("children"), graph.placeholder("inputs")
    on_side_streams, kind = [child for child in range(count) if child % streams], torch.device(device).type
    entered = {child: (graph.call_function(enter, (inputs, child, kind)), 0) for child in on_side_streams}
    stream = {node.name: child % streams for child, (node, _) in entered.items()}
    results = []
    for child in range(count):
        results.append(graph.call_function(call, (children, child, *entered.get(child, (inputs, child)))))
        stream[results[child].name] = child % streams
    for child in on_side_streams:
        results[child] = graph.call_function(leave, (results[child], child, kind))
        stream[results[child].name] = 0
    graph.output(tuple(results))
    placeholders = tuple(Placeholder(n, Role.INPUT, str(at), n) for at, n in enumerate(("children", "inputs")))
    outputs = tuple(node.name for node in results)
    return Program(fx.GraphModule(nn.Module(), graph), placeholders, outputs, "module", device), stream


def _op_graph(program: Program, shared: Shared) -> OpGraph:
    """Each node is an op that allocates a storage of its name and reads its arguments.

    A child on the caller's stream gets the inputs themselves, so it counts as writing them, which orders it after the
    copies for the other children.
    """
    history, ops, dependencies = AccessHistory(), dict[str, Op](), list[Dependency]()
    storages = {p.name: Storage(p.name, p.role, 0, (p.name,)) for p in program.placeholders}
    for node in program.module.graph.nodes:
        if node.op != "call_function":
            continue
        reads, writes, orders = [source.name for source in node.all_input_nodes], [node.name], list[str]()
        if node.target is call:
            writes += [name for name in reads if name == "inputs"]
            orders += [f"buffer {number}" for number in sorted(shared[node.args[1]])]
        dependencies += history.record(node.name, reads, writes, orders)
        ops[node.name] = Op(
            node.name,
            target=node.target.__name__,
            nodes=(node.name,),
            reads=frozenset(reads),
            writes=frozenset(writes),
            allocates=frozenset({node.name}),
            orders=frozenset(orders),
            device=program.device,
        )
        escapes = node.name in program.outputs
        storages[node.name] = Storage(node.name, Role.INTERMEDIATE, 0, (node.name,), escapes)
    return OpGraph(ops, tuple(dependencies), storages, (), program.device)
