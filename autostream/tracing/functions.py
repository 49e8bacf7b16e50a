"""Functions as modules: what they refer to is part of what is traced.

model ──▶ module_of
loss  ──▶ loss_of: of PyTorch's own, what compares the model's outputs with a target
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from autostream.errors import TargetError
from autostream.tracing.reads import Reads


def module_of(function: Callable[..., Any]) -> nn.Module:
    """A module as it is; a function as a module whose submodules are those that it refers to.

    Example:
        >>> linear = nn.Linear(2, 2)
        >>> dict(module_of(lambda x: linear(x)).named_children())
        {'linear': Linear(in_features=2, out_features=2, bias=True)}
    """
    return function if isinstance(function, nn.Module) else _FunctionModule(function)


class References:
    """What functions that are part of a model refer to, and whether they still do.

    Args:
        model: its functions get for submodules what they refer to now.

    Example:
        >>> layer = nn.Linear(1, 1)
        >>> module = module_of(lambda x: layer(x))
        >>> references = References(module)
        >>> layer = nn.Linear(1, 2)
        >>> references.hold()
        False
        >>> References(module).hold(), module.layer is layer
        (True, True)
    """

    def __init__(self, model: nn.Module) -> None:
        made = [module for module in model.modules() if isinstance(module, _FunctionModule)]
        self._functions = [(module._modules, Reads([module._autostream_function])) for module in made]
        for modules, reads in self._functions:
            if modules != (found := reads.modules()):  # in place: others look at the dictionary
                modules.update(found)  # first, for another thread may look meanwhile
                for name in modules.keys() - found.keys():
                    del modules[name]

    def hold(self) -> bool:
        """Whether the submodules of functions are what these refer to."""
        return all(modules == reads.modules() for modules, reads in self._functions)


def loss_of(function: Callable[..., Any]) -> nn.Module:
    """A loss as a module that takes a model and a batch.

    PyTorch's own losses compare outputs with a target, which is the last of a batch; the others are the model's inputs.

    Example:
        >>> import torch
        >>> loss_of(nn.MSELoss())(nn.Identity(), torch.ones(2), torch.zeros(2))
        tensor(1.)
    """
    loss = module_of(function)
    return _Criterion(loss) if _is_criterion(function) else loss


def check_loss(loss: nn.Module, count: int) -> None:
    """See that a loss takes a model and a batch of so many.

    Raises:
        TargetError: it does not, by its signature.

    Example:
        >>> check_loss(module_of(lambda output, target: output - target), 2)
        Traceback (most recent call last):
        ...
        autostream.errors.TargetError: loss_fn is called with the model and a batch of 2, and takes (output, target): \
where it takes the model's outputs, use lambda model, x, y: loss_fn(model(x), y)
    """
    signature = _signature(loss)
    if signature is None:
        return
    try:
        signature.bind(*range(1 + count))
    except TypeError:
        raise TargetError(
            f"loss_fn is called with the model and a batch of {count}, and takes {signature}: where it takes the "
            "model's outputs, use lambda model, x, y: loss_fn(model(x), y)"
        ) from None


def parameters_of(module: nn.Module) -> Mapping[str, inspect.Parameter]:
    """What a module's ``forward`` takes, or the function that it was made of; nothing where Python cannot tell.

    Example:
        >>> list(parameters_of(nn.Linear(1, 1))), list(parameters_of(module_of(lambda x, y: x + y)))
        (['input'], ['x', 'y'])
    """
    signature = _signature(module)
    return {} if signature is None else signature.parameters


def _signature(module: nn.Module) -> inspect.Signature | None:
    function = module._autostream_function if isinstance(module, _FunctionModule) else module.forward
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):  # it has none that Python knows
        return None


def _is_criterion(function: Callable[..., Any]) -> bool:
    """Whether a loss is one of PyTorch's: a module or one derived from it, a function, or such with some arguments."""
    if isinstance(function, partial):
        return _is_criterion(function.func)
    if isinstance(function, nn.Module):
        return any(kind.__module__ == "torch.nn.modules.loss" for kind in type(function).__mro__)
    return getattr(function, "__module__", None) == "torch.nn.functional"


class _Criterion(nn.Module):
    """A loss of the model's outputs and a target."""

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, model: nn.Module, *batch: Any) -> Tensor:
        if len(batch) < 2:
            name = self.loss._get_name()  # type: ignore[no-untyped-call]
            raise TargetError(f"{name} compares outputs with a target: call the step with inputs and a target")
        *inputs, target = batch
        loss: Tensor = self.loss(model(*inputs), target)
        return loss


class _FunctionModule(nn.Module):
    """A function as a module. The modules that it refers to, in functions that it calls too, are its submodules."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._autostream_function = function
        self._modules.update(Reads([function]).modules())  # not add_module, which refuses names of its own attributes

    @property
    def training(self) -> bool:
        """A function has no mode of its own."""
        return any(module.training for module in self.children())

    @training.setter
    def training(self, mode: bool) -> None:
        pass

    def _get_name(self) -> str:
        return getattr(self._autostream_function, "__qualname__", type(self._autostream_function).__name__)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._autostream_function(*args, **kwargs)
