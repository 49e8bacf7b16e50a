"""Models that change their state or inputs, wrapped so that every call begins with the same ones."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, compress
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autostream.cli.modes import tensors_in
from autostream.runtime.restore import undone


class Restarted(nn.Module):
    """A model whose state is put back before each call.

    Otherwise each mode would be timed in another state, and the position in a cache that each call advances would run
    past its end.

    Args:
        model: on its device.
        state: names of the parameters and buffers that a call changes.
        copied: whether a call changes its inputs.
    """

    def __init__(self, model: nn.Module, state: Sequence[str], copied: bool) -> None:
        super().__init__()
        self.model, self.copied, self.training = model, copied, model.training
        self.saved = {f"saved_{at}": name for at, name in enumerate(state)}
        for saved, name in self.saved.items():
            self.register_buffer(saved, attrgetter(name)(model).detach().clone())

    def forward(self, *args: Any) -> Any:
        """Put the state back, then call the model."""
        for saved, name in self.saved.items():
            attrgetter(name)(self.model).copy_(attrgetter(saved)(self))
        return self.model(*(pytree.tree_map_only(Tensor, Tensor.clone, args) if self.copied else args))


@torch.no_grad()
def restarted(model: nn.Module, args: tuple[Any, ...]) -> nn.Module:
    """The model, or, where a call changes its tensors or these arguments, a :class:`Restarted` one.

    Example:
        >>> restarted(nn.ReLU(), (torch.ones(2),))
        ReLU()
        >>> norm = nn.BatchNorm1d(2)
        >>> [*restarted(norm, (torch.ones(3, 2),)).saved.values()], norm.num_batches_tracked
        (['running_mean', 'running_var', 'num_batches_tracked'], tensor(0))
    """
    state = dict(chain(model.named_parameters(), model.named_buffers()))
    state = {name: tensor for name, tensor in state.items() if tensor.layout is torch.strided}
    tensors = [*state.values(), *(tensor for tensor in tensors_in(args) if tensor.layout is torch.strided)]
    with undone(tensors, [True] * len(tensors), {str(tensor.device) for tensor in tensors if tensor.is_cuda}):
        before = list(map(Tensor.clone, tensors))
        model(*args)
        changed = [not torch.equal(now, then) for now, then in zip(tensors, before, strict=True)]
    names, copied = [*compress(state, changed)], any(changed[len(state) :])
    return Restarted(model, names, copied) if names or copied else model
