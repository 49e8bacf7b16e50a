"""Tracing through TorchDynamo, which splits a model where it cannot follow it; the parts that it can are graphs.

What is private to Dynamo is used here alone. Run on torch 2.11 and 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

CompilePiece = Callable[[GraphModule, frozenset[int]], Callable[..., Any]]
"""Takes a graph and the positions of its inputs that stay where they are; returns what to run in its place."""


def split(model: nn.Module, compile_piece: CompilePiece) -> Callable[..., Any]:
    """A function that runs the model in pieces, each made by ``compile_piece`` in the first call that gets there.

    Sizes are specialised: a piece is made anew for other shapes, as graphs for other signatures are.
    """

    def backend(module: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        return compile_piece(module, bound_inputs(example_inputs))

    return torch.compile(model, backend=backend, dynamic=False)


def bound_inputs(example_inputs: Sequence[Any]) -> frozenset[int]:
    """Positions of the inputs that are weights or buffers of the model that Dynamo is splitting.

    Dynamo marks buffers with an attribute of its own. Where a version does not, they count as inputs like any other and
    are copied at each call: slower, and as right.
    """
    return frozenset(
        index
        for index, value in enumerate(example_inputs)
        if isinstance(value, nn.Parameter) or getattr(value, "_dynamo_static_input_type", None) is not None
    )


def is_refusal(error: Exception) -> bool:
    """Whether an exception says that Dynamo cannot handle the model, rather than that the model itself failed."""
    from torch._dynamo.exc import TorchDynamoException

    return isinstance(error, TorchDynamoException)
