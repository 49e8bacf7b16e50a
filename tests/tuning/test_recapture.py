"""Capturing graphs again into the pool of others, with arguments and random number generators restored."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from autostream.errors import CaptureError
from autostream.runtime.cuda_graph import CapturedGraph, GraphPool, GraphPools
from autostream.tuning.recapture import captured_into_pool
from autostream.tuning.select import Selection
from autostream.tuning.tune import Tuned
from tests.semantics import t


class Pool(GraphPool):
    """A pool without memory."""

    def __init__(self) -> None:
        self.failed, self.lock = False, threading.Lock()

    def wait_for_last_call(self) -> None:
        pass


class Graph(CapturedGraph):
    """A fake graph that overwrites its mutated arguments when it is captured again, and may fail."""

    def __init__(self, *static: Tensor, written: Sequence[bool], pool: GraphPool) -> None:
        self.device, self.written, self.pool = torch.device("cpu"), tuple(written), pool
        self.static, self.bound, self.shared = dict(enumerate(static)), (), frozenset()
        self.failure: Exception | None = None

    def __del__(self) -> None:
        pass

    def recaptured(self, tensors: Sequence[Tensor], pool: GraphPool, restore: Callable[[], None]) -> CapturedGraph:
        self.found = [tensor.clone() for tensor in tensors]
        for tensor, is_written in zip(tensors, self.written, strict=True):
            if is_written:
                tensor.copy_(torch.rand_like(tensor))
        restore()
        self.restored = [tensor.clone() for tensor in tensors]
        for tensor, is_written in zip(tensors, self.written, strict=True):
            if is_written:
                tensor.zero_()
        if self.failure is not None:
            pool.failed = isinstance(self.failure, CaptureError)
            raise self.failure
        return Graph(*tensors, written=self.written, pool=pool)


def tuned(execution: Any) -> Tuned:
    """A tuned program with nothing but an execution."""
    nothing: Any = None
    return Tuned(nothing, nothing, Selection(execution, nothing, ()), ())


def test_later_graphs_are_captured_again_into_the_pool_of_the_first() -> None:
    first, second = (Graph(t(2), written=[False], pool=Pool()) for _ in range(2))
    pools = GraphPools()
    assert captured_into_pool(tuned(first), [t(2)], pools).selection.execution is first
    joined = captured_into_pool(tuned(second), [t(2)], pools).selection.execution
    assert isinstance(joined, Graph)
    assert joined.pool is first.pool
    assert joined.static[0] is second.static[0]


def test_capturing_again_restores_arguments_and_generators() -> None:
    """The runs mutate the state and generate random numbers."""
    state, pools, first = t(4), GraphPools(), Graph(written=[], pool=Pool())
    pools[first.device] = first.pool
    generator = torch.get_rng_state()
    graph = Graph(state, written=[True], pool=Pool())
    captured_into_pool(tuned(graph), [state], pools)
    assert torch.equal(graph.restored[0], t(4)), "in between too"
    assert torch.equal(state, t(4))
    assert torch.equal(torch.get_rng_state(), generator)


def test_static_inputs_are_filled_with_the_arguments_of_the_call_before_a_capture() -> None:
    """The graph has the batch of an earlier call."""
    pools, first = GraphPools(), Graph(written=[], pool=Pool())
    pools[first.device] = first.pool
    graph = Graph(torch.full((4,), 9.0), written=[False], pool=Pool())
    captured_into_pool(tuned(graph), [t(4)], pools)
    assert torch.equal(graph.found[0], t(4))


@pytest.mark.parametrize(
    ("failure", "pool"), [(CaptureError("no way\nat all"), 1), (torch.OutOfMemoryError("no way\nat all"), 0)]
)
def test_a_graph_that_cannot_be_captured_again_stays_in_its_pool_for_a_reason(failure: Exception, pool: int) -> None:
    """If the capture has failed, the pool is not used again: later graphs join the pool of this one."""
    first, second, third = (Graph(t(2), written=[False], pool=Pool()) for _ in range(3))
    pools = GraphPools()
    captured_into_pool(tuned(first), [t(2)], pools)
    second.failure = failure
    alone = captured_into_pool(tuned(second), [t(2)], pools)
    assert alone.selection.execution is second
    (refusal,) = alone.refusals
    assert refusal.choice == "memory of its own"
    assert refusal.reason.endswith("Error: no way")
    joined = captured_into_pool(tuned(third), [t(2)], pools).selection.execution
    assert isinstance(joined, Graph)
    assert joined.pool is (first, second)[pool].pool


def test_an_uncaptured_program_needs_no_pool() -> None:
    pools, uncaptured = GraphPools(), tuned(lambda x: (x,))
    assert captured_into_pool(uncaptured, [t(2)], pools) is uncaptured
    assert not pools
