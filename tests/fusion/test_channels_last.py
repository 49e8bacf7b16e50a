"""Steps whose convolutions are laid out channels-last: the same numbers, and nothing laid out where that shows."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
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

CONVOLUTION, GRADIENTS = aten.convolution.default, aten.convolution_backward.default


def calls(graph: fx.Graph, target: Any) -> list[fx.Node]:
    return graph.find_nodes(op="call_function", target=target)


def is_laid_out(value: Tensor) -> bool:
    return value.is_contiguous(memory_format=torch.channels_last)


class Net(nn.Module):
    """Two convolutions, of which the second reads what a norm makes of the first: images to (N, 3)."""

    def __init__(self, between: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.second, self.last = nn.Conv2d(4, 4, 3, padding=1), nn.Linear(4, 3)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x)).relu()
        result: Tensor = self.last(self.between(x + self.second(x)).mean((2, 3)))
        return result


def square(model: Net, x: Tensor) -> Tensor:
    return model(x).square().mean()


def step_of(
    between: Callable[[Tensor], Tensor] = torch.tanh, loss: Callable[..., Any] = square
) -> tuple[Program, list[Tensor]]:
    """A training step, and what it takes."""
    importlib.import_module("torch._inductor.lowering")
    torch.manual_seed(0)
    model, x = Net(between).double(), torch.randn(2, 2, 6, 5, dtype=torch.float64)
    return program_of(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), loss, (x,))


def results(module: fx.GraphModule, tensors: Sequence[Tensor]) -> list[Tensor]:
    """What it returns, and what it leaves of its arguments."""
    copies = [tensor.detach().clone() for tensor in tensors]
    torch.manual_seed(1)
    with torch.no_grad():
        returned = module(*copies)
    return [*returned, *copies]


# The table


def test_a_weight_is_laid_out_once_for_all_that_read_it() -> None:
    def run(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(torch.conv2d(x, weight).sin().sum(), [x, weight])

    shapes = (2, 3, 5, 5), (4, 3, 2, 2)
    arguments = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    module = make_fx(run, channels_last_decompositions({}))(*arguments)
    x, weight = module.graph.find_nodes(op="placeholder")
    assert [len([use for use in each.users if use.target is aten.clone.default]) for each in (x, weight)] == [1, 1]
    ((gradients),) = calls(module.graph, GRADIENTS)
    ((convolution),) = calls(module.graph, CONVOLUTION)
    assert gradients.args[1:3] == convolution.args[:2]
    torch.testing.assert_close(module(*arguments), run(*arguments), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(2, 3, 5), (2, 3, 5, 5, 5)])
def test_convolutions_over_one_or_three_dimensions_stay(shape: tuple[int, ...]) -> None:
    layer = (nn.Conv1d if len(shape) == 3 else nn.Conv3d)(3, 2, 2)
    graph = make_fx(layer, channels_last_decompositions({}))(torch.randn(shape)).graph
    assert not calls(graph, aten.clone.default)
    assert len(calls(graph, CONVOLUTION)) == 1


def test_what_is_laid_out_goes_by_the_table() -> None:
    def sixfold(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
        assert is_laid_out(x)
        assert is_laid_out(weight)
        return 6 * x

    x, weight = torch.ones(1, 3, 2, 2), torch.ones(3, 3, 2, 2)
    graph = make_fx(lambda x, w: torch.conv2d(x, w), channels_last_decompositions({CONVOLUTION: sixfold}))(x, weight)
    assert not calls(graph.graph, CONVOLUTION)
    assert graph(x, weight).unique().tolist() == [6.0]


# Steps


def test_a_step_reads_all_of_its_convolutions_and_gradients_channels_last() -> None:
    program, tensors = step_of()
    assert not is_channels_last(program.module.graph)
    functional = inductor._functional(program)
    assert is_channels_last(functional.graph)
    gradients = calls(functional.graph, GRADIENTS)
    assert len(gradients) == 3, "of both weights and of one input"
    assert all(is_laid_out(read.meta["val"]) for node in gradients for read in node.args[:3])  # type: ignore[union-attr]
    for ours, theirs in zip(results(functional, tensors), results(program.module, tensors), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def flat(x: Tensor) -> Tensor:
    return x.view(2, -1).sin().view(x.shape)


def strided(x: Tensor) -> Tensor:
    return x * x.as_strided((2, 4, 6, 5), (120, 1, 20, 4))


def dropped(x: Tensor) -> Tensor:
    return x * torch.rand_like(x)


def written(x: Tensor) -> Tensor:
    y = x * 2
    y.view(2, -1)[:, 3:7].mul_(3)
    return y


@torch.library.custom_op("autostream_tests::memory_order", mutates_args=())
def memory_order(x: Tensor) -> Tensor:
    """Numbers elements as they lie."""
    return torch.arange(x.numel(), dtype=x.dtype).as_strided(x.shape, x.stride()).contiguous()


@memory_order.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype)


def custom(x: Tensor) -> Tensor:
    return x * memory_order(x.detach())


def attended(x: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(x, x, x)


def reinterpreted(x: Tensor) -> Tensor:
    return x * (x.detach().view(torch.int64) > 0)


@pytest.mark.parametrize("between", [flat, strided, dropped, custom, attended, reinterpreted])
def test_what_may_look_at_strides_sees_those_of_the_trace(between: Callable[[Tensor], Tensor]) -> None:
    program, tensors = step_of(between)
    functional = inductor._functional(program)
    assert is_channels_last(functional.graph)
    for ours, theirs in zip(results(functional, tensors), results(program.module, tensors), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_where_it_would_have_to_be_the_same_memory_nothing_is_laid_out(caplog: pytest.LogCaptureFixture) -> None:
    program, tensors = step_of(written)
    with pytest.raises(LayoutVisibleError, match="others need that memory"):
        inductor._traced(program.module, LayoutInterpreter(program.module), channels_last_decompositions({}))
    with caplog.at_level("DEBUG", logger="autostream"):
        functional = inductor._functional(program)
    assert "convolutions stay as they were traced" in caplog.text
    assert not is_channels_last(functional.graph)
    for ours, theirs in zip(results(functional, tensors), results(program.module, tensors), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_whatever_goes_wrong_with_other_strides_the_graph_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("expected a contiguous tensor")

    monkeypatch.setattr(LayoutInterpreter, "run_node", fails)
    functional = inductor._functional(step_of()[0])
    assert not is_channels_last(functional.graph)


@pytest.mark.parametrize("twice", [False, True])
def test_an_output_lies_as_in_the_model(twice: bool) -> None:
    """Two that share memory would be two copies."""

    def run(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        y = torch.conv2d(x, weight)
        (gradient,) = torch.autograd.grad(y.sum(), [weight])
        return (y, gradient, y[1]) if twice else (y, gradient)

    arguments = torch.randn(2, 3, 5, 5), torch.randn(4, 3, 2, 2, requires_grad=True)
    module = make_fx(run, tracing_mode="fake")(*arguments)
    with pytest.raises(LayoutVisibleError) if twice else nullcontext():
        relaid = inductor._traced(module, LayoutInterpreter(module), channels_last_decompositions({}))
        outputs = relaid.graph.output_node().all_input_nodes
        assert [node.meta["val"].stride() for node in outputs] == [each.stride() for each in run(*arguments)]
        assert is_channels_last(relaid.graph)


def test_a_forward_alone_and_a_backward_alone_train_no_convolutions() -> None:
    x, weight = torch.randn(1, 3, 5, 5), torch.randn(3, 3, 2, 2)
    forward = make_fx(lambda x, w: torch.conv2d(x, w))(x, weight)
    backward = make_fx(
        lambda g, x, w: GRADIENTS(g, x, w, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, False])
    )(torch.randn(1, 3, 4, 4), x, weight)
    assert not trains_convolutions(forward.graph)
    assert not trains_convolutions(backward.graph)
    assert trains_convolutions(step_of()[0].module.graph)


def test_other_convolutions_of_a_step_do_not_matter() -> None:
    def with_one_dimension(x: Tensor) -> Tensor:
        return x * torch.conv1d(x.mean(2), x.new_ones(4, 4, 1)).unsqueeze(2)

    functional = inductor._functional(step_of(with_one_dimension)[0])
    assert is_channels_last(functional.graph)
    assert len(calls(functional.graph, CONVOLUTION)) == 3


@pytest.mark.parametrize("likes", [True, False])
def test_inductor_lays_out_forward_and_backward_alike(likes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it would not in a training graph of its own, neither half is."""
    program, _ = step_of()
    given: list[Any] = []

    class Enough(Exception):  # noqa: N818
        pass

    def compiled(*_: Any, layout_opt: bool | None, **__: Any) -> None:
        given.append(layout_opt)
        raise Enough

    monkeypatch.setattr(GraphLowering, "decide_layout_opt", staticmethod(lambda module, is_inference: likes))
    monkeypatch.setattr(compile_fx, "compile_fx_inner", compiled)
    functional = inductor._functional(program)
    assert is_channels_last(functional.graph) is likes
    with pytest.raises(Enough):
        inductor._compiled(functional, torch.device("cpu"), {})
    assert given == [likes]
