"""Tracing of training steps with ``make_fx``, below autograd.

A step runs on fake tensors, and every op that it dispatches is recorded: those of the model, then those of autograd,
then those of the optimizer, as an eager step has them and in that order. So random numbers are drawn in that order, and
what is written in place is written in place. Gradients are results in between: an update depends on its own gradient
alone, and a schedule may run it as soon as that is there.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

from autostream.ir import Placeholder, Role
from autostream.storages import storage_of
from autostream.tracing.export import Traced, Tracer, ordinary, program_of
from autostream.tracing.flat import FlatModel, check_draws, check_ordinary, watched
from autostream.tracing.optimizers import lists_apart
from autostream.tracing.replica import replica
from autostream.tracing.state import name_of
from autostream.tracing.steps import Backward, Batch, Setting
from autostream.tracing.tree import Structure


def trace_step(step: Backward, tensors: Sequence[Tensor], structure: Structure) -> Traced:
    """Trace a step at these inputs, without computing anything or changing a tensor.

    Args:
        step: the step.
        tensors: the flat tensors of its arguments.
        structure: the structure of ``((batch, setting, numbers), {})`` that they were taken from.

    Raises:
        TraceError: it cannot be traced; the message says why.
    """
    check_ordinary(step)
    flat, module = _made_fx(replica(step), step, tensors, structure)
    if reached_originals(module, step):
        flat, module = _made_fx(step, step, tensors, structure)
    program = program_of(module, tidied(module, step, tensors))
    return Traced(program, flat.result.structure, {})


STEPS = Tracer(trace_step, may_split=False, may_try=False, may_renew=False)
"""Of training steps: their graphs are whole, and only so many, for each takes as long to make as a thousand steps."""


class _Functional(nn.Module):
    """A step whose ``forward`` is what is traced of it."""

    def __init__(self, step: nn.Module) -> None:
        super().__init__()
        self.step: Any = step

    def _get_name(self) -> str:
        return name_of(self.step)

    def forward(self, batch: Batch, setting: Setting, numbers: Sequence[Tensor]) -> Any:
        return self.step.traced(batch, setting, numbers)


def state_of(step: nn.Module) -> dict[str, Tensor]:
    """The tensors of a step by name, each once."""
    return {**dict(step.named_parameters()), **dict(step.named_buffers())}


def registered(step: nn.Module) -> frozenset[int]:
    """The ids of the tensors of a step: any other would be a constant of a graph, whatever takes its place."""
    return frozenset(map(id, state_of(step).values()))


def _made_fx(
    twin: nn.Module, step: nn.Module, tensors: Sequence[Tensor], structure: Structure
) -> tuple[FlatModel, fx.GraphModule]:
    flat = FlatModel(_Functional(twin), structure, registered(step), "make_fx")
    state = state_of(step)
    names = [f"model.step.{name}" for name in state]

    def run(*values: Tensor) -> tuple[Tensor, ...]:
        held, inputs = values[: len(names)], values[len(names) :]
        outputs: tuple[Tensor, ...] = functional_call(flat, dict(zip(names, held, strict=True)), inputs)
        return outputs

    return flat, made(run, dict(lists_apart()), flat, [*state.values(), *ordinary(tensors)])


def made(
    run: Callable[..., Any],
    decompositions: dict[OpOverload, Callable[..., Any]],
    flat: FlatModel,
    values: Sequence[Tensor],
) -> fx.GraphModule:
    """The graph of a function that calls a flat model, and may go through its backward.

    Raises:
        TraceError: it cannot be traced, or draws random numbers again from a state that is put back.
    """
    tracer = make_fx(run, decompositions, "fake", _allow_non_fake_inputs=True)
    # In one thread, for what is patched for this one has to hold for the backward too.
    with _unpacked(), torch.autograd.set_multithreading_enabled(False):
        module = watched(lambda: tracer(*values), flat)
    check_draws(flat, module)
    return module


@contextmanager
def _unpacked() -> Iterator[None]:
    """Keep the caller's hooks of what autograd saves (``saved_tensors_hooks``, of checkpointing too) from fake tensors.

    Private to PyTorch (seen in 2.11 and 2.13): its public relative can add hooks, but none can take them away.
    """
    autograd: Any = torch._C._autograd
    hooks = []
    while (pair := autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(pair)
        autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            autograd._push_saved_tensors_default_hooks(pack, unpack)


def reached_originals(module: fx.GraphModule, step: nn.Module) -> bool:
    """Whether a replica led back to the step by a way that was not copied: its tensors then look like constants."""
    state = set(map(storage_of, state_of(step).values()))
    constants = (getattr(module, node.target) for node in module.graph.find_nodes(op="get_attr"))
    return any(isinstance(constant, Tensor) and storage_of(constant) in state for constant in constants)


def tidied(module: fx.GraphModule, step: nn.Module, tensors: Sequence[Tensor]) -> tuple[Placeholder, ...]:
    """What the placeholders of a graph are, once it is rid of what nobody needs, and they have names that tell."""
    graph = module.graph
    graph.eliminate_dead_code(lambda node: node.op == "placeholder" or not _is_idle(node))
    arguments = [
        *((Role.PARAMETER, name, tensor) for name, tensor in step.named_parameters()),
        *((Role.BUFFER, name, tensor) for name, tensor in step.named_buffers()),
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
