"""Saved activations that stay in a captured graph's memory until that memory is written again.

    forward ──▶ activations in its memory, saved by autograd ──▶ backward reads them there, no copy
       └──▶ another forward first: activations still in use move to copies ──▶ backward: copied back

Most calls are followed by their backward before the next call. To copy all saved activations in each call, in case they
might be overwritten, would cost memory and time for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import ref

import torch
from torch import Tensor

from autostream.runtime.static_inputs import copier


class SavedActivations:
    """Tracks which tensors lie in memory that each call of a graph overwrites, and which stream used it last.

    Its methods, and the work launched between one and the next, are for one thread at a time.

    Args:
        device: of the memory.

    Example:
        >>> memory, saved = torch.tensor([1.0]), SavedActivations(torch.device("cpu"))
        >>> (activation,) = saved.alias([memory])
        >>> saved.preserve()
        >>> _ = memory.fill_(2)  # the next call
        >>> activation
        tensor([1.])
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._aliases: list[ref[Tensor]] = []
        self._aliased_on: torch.cuda.Stream | None = None
        self._used_on: torch.cuda.Stream | None = None

    def alias(self, memory: Sequence[Tensor]) -> list[Tensor]:
        """Tensors in this memory, until :meth:`preserve`; to autograd no views, with version counters of their own."""
        self._wait_for_last_use()
        self._aliased_on = self._used_on
        aliases = [tensor.data for tensor in memory]
        self._aliases = list(map(ref, aliases))
        return aliases

    def preserve(self) -> None:
        """Move aliases that are still in use to copies, so that the current stream may write the memory."""
        needed = [tensor for alias in self._aliases if (tensor := alias()) is not None]
        if needed:
            with torch.cuda.stream(self._aliased_on):  # the stream that reads and frees them
                self._wait_for_last_use()
                for tensor in needed:
                    tensor.data = tensor.clone()
        self._aliases = []
        self._wait_for_last_use()

    def restore(self, tensors: Sequence[Tensor], memory: Sequence[Tensor]) -> None:
        """Copy these tensors to the memory, unless they lie there, for what the current stream runs next."""
        self._wait_for_last_use()
        if any(tensor.data_ptr() != target.data_ptr() for tensor, target in zip(tensors, memory, strict=True)):
            self.preserve()
            copier(memory)(tensors)

    def _wait_for_last_use(self) -> None:
        if self._device.type == "cuda":
            current = torch.cuda.current_stream(self._device)
            if self._used_on is not None and self._used_on != current:
                current.wait_stream(self._used_on)
            self._used_on = current
