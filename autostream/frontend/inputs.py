"""What the inputs of a captured graph are called, and whose they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from autostream.frontend.capture import Capture
from autostream.ir import Role


def names_of(captured: Capture, model: nn.Module) -> list[tuple[Role, str]]:
    """For each input of a captured graph its role and a name, which no other has.

    Parameters and buffers have the names that the model has for them; arguments are numbered; all else is called as
    Dynamo does.

    Example:
        >>> import torch
        >>> from autostream.frontend.capture import capture
        >>> linear = nn.Linear(2, 3)
        >>> [(role.value, name) for role, name in names_of(capture(linear, (torch.ones(1, 2),), {}), linear)]
        [('parameter', 'weight'), ('parameter', 'bias'), ('input', '2')]
    """
    known: dict[int, tuple[Role, str]] = {}
    for name, parameter in model.named_parameters():
        known[id(parameter)] = Role.PARAMETER, name
    for name, buffer in model.named_buffers():
        known.setdefault(id(buffer), (Role.BUFFER, name))
    names = []
    for at, (item, tensor) in enumerate(zip(captured.inputs, captured.tensors, strict=True)):
        if item.is_argument:
            names.append((Role.INPUT, str(at)))
        else:
            other = Role.PARAMETER if isinstance(tensor, nn.Parameter) else Role.CONSTANT
            names.append(known.get(id(tensor), (other, item.source)))
    return names


def names_like(values: Sequence[Any]) -> list[tuple[Role, str]]:
    """The same for a graph that a backend of ``torch.compile`` is given with these example inputs.

    Dynamo marks buffers with an attribute of its own (seen in 2.11 and 2.13). Where a version does not, they count as
    inputs like any other and are copied at each call: slower, and as right.
    """
    return [(_role(value), str(at)) for at, value in enumerate(values)]


def _role(value: Any) -> Role:
    if isinstance(value, nn.Parameter):
        return Role.PARAMETER
    static = isinstance(value, Tensor) and getattr(value, "_dynamo_static_input_type", None) is not None
    return Role.BUFFER if static else Role.INPUT
