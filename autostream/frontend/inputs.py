"""The inputs of a captured graph: their roles and names, their shapes, and which of them share memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autostream.frontend.capture import Capture
from autostream.frontend.static_tensors import stays
from autostream.frontend.tensor_parallel import local_of
from autostream.ir import Role
from autostream.utils.storages import byte_offset, storage_of


def names_of(captured: Capture, model: nn.Module) -> list[tuple[Role, str]]:
    """For each input of a captured graph its role and a unique name.

    Parameters and buffers have the names that they have in the model, arguments are numbered, and all other inputs
    have the names of their sources in Dynamo. So have tensors in arguments whose address was said to stay
    (``torch._dynamo.mark_static_address``), such as those of a static cache: they count as buffers.

    Example:
        >>> from autostream.frontend.capture import capture
        >>> linear = nn.Linear(2, 3)
        >>> [(role.value, name) for role, name in names_of(capture(linear, (torch.ones(1, 2),), {}), linear)]
        [('parameter', 'weight'), ('parameter', 'bias'), ('input', '2')]
    """
    known: dict[int, tuple[Role, str]] = {}
    for name, parameter in model.named_parameters():
        known[id(parameter)] = known[id(local_of(parameter))] = Role.PARAMETER, name
    for name, buffer in model.named_buffers():
        known.setdefault(id(buffer), (Role.BUFFER, name))
    names = []
    for at, (item, tensor) in enumerate(zip(captured.inputs, captured.tensors, strict=True)):
        if item.is_argument:
            names.append((Role.BUFFER, item.source) if stays(tensor) else (Role.INPUT, str(at)))
        else:
            other = Role.PARAMETER if isinstance(tensor, nn.Parameter) else Role.CONSTANT
            names.append(known.get(id(tensor), (other, item.source)))
    return names


def names_like(values: Sequence[Any]) -> list[tuple[Role, str]]:
    """The same for the example inputs that ``torch.compile`` gives a backend.

    Dynamo marks buffers with a private attribute. Without that mark they count as inputs and are copied in each call:
    slower, but correct.
    """
    return [(_role(value), str(at)) for at, value in enumerate(values)]


def _role(value: Any) -> Role:
    if isinstance(value, nn.Parameter):
        return Role.PARAMETER
    return Role.BUFFER if isinstance(value, Tensor) and stays(value) else Role.INPUT


def described(tensors: Sequence[Tensor], device: str | None = None) -> str:
    """The shapes, dtypes and devices of tensors, as text.

    Args:
        tensors: any.
        device: the device to name instead of their own, unless one of them is on a device of this type.

    Example:
        >>> described([torch.ones(2, 3), torch.tensor(1)])
        '2x3:float32 on cpu, scalar:int64 on cpu'
    """
    moved = None if device is None else torch.device(device)
    if moved is not None and any(tensor.device.type == moved.type for tensor in tensors):
        moved = None
    readable = ", ".join(
        f"{'x'.join(map(str, t.shape)) or 'scalar'}:{str(t.dtype).removeprefix('torch.')} on {moved or t.device}"
        for t in tensors
    )
    return readable or "no tensors"


def aliases_of(tensors: Sequence[Tensor]) -> tuple[tuple[int, int], ...]:
    """Which tensors share memory: ``()`` if none do.

    Otherwise, for each, the position of the first tensor in the same storage, and its offset from that one in bytes.
    """
    storages = [storage_of(t) for t in tensors]
    if len(set(storages)) == len(storages):
        return ()
    # Offsets count from the tensor that is shared with: where a tensor lies in its storage does not matter otherwise.
    firsts = [storages.index(storage) for storage in storages]
    return tuple(
        (first, byte_offset(t) - byte_offset(tensors[first])) for first, t in zip(firsts, tensors, strict=True)
    )
