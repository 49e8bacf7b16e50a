"""What two calls must have in common to share one schedule."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from autostream.frontend.numerics import numerics
from autostream.frontend.tree import Structure, constants_of
from autostream.storages import byte_offset, storage_of
from autostream.tracing.reads import Read, unlike


@dataclass(frozen=True, slots=True)
class Signature:
    """Everything that tracing or the choice of kernels depends on, hashable.

    Attributes:
        structure: of positional and keyword arguments, constants among them.
        tensors: per tensor its shape, strides, dtype and device.
        aliases: per tensor, which earlier tensor shares its storage and how many bytes ahead; ``()`` where none does.
        training: of the model and all its submodules, one byte each.
        grad_mode: whether gradients are enabled, for a model may ask.
        gradients: which of the model's parameters, and then of the tensors, require gradients, one byte each; ``b""``
            where none does, or none are recorded.
        numerics: autocast, precisions, determinism and attention kernels as they are now.
        read: what the model's functions read elsewhere, such as numbers that are globals.
    """

    structure: Structure
    tensors: tuple[tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device], ...]
    aliases: tuple[tuple[int, int], ...]
    training: bytes
    grad_mode: bool
    gradients: bytes
    numerics: Hashable
    read: Read = ()

    def on(self, device: str | None) -> Signature:
        """The same, its tensors on another kind of device; as it is for ``None``."""
        if device is None or all(own.type == torch.device(device).type for *_, own in self.tensors):
            return self
        moved = tuple((*layout, torch.device(device)) for *layout, _ in self.tensors)
        return replace(self, tensors=moved)  # type: ignore[arg-type]

    def unlike(self, other: Signature) -> str:
        """What differs from another, e.g. ``training modes, momentum``."""
        fields = (what for name, what in _FIELDS.items() if getattr(self, name) != getattr(other, name))
        pairs = zip(constants_of(self.structure), constants_of(other.structure), strict=False)
        settings = [name for mine, its in pairs if type(mine) is type(its) for name in mine.unlike(its)]
        arguments = ["arguments"] if self.structure != other.structure and not settings else settings
        return ", ".join(dict.fromkeys((*fields, *arguments, *unlike(self.read, other.read))))

    def __str__(self) -> str:
        """Readable, e.g. ``1x3x224x224:float16 on cuda:0, eval, no gradients``."""
        mode = "train" if any(self.training) else "eval"
        return f"{_described(self.tensors)}, {mode}, {'gradients' if self.gradients else 'no gradients'}"


_FIELDS = {
    "tensors": "shapes, strides, dtypes or devices",
    "aliases": "which tensors share memory",
    "training": "training modes",
    "grad_mode": "whether gradients are recorded",
    "gradients": "what requires gradients",
    "numerics": "autocast, precisions or other numerics",
}


def signature_of(
    structure: Structure, tensors: Sequence[Tensor], training: bytes, gradients: bytes = b"", read: Read = ()
) -> Signature:
    """The signature of a call with these flat arguments, in the modes that are set now."""
    return Signature(
        structure,
        tuple((t.shape, t.stride(), t.dtype, t.device) for t in tensors),
        aliases_of(tensors) if len(tensors) > 1 else (),
        training,
        torch.is_grad_enabled(),
        gradients,
        numerics(),
        read,
    )


def described(tensors: Sequence[Tensor], device: str | None = None) -> str:
    """What tensors are like, readable.

    Args:
        tensors: any.
        device: where to say that they are, if none of them is on a device of this type.

    Example:
        >>> import torch
        >>> described([torch.ones(2, 3), torch.tensor(1)])
        '2x3:float32 on cpu, scalar:int64 on cpu'
    """
    moved = None if device is None else torch.device(device)
    if moved is None or any(t.device.type == moved.type for t in tensors):
        return _described([(t.shape, (), t.dtype, t.device) for t in tensors])
    return _described([(t.shape, (), t.dtype, moved) for t in tensors])


def _described(kinds: Sequence[tuple[Sequence[int], Any, torch.dtype, torch.device]]) -> str:
    readable = ", ".join(
        f"{'x'.join(map(str, shape)) or 'scalar'}:{str(dtype).removeprefix('torch.')} on {device}"
        for shape, _, dtype, device in kinds
    )
    return readable or "no tensors"


def aliases_of(tensors: Sequence[Tensor]) -> tuple[tuple[int, int], ...]:
    """Which tensors share memory: for each, the first in its storage and how many bytes ahead; ``()`` where none do."""
    storages = [storage_of(t) for t in tensors]
    if len(set(storages)) == len(storages):
        return ()
    # Offsets matter only relative to the tensor shared with: its own place in memory is not the program's business.
    firsts = [storages.index(storage) for storage in storages]
    return tuple(
        (first, byte_offset(t) - byte_offset(tensors[first])) for first, t in zip(firsts, tensors, strict=True)
    )
