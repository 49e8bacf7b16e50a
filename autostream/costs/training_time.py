"""How long forward and backward of a whole model take on its device, eagerly, as a stage of a pipeline runs them."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.benchmark import Timer

_SECONDS = 0.5
"""For how long it runs."""


def training_us(model: nn.Module, args: Sequence[object]) -> float:
    """The median time of forward and backward, µs; of a copy, so that the model and random numbers do not change.

    Args:
        model: has weights that are trained.
        args: of a call; an output is a tensor, or contains tensors.

    Raises:
        Exception: whatever the model raises, or that no output depends on a weight.

    Example:
        >>> training_us(nn.Linear(4, 4), [torch.ones(2, 4)]) > 0
        True
    """
    model = copy.deepcopy(model)
    weights = [weight for weight in model.parameters() if weight.requires_grad]

    def train() -> None:
        outputs = [each for each in pytree.tree_leaves(model(*args)) if isinstance(each, Tensor) and each.requires_grad]
        torch.autograd.grad(outputs, weights, list(map(torch.ones_like, outputs)), allow_unused=True)

    devices = [weight.device for weight in weights if weight.is_cuda][:1]
    with torch.enable_grad(), torch.random.fork_rng(devices):
        train()
        timer = Timer("train()", globals={"train": train}, num_threads=torch.get_num_threads())
        return timer.blocked_autorange(min_run_time=_SECONDS).median * 1e6
