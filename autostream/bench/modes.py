"""The ways to run a model that are compared. A mode is one function: from a model and its arguments to a call.

The call takes such arguments and returns what the model would. It is made and called without gradients. Each mode runs
through its public call, with all that belongs to it: modes that hold inputs in static memory copy them in. Outputs of
``compile_reduce_overhead`` and ``make_graphed_callables`` are overwritten by the next call, as their documentation
says; all others return new memory.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import autostream
from autostream.options import KernelLevel, PolicyName
from autostream.runtime.capture import capture
from autostream.runtime.streams import capture_stream

Call = Callable[..., Any]
Mode = Callable[[nn.Module, Sequence[Any]], Call]

WARMUP = 3
"""Runs before a capture: libraries load kernels and choose algorithms in the first ones."""


def eager(model: nn.Module, args: Sequence[Any]) -> Call:
    """The model itself."""
    return model


def cuda_graph(model: nn.Module, args: Sequence[Any]) -> Call:
    """The model captured on one stream."""
    return captured(model, args)


def make_graphed_callables(model: nn.Module, args: Sequence[Any]) -> Call:
    """The model captured by PyTorch's own helper, which changes the module and writes to the arguments it is given."""
    graphed: Call = torch.cuda.make_graphed_callables(_Shell(model), copy.deepcopy(tuple(args)))
    return graphed


class _Shell(nn.Module):
    """A module of one's own around a model, whose ``forward`` may be replaced."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any) -> Any:
        return self.model(*args)


def compile_default(model: nn.Module, args: Sequence[Any]) -> Call:
    """``torch.compile``."""
    return _compiled(model)


def compile_reduce_overhead(model: nn.Module, args: Sequence[Any]) -> Call:
    """``torch.compile`` with its own CUDA graphs."""
    return _compiled(model, mode="reduce-overhead")


def compile_max_autotune(model: nn.Module, args: Sequence[Any]) -> Call:
    """``torch.compile`` with kernels chosen by trial, which takes minutes."""
    return _compiled(model, mode="max-autotune")


def compile_captured(model: nn.Module, args: Sequence[Any]) -> Call:
    """The kernels of ``torch.compile`` captured by hand, in one graph on one stream."""
    return captured(_compiled(model), args)


def optimized(model: nn.Module, args: Sequence[Any], **options: Any) -> Call:
    """``autostream.optimize`` with these options."""
    return autostream.optimize(model, args, **options)


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
"""As users call it, then each level with each policy."""

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
# The last one to be prepared: its graph goes on to use a cuBLAS workspace that other captures give away.
CUDA |= {make_graphed_callables.__name__: make_graphed_callables}


SLOW = ("compile_max_autotune",)
"""Modes that run only where they are asked for."""


def modes_of(device: torch.device) -> Mapping[str, Mode]:
    """All modes that a device has, by name."""
    return CPU if device.type == "cpu" else CUDA


def captured(function: Call, args: Sequence[Any]) -> Call:
    """A function captured on one stream, as one that copies its arguments in and returns copies of its outputs.

    Example (needs a GPU):
        >>> double = captured(lambda x: 2 * x, [torch.ones(3, device="cuda")])  # doctest: +SKIP
        >>> double(torch.ones(3, device="cuda"))  # doctest: +SKIP
        tensor([2., 2., 2.], device='cuda:0')
    """
    static_args = pytree.tree_map_only(Tensor, Tensor.clone, list(args))
    static = tensors_in(static_args)
    stream = capture_stream(static[0].device)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARMUP):
            function(*static_args)
    # Not torch.cuda.graph: kernels would go on to use the cuBLAS workspace of the warm-up, and whatever captures next,
    # torch.compile among others, hands that memory to somebody else.
    graph, (outputs, structure) = capture(lambda: pytree.tree_flatten(function(*static_args)), stream)
    return _Captured(function, graph, stream, static, outputs, structure)


@dataclass(frozen=True)
class _Captured:
    """What a careful user writes around a graph: as little as possible at each call."""

    function: Call  # holds what its kernels read: weights, and constants that a compiler made
    graph: torch.cuda.CUDAGraph
    stream: torch.cuda.Stream  # must live as long as what was captured on it
    static: list[Tensor]
    outputs: list[Any]
    structure: pytree.TreeSpec

    def __call__(self, *args: Any) -> Any:
        if len(args) == 1 and isinstance(args[0], Tensor):
            self.static[0].copy_(args[0])
        else:
            torch._foreach_copy_(self.static, tensors_in(args))
        self.graph.replay()
        copies = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in self.outputs]
        return pytree.tree_unflatten(copies, self.structure)


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of a nested value, in order."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _compiled(model: nn.Module, **options: Any) -> Call:
    compiled: Call = torch.compile(model, dynamic=False, **options)
    return compiled
