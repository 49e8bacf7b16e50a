"""The modes that ``autostream bench`` compares, and how far a mode's outputs are from the model's.

A mode is a function of a model and example arguments that returns a callable; that one takes such arguments and returns
what the model returns. Both are called without gradients. Each mode runs through its public call, copies of inputs and
outputs included. Outputs of ``compile_reduce_overhead`` are overwritten by the next call, as its documentation says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autostream.api import optimize
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


def compile_default(model: nn.Module, args: Sequence[Any]) -> Call:
    """``torch.compile``."""
    return compiled(model)


def compile_reduce_overhead(model: nn.Module, args: Sequence[Any]) -> Call:
    """``torch.compile`` with its own CUDA graphs."""
    return compiled(model, mode="reduce-overhead")


def optimized(model: nn.Module, args: Sequence[Any], **options: Any) -> Call:
    """``autostream.optimize`` with these options."""
    fast: Call = optimize(model, args, **options)
    return fast


CPU: Mapping[str, Mode] = {"eager": eager, "compile_default": compile_default, "autostream": optimized}

CUDA: Mapping[str, Mode] = {
    "eager": eager,
    "cuda_graph": cuda_graph,
    "compile_default": compile_default,
    "compile_reduce_overhead": compile_reduce_overhead,
    "autostream": optimized,
    "autostream_inputs": partial(optimized, guards="inputs"),
}


def modes_of(device: torch.device) -> Mapping[str, Mode]:
    """All modes of a device by name, in the order in which they can be prepared."""
    return CPU if device.type == "cpu" else CUDA


def compiled(model: nn.Module, **options: Any) -> Call:
    """``torch.compile`` for static shapes."""
    call: Call = torch.compile(model, dynamic=False, **options)
    return call


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
    # Not torch.cuda.graph: kernels would go on to use the cuBLAS workspace of the warm-up, and the next capture,
    # torch.compile's among others, gives that memory away.
    graph, (outputs, structure) = capture(lambda: pytree.tree_flatten(function(*static_args)), stream)
    return _Captured(function, graph, stream, static, outputs, structure)


@dataclass(frozen=True)
class _Captured:
    """A captured graph with its static inputs and outputs."""

    function: Call  # keeps what its kernels read alive: weights, and constants that a compiler made
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


def relative_error(outputs: Any, expected: Sequence[Tensor]) -> float:
    """The largest ``‖out − ref‖ / ‖ref‖`` of the output tensors.

    It is not the norm over all tensors together, in which an error in a small tensor would not show.

    Returns:
        Infinity where the number of tensors, a shape, an integer or a NaN differs.

    Example:
        >>> relative_error((torch.tensor([3.0, 4.5]),), [torch.tensor([3.0, 4.0])])
        0.1
        >>> relative_error(torch.tensor([1, 2]), [torch.tensor([1, 3])])
        inf
    """
    tensors = tensors_in(outputs)
    if [tensor.shape for tensor in tensors] != [tensor.shape for tensor in expected]:
        return float("inf")
    return max(map(_distance, tensors, expected), default=0.0)


def _distance(tensor: Tensor, expected: Tensor) -> float:
    if not (expected.is_floating_point() or expected.is_complex()):
        return 0.0 if torch.equal(tensor, expected) else float("inf")
    exact = torch.complex128 if expected.is_complex() else torch.float64
    difference, norm = (tensor.to(exact) - expected.to(exact)).norm().item(), expected.to(exact).norm().item()
    error = difference / norm if norm else difference
    return error if error == error else float("inf")  # NaN is no distance
