"""Storages of tensors: identity, the bytes that a tensor covers, overlap and layout."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def storage_of(tensor: Tensor) -> int:
    """The identity of a tensor's storage, valid while a tensor of it is alive; also of fake and empty tensors.

    ``_cdata`` is private to PyTorch (seen in 2.11 and 2.13). The public ``data_ptr`` is the same for all storages
    without memory.

    Example:
        >>> import torch
        >>> x = torch.empty(0, 3)
        >>> storage_of(x) == storage_of(x.t()), storage_of(x) == storage_of(x.clone())
        (True, False)
    """
    return int(tensor.untyped_storage()._cdata)


def byte_offset(tensor: Tensor) -> int:
    """The offset of a tensor's first element in its storage, in bytes."""
    return int(tensor.storage_offset()) * tensor.element_size()


def span_of(tensor: Tensor) -> tuple[int, int]:
    """The first byte that a tensor covers in its storage, and the byte after the last one.

    Example:
        >>> import torch
        >>> span_of(torch.empty(8, dtype=torch.float32)[1::2])
        (4, 32)
    """
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = byte_offset(tensor)
    return start, start + (last + 1) * tensor.element_size() if tensor.numel() else start


def share_bytes(tensors: Iterable[Tensor]) -> bool:
    """Whether the spans of two of some tensors overlap in one storage.

    Example:
        >>> import torch
        >>> x = torch.empty(4)
        >>> share_bytes([x[:2], x[2:]]), share_bytes([x[:3], x[2:]]), share_bytes([x, x])
        (False, True, True)
    """
    spans = sorted((storage_of(tensor), *span_of(tensor)) for tensor in tensors if tensor.numel())
    return any(storage == other and start < end for (storage, _, end), (other, start, _) in pairwise(spans))


def layout_of(tensor: Tensor) -> tuple[int, ...]:
    """The strides of dimensions with more than one element.

    Example:
        >>> import torch
        >>> layout_of(torch.empty(1, 2, 3)), layout_of(torch.empty(2, 1, 3).transpose(0, 1)), layout_of(torch.empty(0))
        ((3, 1), (3, 1), ())
    """
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return tuple(stride for size, stride in pairs if size > 1) if tensor.numel() else ()


def overlaps(tensor: Tensor) -> bool:
    """Whether two elements of a tensor may have the same address."""
    extent = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride < extent:
                return True
            extent += (size - 1) * stride
    return False


def has_gaps(tensor: Tensor) -> bool:
    """Whether there is memory between a tensor's first and last element that belongs to none of its elements.

    Example:
        >>> import torch
        >>> has_gaps(torch.empty(8)[::2]), has_gaps(torch.empty(4).as_strided((3, 2), (1, 1)))
        (True, False)
    """
    extent = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and tensor.numel():
            if stride > extent:
                return True
            extent += (size - 1) * stride
    return False


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor has no overlaps and no gaps, so that ``clone`` preserves its strides."""
    return not overlaps(tensor) and not has_gaps(tensor)
