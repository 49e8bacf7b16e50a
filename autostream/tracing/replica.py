"""A copy of a model's modules over the same tensors.

Tracing exchanges a model's parameters for fake ones while it lasts, in place. Other threads may be calling the model or
reading its state to call a schedule that is ready. So what is traced is a replica: other modules, the same tensors.
"""

from __future__ import annotations

from collections import OrderedDict
from types import MethodType
from typing import Any

from torch import nn

Twins = dict[int, nn.Module]


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
    twins: Twins = {id(module): object.__new__(type(module)) for module in originals}
    for module in originals:
        vars(twins[id(module)]).update({name: _twin(value, twins) for name, value in vars(module).items()})
    return twins[id(model)]


def _twin(value: Any, twins: Twins) -> Any:
    if isinstance(value, nn.Module):
        return twins.get(id(value), value)
    if isinstance(value, MethodType):
        return MethodType(value.__func__, _twin(value.__self__, twins))
    if type(value) in (list, tuple, set):
        return type(value)(_twin(item, twins) for item in value)
    if type(value) in (dict, OrderedDict):
        return type(value)((name, _twin(item, twins)) for name, item in value.items())
    return value
