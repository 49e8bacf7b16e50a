"""Microbatches: splitting a batch, and joining what the loss function returned for each part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from autostream.errors import TargetError, TraceError, a_type
from autostream.frontend.tree import flatten, map_tensors, unflatten

Batch = tuple[Any, ...]
"""The arguments of a training step."""


def parts_of(batch: Batch, count: int) -> list[Batch]:
    """Split a batch into equal parts along the first dimension of its tensors.

    Tensors with another number of rows, and all other values, are the same in each part.

    Raises:
        TargetError: there are no equal parts, or the batch has an object that is not a known container.

    Example:
        >>> import torch
        >>> parts_of((torch.arange(4), torch.ones(2), 0.5), 2)
        [(tensor([0, 1]), tensor([1., 1.]), 0.5), (tensor([2, 3]), tensor([1., 1.]), 0.5)]
    """
    if count == 1:
        return [batch]
    try:
        tensors, structure = flatten(batch)
    except TraceError as error:
        raise TargetError(f"a batch has no {count} equal parts: {error}") from error
    rows = next((len(tensor) for tensor in tensors if tensor.dim()), 0)
    if rows % count:
        raise TargetError(
            f"a batch of {rows} has no {count} equal parts: choose another number of microbatches, or leave out the "
            "last batch of a DataLoader, which may have fewer rows than the others: drop_last=True"
        )
    columns = [tensor.chunk(count) if tensor.dim() and len(tensor) == rows else [tensor] * count for tensor in tensors]
    return [unflatten(structure, [column[at] for column in columns]) for at in range(count)]


def loss_in(result: Any) -> Tensor:
    """The loss from the result of a loss function: the result itself, or the first item of a tuple.

    Raises:
        TargetError: it is not a scalar tensor.

    Example:
        >>> import torch
        >>> loss_in((torch.tensor(0.5), "outputs"))
        tensor(0.5000)
    """
    loss = result[0] if isinstance(result, (tuple, list)) and result else result
    if not isinstance(loss, Tensor):
        kind = a_type(loss)
        raise TargetError(
            f"loss_fn returned {kind}: let it return the loss, a scalar tensor, or a tuple that begins with it"
        )
    if loss.numel() != 1:
        shape = "x".join(map(str, loss.shape))
        raise TargetError(f"loss_fn returned a loss of shape {shape}: let it return a scalar, such as loss.mean()")
    return loss


def detached(result: Any) -> Any:
    """The result of a loss function, detached from autograd's graph."""
    try:
        return map_tensors(Tensor.detach, result)
    except TraceError:  # it contains itself
        return result


def summed(results: Sequence[Any]) -> Any:
    """The result of a step: the sum of the parts' losses, or the result of a single part.

    Example:
        >>> summed([0.5, 0.25]), summed([("loss", "outputs")])
        (0.75, ('loss', 'outputs'))
    """
    return results[0] if len(results) == 1 else sum(results[1:], results[0])
