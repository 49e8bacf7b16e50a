"""Graphs that are captured once more: in a pool that others have, with everything put back afterwards."""

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


def t(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


class Pool(GraphPool):
    """A pool without memory."""

    def __init__(self) -> None:
        self.failed, self.lock = False, threading.Lock()

    def wait_for_last_call(self) -> None:
        pass


class Graph(CapturedGraph):
    """A graph that scribbles on what it writes when it is captured again, if that does not fail."""

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
    """What was tuned, as far as pools are concerned."""
    nothing: Any = None
    return Tuned(nothing, nothing, Selection(execution, nothing, ()), ())


def test_the_first_graph_brings_the_pool_in_which_the_others_are_captured_again() -> None:
    first, second = (Graph(t(2), written=[False], pool=Pool()) for _ in range(2))
    pools = GraphPools()
    assert captured_into_pool(tuned(first), [t(2)], pools).selection.execution is first
    found = captured_into_pool(tuned(second), [t(2)], pools).selection.execution
    assert isinstance(found, Graph)
    assert found.pool is first.pool
    assert found.static[0] is second.static[0]


def test_capturing_again_puts_everything_back() -> None:
    """The state is written where it is, by runs that draw."""
    state, pools, first = t(4), GraphPools(), Graph(written=[], pool=Pool())
    pools[first.device] = first.pool
    generator = torch.get_rng_state()
    graph = Graph(state, written=[True], pool=Pool())
    captured_into_pool(tuned(graph), [state], pools)
    assert torch.equal(graph.restored[0], t(4)), "in between too"
    assert torch.equal(state, t(4))
    assert torch.equal(torch.get_rng_state(), generator)


def test_what_an_earlier_call_left_in_static_tensors_is_not_captured_with() -> None:
    """The call has a batch of its own, and the graph still that of another one."""
    pools, first = GraphPools(), Graph(written=[], pool=Pool())
    pools[first.device] = first.pool
    graph = Graph(torch.full((4,), 9.0), written=[False], pool=Pool())
    captured_into_pool(tuned(graph), [t(4)], pools)
    assert torch.equal(graph.found[0], t(4))


@pytest.mark.parametrize(
    ("failure", "host"), [(CaptureError("no way\nat all"), 1), (torch.OutOfMemoryError("no way\nat all"), 0)]
)
def test_a_graph_that_cannot_join_the_others_stays_where_it_is_and_says_why(failure: Exception, host: int) -> None:
    """A pool in which a capture has failed takes no other: later ones join this one. What fails before is no reason."""
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
    assert joined.pool is (first, second)[host].pool


def test_a_pool_that_has_failed_since_is_not_tried() -> None:
    """As by weights that have moved."""
    first, second = (Graph(t(2), written=[False], pool=Pool()) for _ in range(2))
    pools = GraphPools()
    captured_into_pool(tuned(first), [t(2)], pools)
    first.pool.failed = True
    alone = captured_into_pool(tuned(second), [t(2)], pools)
    assert (alone.selection.execution, alone.refusals) == (second, ())
    assert pools[second.device] is second.pool


def test_what_is_not_captured_needs_no_pool() -> None:
    pools, given = GraphPools(), tuned(lambda x: (x,))
    assert captured_into_pool(given, [t(2)], pools) is given
    assert not pools
