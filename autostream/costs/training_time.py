"""How long forward and backward of a whole model take on its device, eagerly, as a stage of a pipeline runs them."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from statistics import median

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autostream.errors import TargetError

_RUNS = 5
"""Runs that count, after one to warm up."""


def training_us(model: nn.Module, args: Sequence[object]) -> float:
    """The median time of forward and backward, µs, which adds gradients to those that are there, as of earlier
    microbatches.

    Each run has a copy of the model and of the arguments: a second run on the same cache, say, would write behind its
    end, and on a GPU that ends the process.

    Args:
        model: has weights that are trained. Neither it, nor the arguments, nor random numbers change.
        args: of a call; an output is a tensor, or contains tensors.

    Raises:
        Exception: whatever the model raises.
        TargetError: no output depends on a weight that is trained.

    Example:
        >>> training_us(nn.Linear(4, 4), [torch.ones(2, 4)]) > 0
        True
    """
    devices = list({weight.device for weight in model.parameters() if weight.is_cuda})
    with torch.enable_grad(), torch.random.fork_rng(devices):
        times_us = [_once_us(*copy.deepcopy((model, tuple(args))), devices) for _ in range(1 + _RUNS)]
    return median(times_us[1:])


def _once_us(model: nn.Module, args: tuple[object, ...], devices: Sequence[torch.device]) -> float:
    for weight in model.parameters():
        if weight.requires_grad:
            weight.grad = torch.zeros_like(weight)
    start = _now_us(devices)
    outputs = [each for each in pytree.tree_leaves(model(*args)) if isinstance(each, Tensor) and each.requires_grad]
    if not outputs:
        raise TargetError("no output depends on a weight that is trained")
    torch.autograd.backward(outputs, list(map(torch.ones_like, outputs)))
    return _now_us(devices) - start


def _now_us(devices: Sequence[torch.device]) -> float:
    """The time when all that was launched has run."""
    for device in devices:
        torch.cuda.synchronize(device)
    return time.perf_counter() * 1e6
