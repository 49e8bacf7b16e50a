"""What a captured call returns: found once by Dynamo's bytecode, so that replays can do without it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from autostream.frontend.tree import Structure, flatten, kinds_in, shares_containers


def structure_of_result(
    module: GraphModule,
    rebuild: Callable[[Sequence[Tensor]], object],
    unknown: Callable[[object], Structure] | None = None,
) -> tuple[Structure, list[int | Tensor]]:
    """The structure of a result; for each tensor in it, which output of the graph it is, or the tensor itself.

    Args:
        module: the captured graph.
        rebuild: makes the result of the graph's outputs by Dynamo's bytecode. Its outputs here are empty: they have no
            values that it could read.
        unknown: the structure of an object that is neither a known container nor a constant.

    Raises:
        ValueError: the result has a container that outlives the call, or a number or a string: Dynamo guards none that
            is returned only, since its bytecode reads it anew in each call.
        Exception: the result cannot be made again without the bytecode.
    """
    results: Any = module.graph.output_node().args[0]
    outputs = [torch.empty(0) for _ in results]
    result, again = rebuild(outputs), rebuild(outputs)
    if shares_containers(result, again):
        raise ValueError("a container that outlives the call is returned")
    tensors, structure = flatten(result, unknown)
    if not _READ_ANEW.isdisjoint(kinds_in(structure)):
        raise ValueError("a number or a string is returned")
    positions = {id(output): at for at, output in enumerate(outputs)}
    return structure, [positions.get(id(tensor), tensor) for tensor in tensors]


_READ_ANEW = {bool, int, float, complex, str, bytes}
