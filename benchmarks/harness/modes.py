"""The modes of inference that the benchmarks compare: those of :mod:`autostream.cli.modes` and more.

Outputs of ``compile_reduce_overhead`` and ``make_graphed_callables`` are overwritten by the next call, as their
documentation says; all others return new memory.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, get_args

import torch
from torch import nn

from autostream.cli.modes import (
    Call,
    Mode,
    captured,
    compile_default,
    compile_reduce_overhead,
    compiled,
    cuda_graph,
    eager,
    optimized,
)
from autostream.options import KernelLevel, PolicyName


def make_graphed_callables(model: nn.Module, args: Sequence[Any]) -> Call:
    """The model captured by PyTorch's own helper, which changes the module and writes to the arguments it is given."""
    graphed: Call = torch.cuda.make_graphed_callables(_Shell(model), copy.deepcopy(tuple(args)))
    return graphed


class _Shell(nn.Module):
    """Wraps a model, so that its own ``forward`` is not replaced."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any) -> Any:
        return self.model(*args)


def compile_max_autotune(model: nn.Module, args: Sequence[Any]) -> Call:
    """``torch.compile`` with kernels chosen by trial, which takes minutes."""
    return compiled(model, mode="max-autotune")


def compile_captured(model: nn.Module, args: Sequence[Any]) -> Call:
    """The kernels of ``torch.compile`` captured in one graph on one stream."""
    return captured(compiled(model), args)


AUTOSTREAM: dict[str, Mode] = {
    "autostream": optimized,
    **{
        f"autostream_{kernels}_{policy}": partial(optimized, kernels=kernels, policy=policy)
        for kernels in get_args(KernelLevel)
        for policy in get_args(PolicyName)
        if "auto" not in (kernels, policy)
    },
    "autostream_inductor": partial(optimized, kernels="inductor"),
}
"""The defaults, then each level of kernels with each policy."""

CPU: dict[str, Mode] = {mode.__name__: mode for mode in (eager, compile_default)}
CPU |= {name: mode for name, mode in AUTOSTREAM.items() if "inductor" not in name}

CUDA: dict[str, Mode] = {
    mode.__name__: mode
    for mode in (
        *(eager, cuda_graph),
        *(compile_default, compile_reduce_overhead, compile_max_autotune, compile_captured),
    )
}
CUDA |= AUTOSTREAM
CUDA["autostream_any_memory"] = partial(optimized, memory_budget=math.inf)
# Prepared last: its graph goes on to use a cuBLAS workspace that other captures give away.
CUDA |= {make_graphed_callables.__name__: make_graphed_callables}


def modes_of(device: torch.device) -> Mapping[str, Mode]:
    """All modes of a device by name, in the order in which they can be prepared."""
    return CPU if device.type == "cpu" else CUDA
