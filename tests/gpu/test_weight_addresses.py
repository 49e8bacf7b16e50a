"""Weights at several addresses: each has a CUDA graph of the same schedule, as long as there are few."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autostream
from autostream.runtime import graphs_by_address

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("aten_ops", "fresh_dynamo")]

SIZE = 256


class Block(nn.Module):
    """Branches, a graph break, and branches."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        x = x + sum(layer(x).relu() for layer in self.layers[:3]) / 8
        if (x.sum() > 1e9).item():
            return x
        return x + sum(layer(x).tanh() for layer in self.layers[3:]) / 8


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(SIZE, SIZE).cuda().eval()


def inputs(count: int) -> list[Tensor]:
    return [torch.randn(64, SIZE, device="cuda") for _ in range(count)]


def check(fast: nn.Module, model: nn.Module, xs: list[Tensor]) -> None:
    """Compare outputs after all calls, so that one that was overwritten is noticed."""
    outputs = [fast(x) for x in xs]
    for x, output in zip(xs, outputs, strict=True):
        torch.testing.assert_close(output, model(x), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_each_block_has_a_graph_and_all_are_freed_with_the_model() -> None:
    """Blocks that differ only in their weights share a schedule. Dynamo keeps what it has compiled, not the graphs."""

    def allocated_after_a_model() -> int:
        torch.manual_seed(0)
        model: Any = nn.Sequential(*(Block() for _ in range(4))).cuda().eval()
        xs, stream = inputs(4), torch.cuda.Stream()
        fast = autostream.optimize(model, cuda_graph=True)
        check(fast, model, xs)
        (report,) = fast.reports
        assert report.mode == "graph breaks"
        assert {part.mode for part in report.parts} == {"cuda graph"}, [part.refusals for part in report.parts]
        before = torch.cuda.memory_reserved()
        for _ in range(10):
            check(fast, model, xs)
        assert torch.cuda.memory_reserved() <= before
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            check(fast, model, xs)
        torch.cuda.current_stream().wait_stream(stream)
        model[2].layers[0].weight.mul_(0.5)
        check(fast, model, xs)
        del fast, model, report, xs
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    first = allocated_after_a_model()
    assert allocated_after_a_model() <= first


@torch.no_grad()
@pytest.mark.parametrize("calls", [1, 5])
def test_weights_may_alternate_between_two_addresses(calls: int) -> None:
    """As those of a model and of its average do, every so many calls."""
    model, other, xs = linear(), nn.Linear(SIZE, SIZE).cuda(), inputs(calls)
    fast = autostream.optimize(model, cuda_graph=True)
    for _ in range(11):
        check(fast, model, xs)
        model.weight.data, other.weight.data = other.weight.data, model.weight.data
    (report,) = fast.reports
    assert report.mode == "cuda graph"
    assert not any("call after call" in refusal.reason for refusal in report.refusals)


@torch.no_grad()
def test_weights_may_move_before_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory that they leave is returned to the driver: a graph that reads it may not be launched."""
    monkeypatch.setattr(graphs_by_address, "MAX_GRAPHS", 4)
    model, (x,), kept = linear(), inputs(1), list[Tensor]()
    fast = autostream.optimize(model, cuda_graph=True)
    fast(x)
    for number in range(20):
        kept.append(torch.empty_like(model.weight))  # no address is used again
        model.weight.data = torch.randn_like(model.weight)
        if number % 3:
            torch.cuda.empty_cache()
        check(fast, model, [x])
    assert any("call after call" in refusal.reason for report in fast.reports for refusal in report.refusals)
