"""Which tensors share memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def storage_of(tensor: Tensor) -> int:
    """What identifies a tensor's storage while any tensor of it lives; fake and empty tensors have one as well.

    ``_cdata`` is private to PyTorch (seen in 2.11 and 2.13). Its public relative, the storage's address, is the same
    for all storages without memory.

    Example:
        >>> import torch
        >>> x = torch.empty(0, 3)
        >>> storage_of(x) == storage_of(x.t()), storage_of(x) == storage_of(x.clone())
        (True, False)
    """
    return int(tensor.untyped_storage()._cdata)
