"""The parameters of an optimizer, their gradients, and their state."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor
from torch.optim import Optimizer

from autostream.errors import TraceError
from autostream.frontend.eager_only import unusual
from autostream.utils.storages import layout_of, share_bytes, storage_of


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """The parameters of an optimizer, group by group."""
    return list(chain.from_iterable(map(_PARAMETERS, optimizer.param_groups)))


_PARAMETERS = operator.itemgetter("params")


def have_hooks(parameters: Sequence[Tensor]) -> bool:
    """Whether something else happens when one of these gets a gradient.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> handle = weight.register_hook(lambda gradient: gradient * 2)
        >>> before = have_hooks([weight])
        >>> handle.remove()
        >>> before, have_hooks([weight])
        (True, False)
    """
    return any(map(_HOOKS, parameters)) or any(map(_LATER_HOOKS, parameters))


_HOOKS = operator.attrgetter("_backward_hooks")
_LATER_HOOKS = operator.attrgetter("_post_accumulate_grad_hooks")


def strangers(optimizer: Optimizer, known: Iterable[Tensor]) -> str:
    """What to say of parameters of an optimizer that are none of those known; ``""`` where all are."""
    ours, parameters = set(map(id, known)), parameters_of(optimizer)
    if not (found := [parameter for parameter in parameters if id(parameter) not in ours]):
        return ""
    shapes = ", ".join("x".join(map(str, stranger.shape)) or "scalar" for stranger in found[:3])
    return (
        f"{len(found)} of the optimizer's {len(parameters)} parameters (of shape {shapes}) are not the model's: make "
        "the optimizer of model.parameters(), and loss_fn a module where it has parameters too"
    )


@dataclass(frozen=True, slots=True)
class State:
    """An optimizer's state, in which a graph writes.

    Attributes:
        names: of each tensor, the position of its parameter and its own name.
        tensors: the tensors.
    """

    names: tuple[tuple[int, str], ...]
    tensors: list[Tensor]


def state_of(optimizer: Optimizer, parameters: Sequence[Tensor]) -> State | str:
    """The state as it is now, or why it cannot be part of a graph.

    Counters that the optimizer keeps on the host go to the device, where a graph needs them.

    Example:
        >>> parameter = torch.nn.Parameter(torch.ones(2))
        >>> parameter.grad = torch.ones(2)
        >>> optimizer = torch.optim.SGD([parameter], momentum=0.9)
        >>> optimizer.step()
        >>> state_of(optimizer, [parameter])
        State(names=((0, 'momentum_buffer'),), tensors=[tensor([1., 1.])])
    """
    found: dict[tuple[int, str], Tensor] = {}
    for at, parameter in enumerate(parameters):
        for name, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                found[at, name] = value
            elif value is not None:
                return f"the optimizer's state has a {type(value).__name__} ({name}), and a graph takes tensors"
    if share_bytes(own for own in (*parameters, *found.values()) if not unusual(own)):
        return _OVERLAPPING
    for (at, name), value in found.items():  # what was shared would be so no longer
        device = parameters[at].device
        if value.device != device:
            found[at, name] = optimizer.state[parameters[at]][name] = value.to(device)
    return State(tuple(found), [*found.values()])


_OVERLAPPING = (
    "parameters, or tensors of the optimizer's state, share memory, which the optimizer writes for one parameter after "
    "the other, and a graph for all at once"
)


@contextmanager
def set_aside(parameters: Iterable[Tensor]) -> Iterator[None]:
    """No parameter has a gradient inside at first; afterwards each has what it had before."""
    before = {parameter: parameter.grad for parameter in parameters}
    clear_gradients(before)
    try:
        yield
    finally:
        for parameter, gradient in before.items():
            parameter.grad = gradient


def take_gradients(parameters: Iterable[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Give parameters their gradients, as they are; what they have is added to, as in a backward."""
    for parameter, gradient in dict(zip(parameters, gradients, strict=True)).items():  # one may be there twice
        if parameter.grad is None:
            parameter.grad = gradient
        elif gradient is not None:
            parameter.grad = parameter.grad + gradient


def clear_gradients(parameters: Iterable[Tensor]) -> None:
    """Leave no gradient."""
    for parameter in parameters:
        parameter.grad = None


def leave_no_gradients(parameters: Sequence[Tensor]) -> None:
    """The same, where there are most often none."""
    if list(map(_GRADIENT, parameters)).count(None) < len(parameters):
        clear_gradients(parameters)


_GRADIENT = operator.attrgetter("grad")


def stateless(optimizer: Optimizer) -> frozenset[int]:
    """The identities of parameters that require gradients and have no state now; nothing is looked up for it."""
    state = optimizer.state
    return frozenset(id(own) for own in parameters_of(optimizer) if own.requires_grad and not state.get(own))


def set_gradients(parameters: Sequence[Tensor], gradients: Sequence[Tensor | None], taken: set[int]) -> None:
    """Give parameters their gradients, each in memory of its own that lies as the parameter's, as autograd does.

    What comes after writes to them: two may be one tensor, or a number that is seen as many.

    Args:
        parameters: the parameters.
        gradients: of each, or ``None``.
        taken: storages that none may share; those of the gradients are added.

    Raises:
        TraceError: a gradient is sparse.
    """
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is not None and gradient.layout is not torch.strided:
            raise TraceError(f"the gradient of a parameter has the layout {gradient.layout}")
        if gradient is not None and (storage_of(gradient) in taken or layout_of(gradient) != layout_of(parameter)):
            gradient = torch.empty_like(parameter).copy_(gradient)
        if gradient is not None:
            taken.add(storage_of(gradient))
        parameter.grad = gradient
