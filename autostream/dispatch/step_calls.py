"""The calls of a training step: why no graph computes one, or its key, by which a graph is found.

    arguments, optimizers ──▶ call_of ──▶ Call, with its Key
                                └── no graph would compute it ──▶ Refusal

Of graphs with the same key, Dynamo's guards tell which one computes a call.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module
from torch.optim import Optimizer
from torch.utils.weak import WeakIdRef

from autostream.errors import TargetError, TraceError
from autostream.frontend.data_parallel import DataParallel, replicas
from autostream.frontend.eager_only import anomaly_detection, unusual_call, unusual_tensor
from autostream.frontend.guards import FailedGuard
from autostream.frontend.inputs import aliases_of
from autostream.frontend.optimizers import Hyperparameters, groups_of, obstacle
from autostream.frontend.parameters import have_hooks, have_no_gradients, parameters_of, state_of
from autostream.frontend.saved_tensors import hooks_are_set
from autostream.frontend.settings import numerics
from autostream.frontend.step_capture import Body
from autostream.frontend.steps import HOOKED, Update
from autostream.frontend.tensor_parallel import local_of, placement_of
from autostream.frontend.tree import Structure, flatten


class WrittenStep:
    """A training step as its user has written it.

    Args:
        body: what a graph computes.
        optimizers: whose parameters the step differentiates.
        name: in reports.
        modules: makes one module with all modules of the step, for the names of tensors in reports.
        eager: runs the step eagerly.
        data_parallel: the group over which the step's gradients are averaged, if there is one.
        averages: whether its graph has to average them, which the body does not do.
        updates: whether the step calls the optimizers' ``step``.

    Attributes:
        averaging: the group over which its graph averages gradients.
        updated: the optimizers that the step updates.
        hyperparameters: of each of these.

    Raises:
        TargetError: something else averages the gradients already.
    """

    def __init__(
        self,
        body: Body,
        optimizers: Sequence[Optimizer],
        name: str,
        modules: Callable[[], nn.Module],
        eager: Callable[..., Any],
        data_parallel: DataParallel | None = None,
        *,
        averages: bool = False,
        updates: bool = True,
    ) -> None:
        self.body, self.optimizers, self.name, self.modules, self.eager = body, optimizers, name, modules, eager
        self.data_parallel, self.averaging = data_parallel, data_parallel if averages else None
        if data_parallel is not None and _averages_itself(modules(), optimizers):
            raise TargetError(
                "DistributedDataParallel averages gradients, and the step would average them again over its processes: "
                "give the step the model itself (its .module)"
            )
        self.updated = optimizers if updates else ()
        self.hyperparameters = [Hyperparameters(optimizer) for optimizer in self.updated]


def _averages_itself(modules: nn.Module, optimizers: Sequence[Optimizer]) -> bool:
    """Whether ``DistributedDataParallel`` averages the gradients of a parameter that these optimizers train."""
    trained = {id(parameter) for optimizer in optimizers for parameter in parameters_of(optimizer)}
    return any(id(parameter) in trained for part in replicas(modules) for parameter in part.parameters())


class Key(NamedTuple):
    """The signature of a step. Guards are checked only for entries with the same key."""

    structure: Structure
    kinds: Hashable
    aliases: Hashable
    numerics: Hashable
    parameters: Hashable
    trained: bytes
    groups: tuple[Structure, ...]
    state: Hashable

    def difference(self, other: Key) -> str:
        """The difference from another key, in words; ``""`` if there is none."""
        words = [what for name, what in _WORDS.items() if getattr(self, name) != getattr(other, name)]
        groups, others = (chain.from_iterable(each.children or () for each in key.groups) for key in (self, other))
        words += dict.fromkeys(
            name for group, later in zip(groups, others, strict=False) for name in _changed(group, later)
        )
        return ", ".join(words)


_WORDS = {
    "structure": "the batch's containers or numbers",
    "kinds": "shapes, strides, dtypes or devices",
    "aliases": "which tensors share memory",
    "numerics": "autocast, precisions or other numerics",
    "parameters": "the optimizer's parameters",
    "trained": "what requires gradients",
    "state": "the optimizer's state",
}


def _changed(group: Structure, other: Structure) -> Iterator[str]:
    """The names of hyperparameters that differ in two groups."""
    other_values = dict(zip(cast(tuple[Any, ...], other.context), other.children or (), strict=True))
    values = zip(cast(tuple[Any, ...], group.context), group.children or (), strict=True)
    return (name for name, value in values if other_values.get(name) != value)


@dataclass(frozen=True)
class Call:
    """A call of a training step.

    Attributes:
        args: its positional arguments.
        kwargs: its keyword arguments.
        tensors: in these.
        parameters: of each optimizer.
        updates: of each optimizer that the step updates.
        key: its signature.
        begins_without: whether the parameters have no gradients that the step could read.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: list[Tensor]
    parameters: list[list[Tensor]]
    updates: list[Update]
    key: Key
    begins_without: bool

    @property
    def every(self) -> list[Tensor]:
        """The parameters of all optimizers."""
        return [*chain.from_iterable(self.parameters)]


@dataclass(frozen=True)
class Refusal:
    """Why a step is in no graph. The step has not been run.

    Attributes:
        reason: for reports.
        full: whether there are too many graphs, so that none of a part of the step may be captured either.
        first: whether an optimizer makes its state in this call, as it does in an eager first step. The next may be
            captured, so this is nothing to report.
        begins_without: of the refused call; ``None`` if that does not matter.
    """

    reason: str
    full: bool = False
    first: bool = False
    begins_without: bool | None = True

    def inputs(self, call: Call) -> Sequence[Tensor] | None:
        """``()`` if capturing the call would fail again, ``None`` if it may not."""
        return () if self.begins_without in (call.begins_without, None) else None

    def failed(self, call: Call) -> FailedGuard | None:
        """``None``: it has no guards."""
        return None


def call_of(step: WrittenStep, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | Refusal:
    """The call of a step with these arguments, or why no graph would compute it."""
    try:
        tensors, structure = flatten((args, kwargs))
    except TraceError as error:
        return Refusal(str(error))
    parameters = [parameters_of(optimizer) for optimizer in step.optimizers]
    every = [*chain.from_iterable(parameters)]
    if reason := _obstacle(step, every, tensors):
        return Refusal(reason)
    updates, groups = [], []
    for optimizer, known in zip(step.updated, step.hyperparameters, strict=True):
        own = parameters_of(optimizer)
        group, reason = known.refresh()
        state = state_of(optimizer, own)
        if group is None or isinstance(state, str):
            return Refusal(reason or str(state))
        device = own[0].device if own else torch.device("cpu")
        groups.append(group)
        updates.append(Update(optimizer, groups_of(optimizer, known.inputs), state, known.numbers(device)))
    states = [*chain.from_iterable(each.state.tensors for each in updates)]
    sizes = tuple(len(group["params"]) for optimizer in step.optimizers for group in optimizer.param_groups)
    key = Key(
        structure,
        tuple(map(kind_of, tensors)),
        aliases_of([*map(local_of, (*every, *states)), *tensors]),
        numerics(),
        (sizes, *map(WeakIdRef, map(local_of, every))),  # PyTorch swaps no DTensor that has weak references
        bytes(map(_REQUIRES_GRADIENTS, every)),
        tuple(groups),
        (*(each.state.names for each in updates), *map(kind_of, states)),
    )
    begins_without = not step.body.takes_gradients or have_no_gradients(every)
    return Call(args, kwargs, tensors, parameters, updates, key, begins_without)


def _obstacle(step: WrittenStep, parameters: Sequence[Tensor], tensors: Sequence[Tensor]) -> str:
    if reason := unusual_call() or unusual_tensor(tensors) or circumstances():
        return reason
    if any(map(_REQUIRES_GRADIENTS, tensors)):
        return "a tensor of the batch requires gradients, and a graph would compute none"
    if have_hooks(parameters):
        return HOOKED
    if not any(map(_REQUIRES_GRADIENTS, parameters)):
        return "the optimizer has no parameters that require gradients"
    if len(set(map(id, parameters))) < sum(len(set(map(id, parameters_of(each)))) for each in step.optimizers):
        return "a parameter belongs to two optimizers"
    return next(filter(None, map(obstacle, step.updated)), "")


def circumstances() -> str:
    """The global hook or mode that a graph of a backward would ignore, in words, or ``""``."""
    if hooks_are_set():
        return "hooks of saved tensors are set, and a graph saves none"
    if nn_module._global_backward_hooks or nn_module._global_backward_pre_hooks:
        return "a submodule has backward hooks, which a graph would not call"
    return anomaly_detection()


def kind_of(tensor: Tensor) -> Hashable:
    """What a graph is compiled for."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, placement_of(tensor)


_REQUIRES_GRADIENTS = attrgetter("requires_grad")
