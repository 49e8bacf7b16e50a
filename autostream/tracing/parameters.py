"""The parameters of an optimizer: which modules hold them, their gradients, and their state."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module
from torch.optim import Optimizer

from autostream.errors import TargetError, TraceError
from autostream.storages import layout_of, storage_of
from autostream.tracing.functions import References
from autostream.tracing.state import Entries


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """The parameters of an optimizer, group by group."""
    return list(chain.from_iterable(map(_PARAMETERS, optimizer.param_groups)))


_PARAMETERS = operator.itemgetter("params")


def have_hooks(parameters: Sequence[Tensor]) -> bool:
    """Whether something else happens when one of these gets a gradient.

    Example:
        >>> weight = nn.Parameter(torch.ones(2))
        >>> handle = weight.register_hook(lambda gradient: gradient * 2)
        >>> before = have_hooks([weight])
        >>> handle.remove()
        >>> before, have_hooks([weight])
        (True, False)
    """
    return any(map(_HOOKS, parameters)) or any(map(_LATER_HOOKS, parameters))


_HOOKS = operator.attrgetter("_backward_hooks")
_LATER_HOOKS = operator.attrgetter("_post_accumulate_grad_hooks")


class Holders:
    """Where the modules of a step hold the parameters of its optimizer.

    Args:
        step: the step.
        optimizer: its optimizer.

    Attributes:
        names: of the parameters in the step, by group.

    Raises:
        TargetError: they do not hold one of them.
    """

    def __init__(self, step: nn.Module, optimizer: Optimizer) -> None:
        self.look(step, optimizer)

    def look(self, step: nn.Module, optimizer: Optimizer) -> None:
        """Find them where they are now.

        Raises:
            TargetError: they are not held any more.
        """
        self._references = References(step)
        names = {id(parameter): name for name, parameter in step.named_parameters()}
        parameters = parameters_of(optimizer)
        if strangers := [parameter for parameter in parameters if id(parameter) not in names]:
            shapes = ", ".join("x".join(map(str, stranger.shape)) or "scalar" for stranger in strangers[:3])
            raise TargetError(
                f"{len(strangers)} of the optimizer's {len(parameters)} parameters (of shape {shapes}) are not the "
                "model's: make the optimizer of model.parameters(), and loss_fn a module where it has parameters too"
            )
        self.names = tuple(tuple(names[id(each)] for each in group["params"]) for group in optimizer.param_groups)
        self._sizes = list(map(len, self.names))
        paths = [name.rpartition(".") for name in chain.from_iterable(self.names)]
        holders = [step.get_submodule(path)._parameters for path, _, _ in paths]
        # TorchScript modules have something else there, which never changes.
        self._dicts = [holder if isinstance(holder, dict) else dict(holder.items()) for holder in holders]
        self._keys = [key for _, _, key in paths]
        modules = list(step.modules())
        # Names lead to other parameters as soon as a submodule takes the place of another.
        children = [module._modules for module in modules if isinstance(module._modules, dict)]
        self._modules = Entries(
            (names for names in children for _ in names),
            chain.from_iterable(children),
            chain.from_iterable(map(dict.values, children)),
        )
        ours = set(map(id, parameters))
        dicts = (module._parameters for module in modules if isinstance(module._parameters, dict))
        self._others = [
            holder for holder in dicts if any(own is not None and id(own) not in ours for own in holder.values())
        ]
        self._hooks = [hooks for module in modules for hooks in (module._backward_hooks, module._backward_pre_hooks)]
        self.parallel = any(isinstance(module, nn.parallel.DistributedDataParallel) for module in modules)

    def hold(self, optimizer: Optimizer, parameters: Sequence[Tensor]) -> bool:
        """Whether these are the optimizer's parameters, in the groups and the places where they were."""
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        return (
            sizes == self._sizes
            and all(map(operator.is_, map(dict.get, self._dicts, self._keys), parameters))
            and self._modules.unchanged()
            and self._references.hold()
        )

    def hooked(self) -> str:
        """Why the modules, or parameters of theirs, do more in a backward than a graph of it would, or ``""``."""
        if self.parallel:
            return "DistributedDataParallel averages gradients by hooks, which a graph would not call"
        if any(self._hooks) or nn_module._global_backward_hooks or nn_module._global_backward_pre_hooks:
            return "a submodule has backward hooks, which a graph would not call"
        if have_hooks([own for holder in self._others for own in holder.values() if own is not None]):
            return "a parameter that is not the optimizer's has hooks on its gradient, which a graph would not call"
        return ""


class OptimizerState(nn.Module):
    """An optimizer's state as buffers: ``exp_avg_3`` is ``exp_avg`` of its fourth parameter."""

    def renew(self, optimizer: Optimizer, parameters: Sequence[Tensor]) -> str:
        """Look the state up; returns why it cannot be part of a graph, or ``""``.

        Counters that the optimizer keeps on the host go to the device, where a graph needs them.
        """
        found: dict[str, Tensor] = {}
        for at, parameter in enumerate(parameters):
            values = optimizer.state.get(parameter, {})
            for name, value in values.items():
                if isinstance(value, Tensor):
                    if value.device != parameter.device:
                        value = values[name] = value.to(parameter.device)
                    found[f"{name}_{at}"] = value
                elif value is not None:
                    return f"the optimizer's state has a {type(value).__name__} ({name}), and a graph takes tensors"
        self._buffers.clear()
        self._buffers.update(found)
        return ""

    def of(self, parameters: Sequence[Tensor]) -> dict[Tensor, dict[str, Tensor]]:
        """The buffers by parameter and name."""
        state: dict[Tensor, dict[str, Tensor]] = defaultdict(dict)
        for key, value in self._buffers.items():
            name, _, at = key.rpartition("_")
            assert value is not None
            state[parameters[int(at)]][name] = value
        return state


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
