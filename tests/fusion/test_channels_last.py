"""Training steps whose convolutions are retraced in channels-last layout: the same numbers, and no visible strides."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._inductor import compile_fx
from torch._inductor.graph import GraphLowering
from torch.fx.experimental.proxy_tensor import make_fx

from autostream.fusion import inductor
from autostream.fusion.channels_last import (
    LayoutInterpreter,
    LayoutVisibleError,
    channels_last_decompositions,
    is_channels_last,
    trains_convolutions,
)
from autostream.ir import Program
from tests.steps import program_of

aten = torch.ops.aten

GRADIENTS = aten.convolution_backward.default


def calls(graph: fx.Graph, target: Any) -> list[fx.Node]:
    return graph.find_nodes(op="call_function", target=target)


def has_channels_last(value: Tensor) -> bool:
    return value.is_contiguous(memory_format=torch.channels_last)


class Net(nn.Module):
    """Two convolutions with a norm and ``between`` between them: images to (N, 3)."""

    def __init__(self, between: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.second, self.last = nn.Conv2d(4, 4, 3, padding=1), nn.Linear(4, 3)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x)).relu()
        result: Tensor = self.last(self.between(x + self.second(x)).mean((2, 3)))
        return result


@cache
def step_of(between: Callable[[Tensor], Tensor] = torch.tanh) -> tuple[Program, list[Tensor]]:
    """A training step, and its arguments."""
    importlib.import_module("torch._inductor.lowering")
    torch.manual_seed(0)
    model, x = Net(between).double(), torch.randn(2, 2, 6, 5, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return program_of(model, optimizer, lambda model, x: model(x).square().mean(), (x,))


def results(module: fx.GraphModule, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The outputs, and the arguments after the run."""
    copies = [tensor.detach().clone() for tensor in tensors]
    torch.manual_seed(1)
    with torch.no_grad():
        returned = module(*copies)
    return [*returned, *copies]


def check_same(functional: fx.GraphModule, program: Program, tensors: Sequence[Tensor]) -> None:
    for actual, expected in zip(results(functional, tensors), results(program.module, tensors), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


# Steps


def view(x: Tensor) -> Tensor:
    return x.view(2, -1).sin().view(x.shape)


def strided(x: Tensor) -> Tensor:
    return x * x.as_strided((2, 4, 6, 5), (120, 1, 20, 4))


def random(x: Tensor) -> Tensor:
    return x * torch.rand_like(x)


def one_dimension(x: Tensor) -> Tensor:
    return x * torch.conv1d(x.mean(2), x.new_ones(4, 4, 1)).unsqueeze(2)


@torch.library.custom_op("autostream_tests::memory_order", mutates_args=())
def memory_order(x: Tensor) -> Tensor:
    """The elements' positions in memory."""
    return torch.arange(x.numel(), dtype=x.dtype).as_strided(x.shape, x.stride()).contiguous()


@memory_order.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype)


def custom(x: Tensor) -> Tensor:
    return x * memory_order(x.detach())


def attention(x: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(x, x, x)


def reinterpreted(x: Tensor) -> Tensor:
    return x * (x.detach().view(torch.int64) > 0)


BETWEEN = [torch.tanh, view, strided, random, one_dimension, custom, attention, reinterpreted]


@pytest.mark.parametrize("between", BETWEEN)
def test_a_step_computes_the_same_in_channels_last(between: Callable[[Tensor], Tensor]) -> None:
    """Ops that depend on strides see those of the trace."""
    program, tensors = step_of(between)
    assert trains_convolutions(program.module.graph)
    assert not is_channels_last(program.module.graph)
    functional = inductor._functional(program)
    assert is_channels_last(functional.graph)
    inputs = [node.meta["val"] for call in calls(functional.graph, GRADIENTS) for node in call.args[:3]]  # type: ignore[union-attr]
    assert all(has_channels_last(value) for value in inputs if value.dim() == 4)
    check_same(functional, program, tensors)


def mutated(x: Tensor) -> Tensor:
    y = x * 2
    y.view(2, -1)[:, 3:7].mul_(3)
    return y


def test_a_step_that_mutates_a_view_stays_as_it_was_traced(caplog: pytest.LogCaptureFixture) -> None:
    program, tensors = step_of(mutated)
    with caplog.at_level("DEBUG", logger="autostream"):
        functional = inductor._functional(program)
    assert "convolutions stay as they were traced" in caplog.text
    assert "others need that memory" in caplog.text
    assert not is_channels_last(functional.graph)
    check_same(functional, program, tensors)


@pytest.mark.parametrize("twice", [False, True])
def test_outputs_have_the_strides_of_the_model(twice: bool) -> None:
    """Two outputs that share memory would be two copies, so that is refused."""

    def run(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        y = torch.conv2d(x, weight)
        (gradient,) = torch.autograd.grad(y.sum(), [weight])
        return (y, gradient, y[1]) if twice else (y, gradient)

    arguments = torch.randn(2, 3, 5, 5), torch.randn(4, 3, 2, 2, requires_grad=True)
    module = make_fx(run, tracing_mode="fake")(*arguments)
    with pytest.raises(LayoutVisibleError) if twice else nullcontext():
        retraced = inductor._traced(module, LayoutInterpreter(module), channels_last_decompositions({}))
        outputs = retraced.graph.output_node().all_input_nodes
        assert [node.meta["val"].stride() for node in outputs] == [each.stride() for each in run(*arguments)]
        assert is_channels_last(retraced.graph)


def test_a_forward_alone_and_a_backward_alone_train_no_convolutions() -> None:
    x, weight = torch.randn(1, 3, 5, 5), torch.randn(3, 3, 2, 2)
    forward = make_fx(lambda x, w: torch.conv2d(x, w))(x, weight)
    backward = make_fx(
        lambda g, x, w: GRADIENTS(g, x, w, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, False])
    )(torch.randn(1, 3, 4, 4), x, weight)
    assert not trains_convolutions(forward.graph)
    assert not trains_convolutions(backward.graph)


@pytest.mark.parametrize("preferred", [True, False])
def test_inductor_lays_out_forward_and_backward_alike(preferred: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Channels-last if Inductor would choose it for training, else neither half."""
    program, _ = step_of()
    layouts: list[Any] = []

    class Stop(Exception):  # noqa: N818
        pass

    def compiled(*_: Any, layout_opt: bool | None, **__: Any) -> None:
        layouts.append(layout_opt)
        raise Stop

    monkeypatch.setattr(GraphLowering, "decide_layout_opt", staticmethod(lambda module, is_inference: preferred))
    monkeypatch.setattr(compile_fx, "compile_fx_inner", compiled)
    functional = inductor._functional(program)
    assert is_channels_last(functional.graph) is preferred
    with pytest.raises(Stop):
        inductor._compiled(functional, torch.device("cpu"), {})
    assert layouts == [preferred]
