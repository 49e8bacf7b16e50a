"""A copy of a model's modules over the same tensors.

Tracing exchanges a model's parameters for fake ones while it lasts, in place. Other threads may be calling the model or
reading its state to call a schedule that is ready. So what is traced is a replica: other modules, the same tensors.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import nn

from autostream.errors import TraceError

Found = TypeVar("Found")

Twins = dict[int, Any]
"""Of a module or container, by identity, its copy: what two modules share, their twins share too."""


class ReachedOriginalError(TraceError):
    """What is traced writes to a tensor of the live model's: a replica led back to it."""


def traced_apart(
    model: nn.Module, twin: nn.Module, trace: Callable[[nn.Module], Found], led_back: Callable[[Found], bool]
) -> Found:
    """Trace a replica; the model itself where the replica leads back to it, as a function does that refers to a module.

    Args:
        model: the live model.
        twin: its replica. One that cannot be traced has no tensors afterwards, for PyTorch 2.11 keeps it.
        trace: traces either of them.
        led_back: whether what was traced uses tensors of the model that it was not given.

    Raises:
        Exception: whatever ``trace`` raises.

    Example:
        >>> model = nn.Linear(1, 1)
        >>> traced_apart(model, replica(model), lambda own: own, lambda found: found is not model) is model
        True
    """
    try:
        found = trace(twin)
    except ReachedOriginalError:
        abandon(twin)
    except BaseException:
        abandon(twin)
        raise
    else:
        if not led_back(found):
            return found
    return trace(model)


def replica(model: nn.Module) -> nn.Module:
    """Copy a model's modules with their containers; share tensors and everything else.

    Modules that are reached in other ways than through modules, containers and bound methods stay the originals.

    Example:
        >>> model = nn.Sequential(nn.Linear(1, 1))
        >>> twin = replica(model)
        >>> twin[0] is model[0], twin[0].weight is model[0].weight
        (False, True)
        >>> twin[0].weight = nn.Parameter(twin[0].weight + 1)
        >>> twin[0].weight is model[0].weight
        False
    """
    originals = list(model.modules())
    modules: dict[int, nn.Module] = {id(module): object.__new__(type(module)) for module in originals}
    twins: Twins = dict(modules)
    for module in originals:
        vars(modules[id(module)]).update({name: _twin(value, twins) for name, value in vars(module).items()})
    return modules[id(model)]


def abandon(twin: nn.Module) -> None:
    """Take parameters and buffers from a replica that somebody may keep.

    Example:
        >>> model = nn.Linear(1, 1)
        >>> twin = replica(model)
        >>> abandon(twin)
        >>> len(list(twin.parameters())), len(list(model.parameters()))
        (0, 2)
    """
    for module in twin.modules():
        module._parameters.clear()
        module._buffers.clear()


def _twin(value: Any, twins: Twins) -> Any:
    if id(value) in twins:
        return twins[id(value)]
    if isinstance(value, MethodType):
        return MethodType(value.__func__, _twin(value.__self__, twins))
    if type(value) is tuple:
        return tuple(_twin(item, twins) for item in value)
    if type(value) not in (list, set, dict, OrderedDict):
        return value
    twin = twins[id(value)] = type(value)()  # before its items, for it may be among what they contain
    if type(value) in (dict, OrderedDict):
        twin.update((name, _twin(item, twins)) for name, item in value.items())
    else:
        (twin.extend if type(value) is list else twin.update)(_twin(item, twins) for item in value)
    return twin


def with_ordinary_parameters(twin: nn.Module) -> nn.Module:
    """Exchange parameters made in inference mode for ordinary ones over the same memory.

    Export refuses to trace them.

    Example:
        >>> with torch.inference_mode():
        ...     twin = nn.Linear(1, 1)
        >>> with_ordinary_parameters(twin).weight.is_inference()
        False
    """
    ordinary: dict[int, nn.Parameter] = {}
    with torch.inference_mode(False), torch.no_grad():
        for module in twin.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is not None and parameter.is_inference():
                    place = parameter.storage_offset(), parameter.shape, parameter.stride()
                    alias = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
                    alias.set_(parameter.untyped_storage(), *place)
                    stand_in = ordinary.setdefault(id(parameter), nn.Parameter(alias, parameter.requires_grad))
                    setattr(module, name, stand_in)
    return twin
