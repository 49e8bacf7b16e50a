"""An optimizer's parameters, their gradients, and the optimizer's state."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain

from torch import Tensor
from torch.optim import Optimizer

from autostream.errors import a_type
from autostream.frontend.eager_only import unusual
from autostream.frontend.tensor_parallel import local_of
from autostream.utils.storages import share_bytes


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """The parameters of an optimizer, group by group."""
    return list(chain.from_iterable(map(_PARAMETERS, optimizer.param_groups)))


_PARAMETERS = operator.itemgetter("params")


def have_hooks(parameters: Sequence[Tensor]) -> bool:
    """Whether hooks are registered that run when one of these gets a gradient.

    Example:
        >>> import torch
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


def foreign_parameters(optimizer: Optimizer, known: Iterable[Tensor]) -> str:
    """The error message if an optimizer has parameters that are not among those known; otherwise ``""``."""
    known_ids, parameters = set(map(id, known)), parameters_of(optimizer)
    if not (foreign := [parameter for parameter in parameters if id(parameter) not in known_ids]):
        return ""
    shapes = ", ".join("x".join(map(str, parameter.shape)) or "scalar" for parameter in foreign[:3])
    return (
        f"{len(foreign)} of the optimizer's {len(parameters)} parameters (of shape {shapes}) are not the model's: make "
        "the optimizer of model.parameters(), and loss_fn a module where it has parameters too"
    )


@dataclass(frozen=True, slots=True)
class State:
    """An optimizer's state, which a graph writes in place.

    Attributes:
        names: of each tensor, the position of its parameter and its key in that parameter's state.
        tensors: the tensors.
    """

    names: tuple[tuple[int, str], ...]
    tensors: list[Tensor]


def state_of(optimizer: Optimizer, parameters: Sequence[Tensor]) -> State | str:
    """The state as it is now, or why it cannot be part of a graph.

    Step counters that the optimizer keeps on the CPU are moved to the parameters' device.

    Example:
        >>> import torch
        >>> parameter = torch.nn.Parameter(torch.ones(2))
        >>> parameter.grad = torch.ones(2)
        >>> optimizer = torch.optim.SGD([parameter], momentum=0.9)
        >>> optimizer.step()
        >>> state_of(optimizer, [parameter])
        State(names=((0, 'momentum_buffer'),), tensors=[tensor([1., 1.])])
    """
    state: dict[tuple[int, str], Tensor] = {}
    for at, parameter in enumerate(parameters):
        for name, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                state[at, name] = value
            elif value is not None:
                return f"the optimizer's state has {a_type(value)} ({name}), and a graph takes tensors"
    tensors = map(local_of, (*parameters, *state.values()))
    if share_bytes(tensor for tensor in tensors if not unusual(tensor)):
        return _OVERLAPPING
    for (at, name), value in state.items():  # after the check above: tensors that are moved share nothing any more
        device = parameters[at].device
        if value.device != device:
            state[at, name] = optimizer.state[parameters[at]][name] = value.to(device)
    return State(tuple(state), [*state.values()])


_OVERLAPPING = (
    "parameters, or tensors of the optimizer's state, share memory, which the optimizer writes for one parameter after "
    "the other, and a graph for all at once"
)


@contextmanager
def set_aside(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Set gradients to ``None``, and restore them afterwards."""
    before = {parameter: parameter.grad for parameter in parameters}
    clear_gradients(before)
    try:
        yield
    finally:
        for parameter, gradient in before.items():
            parameter.grad = gradient


def take_gradients(parameters: Iterable[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Accumulate gradients into parameters, as a backward does; a first gradient is not copied."""
    for parameter, gradient in dict(zip(parameters, gradients, strict=True)).items():  # a parameter may occur twice
        if parameter.grad is None:
            parameter.grad = gradient
        elif gradient is not None:
            parameter.grad = parameter.grad + gradient


def clear_gradients(parameters: Iterable[Tensor]) -> None:
    """Set gradients to ``None``."""
    for parameter in parameters:
        parameter.grad = None


def leave_no_gradients(parameters: Sequence[Tensor]) -> None:
    """The same, faster where there are usually none."""
    if list(map(_GRADIENT, parameters)).count(None) < len(parameters):
        clear_gradients(parameters)


def have_no_gradients(parameters: Iterable[Tensor]) -> bool:
    """Whether the gradients of all parameters are ``None``.

    Example:
        >>> import torch
        >>> have_no_gradients([torch.ones(2)])
        True
    """
    return all(gradient is None for gradient in map(_GRADIENT, parameters))


_GRADIENT = operator.attrgetter("grad")


def stateless(optimizer: Optimizer) -> frozenset[int]:
    """The ids of parameters that require gradients and have no state yet."""
    state = optimizer.state
    parameters = parameters_of(optimizer)
    return frozenset(id(parameter) for parameter in parameters if parameter.requires_grad and not state.get(parameter))
