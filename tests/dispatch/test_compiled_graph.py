"""Signatures of a graph that several threads compile."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor
from torch.fx import symbolic_trace

from autostream.dispatch.compiled_graph import CompiledGraph
from autostream.dispatch.scheduled_program import ModelContext
from autostream.ir import Role
from autostream.options import Options
from autostream.runtime.cuda_graph import GraphPools
from autostream.runtime.input_buffers import BufferTable
from autostream.utils.locks import preparing


def started(run: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


@torch.no_grad()
def test_a_thread_that_captures_another_call_does_not_wait_for_one_that_waits_for_it() -> None:
    """Calls under other guards share the graph: while one is captured, another may meet tensors of another size."""

    class Twice(torch.nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return (x + x,)

    context = ModelContext(Options(), GraphPools(), BufferTable())
    graph = CompiledGraph(symbolic_trace(Twice()), [(Role.INPUT, "0")], "Twice", context)
    outputs = [*graph(torch.ones(1))]

    def capture() -> None:
        with preparing:
            other = started(lambda: outputs.extend(graph(torch.ones(2))))
            other.join(0.3)  # it waits for this thread
            outputs.extend(graph(torch.ones(3)))
        other.join()

    capturing = started(capture)
    capturing.join(20)
    assert not capturing.is_alive(), "each of the threads waits for the other"
    assert sorted(map(len, outputs)) == [1, 2, 3]
