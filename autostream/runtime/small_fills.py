"""Fills small memory in a captured graph by kernels.

cuDNN's attention and convolutions, and PyTorch's large reductions, fill a few bytes (``cudaMemsetAsync``) before they
start. In a CUDA graph such a fill is no kernel: on an H200, what follows it starts 4 to 29 µs later, where it starts
0.5 µs behind a kernel. TensorRT-LLM and Transformer Engine fill their own small buffers by kernels for that reason::

    captured    ... ─▶ fill of 4 bytes ─▶ attention
    made of it  ... ─▶ kernel that fills 4 bytes ─▶ attention

The kernels are PyTorch's own: ``fill_`` of the same memory is captured, and its nodes are copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autostream.errors import first_line
from autostream.runtime.capture import capture
from autostream.runtime.graph_nodes import UNKNOWN, fill_of, nodes_of, predecessors, replace_by_kernel
from autostream.utils.logs import Log

log = Log(__name__)

_SMALL = 1 << 14
"""Bytes. Fills of 50 KB and more are kernels already."""

_TYPES = {1: "|u1", 2: "<u2", 4: "<u4"}
"""By the size of an element in bytes, how the CUDA array interface names its type."""


@dataclass(frozen=True, slots=True)
class _Memory:
    """Elements at an address, as the CUDA array interface describes them."""

    address: int
    count: int
    size: int

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"data": (self.address, False), "shape": (self.count,), "typestr": _TYPES[self.size], "version": 3}


def fill_by_kernels(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> int:
    """Replace the small fills of a graph by kernels. Where the driver refuses one, it and those after it stay.

    Args:
        graph: captured with ``keep_graph=True``, and not instantiated yet.
        stream: to capture the kernels on; nothing else is captured on it meanwhile.

    Returns:
        How many were replaced.
    """
    replaced = 0
    try:
        fills = [(node, fill) for node in nodes_of(graph, "MEMSET") if _is_small(fill := fill_of(node))]
        if fills:
            template, _ = capture(lambda: _run([fill for _, fill in fills], stream.device), stream, keep_nodes=True)
            kernels = _in_order(nodes_of(template, "KERNEL"))
            if len(kernels) == len(fills):  # else PyTorch fills in another way
                for (node, _), kernel in zip(fills, kernels, strict=True):
                    replace_by_kernel(graph, node, kernel)
                    replaced += 1
    except (RuntimeError, *UNKNOWN) as error:
        log.debug("small fills of a CUDA graph stay as they are, but for %d: %s", replaced, first_line(error))
    return replaced


def _is_small(fill: Any) -> bool:
    return bool(fill.height <= 1 and fill.width * fill.elementSize <= _SMALL)


def _run(fills: Sequence[Any], device: torch.device) -> None:
    """Fill by kernels, one after another."""
    for fill in fills:
        memory: Tensor = torch.as_tensor(_Memory(int(fill.dst), fill.width, fill.elementSize), device=device)
        memory.fill_(fill.value & (1 << 8 * fill.elementSize) - 1)


def _in_order(chain: Sequence[Any]) -> list[Any]:
    """Nodes each of which waits for the one before, as they run; the driver lists them in any order."""
    before = {int(node): [int(other) for other in predecessors(node)] for node in chain}
    after = {other: node for node in chain for other in before[int(node)]}
    ordered = [node for node in chain if not before[int(node)]]
    while ordered and (node := after.get(int(ordered[-1]))):
        ordered.append(node)
    return ordered
