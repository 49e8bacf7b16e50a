"""Tracing below autograd with ``make_fx``: what is common to training steps and to calls that record gradients.

A module runs on fake tensors, and every op that it dispatches is recorded, those of autograd too. Its parameters and
buffers are arguments of the graph, in front of the inputs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import make_fx

from autostream.errors import TraceError
from autostream.ir import Placeholder, Role
from autostream.storages import storage_of
from autostream.tracing.convolutions import GRADIENTS_APART
from autostream.tracing.flat import FlatModel, check_graph, watched
from autostream.tracing.saved_tensors import hooks_set_aside


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of a model by name, each once."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def graph_of(
    run: Callable[..., Any],
    decompositions: dict[OpOverload, Callable[..., Any]],
    flat: FlatModel,
    values: Sequence[Tensor],
) -> fx.GraphModule:
    """The graph of a function that calls a flat model, and may go through its backward.

    Raises:
        TraceError: it cannot be traced, draws random numbers again from a state that is put back, or has an op that
            would not leave its backward what that needs.
    """
    tracer = make_fx(run, {**GRADIENTS_APART, **decompositions}, "fake", _allow_non_fake_inputs=True)
    # In one thread, for what is patched for this one has to hold for the backward too.
    with hooks_set_aside(), torch.autograd.set_multithreading_enabled(False):
        module = watched(lambda: tracer(*values), flat)
    check_graph(flat, module)
    if module.graph.find_nodes(op="call_function", target=torch.ops.aten.mkldnn_rnn_layer_backward.default):
        raise TraceError(_RECURRENT)
    return module


_RECURRENT = (
    "oneDNN's kernel, which computes LSTMs in float32 on a CPU, leaves its backward what that needs (a workspace) "
    "where autograd records it, and in a graph nobody does"
)


def reached_originals(module: fx.GraphModule, model: nn.Module) -> bool:
    """Whether a replica led back to the model by a way that was not copied: its tensors then look like constants."""
    state = set(map(storage_of, state_of(model).values()))
    constants = (getattr(module, node.target) for node in module.graph.find_nodes(op="get_attr"))
    return any(isinstance(constant, Tensor) and storage_of(constant) in state for constant in constants)


def tidied(module: fx.GraphModule, model: nn.Module, tensors: Sequence[Tensor]) -> tuple[Placeholder, ...]:
    """What the placeholders of a graph are, once it is rid of what nobody needs, and they have names that tell."""
    graph = module.graph
    graph.eliminate_dead_code(lambda node: node.op == "placeholder" or not _is_idle(node))
    arguments = [
        *((Role.PARAMETER, name, tensor) for name, tensor in model.named_parameters()),
        *((Role.BUFFER, name, tensor) for name, tensor in model.named_buffers()),
        *((Role.INPUT, str(at), tensor) for at, tensor in enumerate(tensors)),
    ]
    taken = {node.name for node in graph.nodes}
    placeholders: list[Placeholder] = []
    owners: dict[int, str] = {}
    for node, (role, target, tensor) in zip(graph.find_nodes(op="placeholder"), arguments, strict=True):
        if not node.users and role is not Role.INPUT:
            graph.erase_node(node)
            continue
        name = f"{role.value}_{target.replace('.', '_')}"
        if name not in taken:
            node.name = node.target = name
            taken.add(name)
        placeholders.append(Placeholder(node.name, role, target, owners.setdefault(storage_of(tensor), node.name)))
    module.recompile()
    return tuple(placeholders)


def _is_idle(node: fx.Node) -> bool:
    """Whether a node only looks at what it is given, or takes memory."""
    target = node.target
    if node.target is operator.getitem:
        return True
    return isinstance(target, OpOverload) and (target.is_view or target.overloadpacket in _ALLOCATIONS)


_ALLOCATIONS = {torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.empty_strided, torch.ops.aten.new_empty}
