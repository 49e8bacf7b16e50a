"""Graphs of one schedule for weights at several places: what is captured, what runs, and what memory it takes."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import symbolic_trace

import autostream
from autostream.dispatch.compiled_graph import CompiledGraph
from autostream.dispatch.scheduled_program import ModelContext
from autostream.ir import Role
from autostream.options import Options
from autostream.runtime import cuda_graph
from autostream.runtime import graphs_by_address as places
from autostream.runtime.cuda_graph import GraphPools
from autostream.runtime.input_buffers import BufferTable
from tests.threads import in_threads

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("aten_ops", "fresh_dynamo")]

SIZE = 256


class Block(nn.Module):
    """Two pieces, each of them branches, so that it is worth a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        x = x + sum(layer(x).relu() for layer in self.layers[:3]) / 8
        if (x.sum() > 1e9).item():  # asked like this, it is split at graph breaks
            return x
        return x + sum(layer(x).tanh() for layer in self.layers[3:]) / 8


def alike(count: int) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(count))).cuda().eval()


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(SIZE, SIZE).cuda().eval()


def inputs(count: int) -> list[Tensor]:
    return [torch.randn(64, SIZE, device="cuda") for _ in range(count)]


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One for each capture of a graph that is called."""
    seen: list[None] = []
    captured = cuda_graph._captured
    monkeypatch.setattr(cuda_graph, "_captured", lambda *args: (seen.append(None), captured(*args))[1])
    return seen


def check(fast: nn.Module, model: nn.Module, xs: list[Tensor]) -> None:
    """Results are looked at after all calls, so that one that was overwritten is seen."""
    outputs = [fast(x) for x in xs]
    for x, output in zip(xs, outputs, strict=True):
        torch.testing.assert_close(output, model(x), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_blocks_that_are_alike_are_captured_once_each(captures: list[None]) -> None:
    model, xs = alike(6), inputs(4)
    fast = autostream.optimize(model, cuda_graph=True)
    fast(xs[0])
    (report,) = fast.reports
    assert report.mode == "graph breaks"
    assert {part.mode for part in report.parts} == {"cuda graph"}, [part.refusals for part in report.parts]
    count = len(captures)
    check(fast, model, xs)
    before = torch.cuda.memory_reserved()
    for _ in range(10):
        check(fast, model, xs)
    assert len(captures) == count
    assert torch.cuda.memory_reserved() <= before
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        check(fast, model, xs)
    torch.cuda.current_stream().wait_stream(stream)
    model[2].layers[0].weight.mul_(0.5)
    check(fast, model, xs)
    assert len(captures) == count


@torch.no_grad()
def test_some_of_many_blocks_that_are_alike_run_plainly(captures: list[None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "MAX_GRAPHS", 3)
    model, xs = alike(6), inputs(4)
    fast = autostream.optimize(model, cuda_graph=True)
    fast(xs[0])
    count = len(captures)
    for _ in range(3):
        check(fast, model, xs)
    assert len(captures) == count


@torch.no_grad()
def test_what_was_captured_goes_with_the_model() -> None:
    """Though Dynamo keeps what it has compiled."""

    def used() -> int:
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    def use() -> None:
        model, xs = alike(4), inputs(2)
        check(autostream.optimize(model, cuda_graph=True), model, xs)

    use()
    before = used()
    use()
    assert used() <= before


@torch.no_grad()
@pytest.mark.parametrize("seldom", [False, True], ids=["in every call", "after some calls"])
def test_two_sets_of_weights_may_change_places(seldom: bool, captures: list[None]) -> None:
    model, other, xs = linear(), nn.Linear(SIZE, SIZE).cuda(), inputs(5 if seldom else 1)
    fast = autostream.optimize(model, cuda_graph=True)
    fast(xs[0])
    count = len(captures)
    for _ in range(10):
        check(fast, model, xs)
        model.weight.data, other.weight.data = other.weight.data, model.weight.data
    check(fast, model, xs)
    assert len(captures) == count + 1


@torch.no_grad()
def test_weights_that_move_in_every_call_are_not_captured_without_end(
    captures: list[None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that they leave goes back to the driver in between: no graph may be launched that reads it."""
    monkeypatch.setattr(places, "MAX_GRAPHS", 4)
    model, (x,), kept = linear(), inputs(1), list[Tensor]()
    fast = autostream.optimize(model, cuda_graph=True)
    fast(x)
    count = len(captures)
    for number in range(20):
        kept.append(torch.empty_like(model.weight))  # no address comes again
        model.weight.data = torch.randn_like(model.weight)
        if number % 3:
            torch.cuda.empty_cache()
        check(fast, model, [x])
    assert len(captures) <= count + 3
    assert any("call after call" in refusal.reason for report in fast.reports for refusal in report.refusals)


class Product(nn.Module):
    """Of its inputs."""

    def forward(self, weight: Tensor, x: Tensor) -> tuple[Tensor]:
        return ((x @ weight).relu() + (x @ weight).tanh(),)


@torch.no_grad()
def test_threads_and_streams_with_weights_of_their_own() -> None:
    """As a graph is called with the weights of one block after the other."""
    names = [(Role.PARAMETER, "weight"), (Role.INPUT, "x")]
    context = ModelContext(Options(cuda_graph=True), GraphPools(), BufferTable())
    graph = CompiledGraph(symbolic_trace(Product()), names, "Product", context)
    weights, (x,) = [torch.randn(SIZE, SIZE, device="cuda") / 16 for _ in range(4)], inputs(1)
    expected = [Product()(weight, x)[0] for weight in weights]
    torch.cuda.synchronize()

    def work(number: int) -> None:
        stream = torch.cuda.Stream()
        with torch.no_grad(), torch.cuda.stream(stream):
            for turn in range(50):
                at = (number + turn // 7) % len(weights)
                torch.testing.assert_close(graph(weights[at], x)[0], expected[at], rtol=1e-4, atol=1e-4)
            stream.synchronize()

    in_threads(4, work)
