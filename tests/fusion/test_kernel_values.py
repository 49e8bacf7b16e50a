"""Fake values of graphs of kernels, and the comparison of their outputs with a program's."""

from __future__ import annotations

import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode

from autostream.frontend.aten import program_of
from autostream.fusion.kernel_values import (
    _is_argument,
    arguments_of,
    evaluate,
    match_program,
    output_layouts,
    outputs_of,
    shared_storages,
)
from autostream.ir import Role
from autostream.utils.kernels import Kernel
from tests.runtime.programs import case_of, fused_case

aten = torch.ops.aten


def test_values_are_computed_without_launching_kernels() -> None:
    def fail(*args: object) -> None:
        raise AssertionError("launched")

    graph = fx.Graph()
    x = graph.placeholder("x")
    options = {"dtype": torch.float32, "device": torch.device("cpu")}
    buffer = graph.call_function(aten.empty_strided.default, ([4, 6], [6, 1]), options)
    view = graph.call_function(torch.ops.inductor._reinterpret_tensor.default, (buffer, [2, 3], [6, 1], 13))
    kernel = graph.call_function(Kernel("k", fail, frozenset({1}), frozenset({1})), (x, view))
    product = graph.call_function(aten.mm.out, (x, x), {"out": view})
    graph.output((buffer,))
    with FakeTensorMode() as mode:
        evaluate(fx.GraphModule(nn.Module(), graph), [mode.from_tensor(torch.ones(2, 2))])
    value = view.meta["val"]
    assert (value.shape, value.stride(), value.storage_offset()) == ((2, 3), (6, 1), 13)
    assert value.untyped_storage()._cdata == buffer.meta["val"].untyped_storage()._cdata
    assert product.meta["val"] is value
    assert kernel.meta["val"] is None


def test_the_offset_of_a_view_is_relative_to_that_of_its_argument() -> None:
    graph = fx.Graph()
    view = graph.call_function(torch.ops.inductor._reinterpret_tensor.default, (graph.placeholder("x"), [2], [1], 1))
    graph.output((view,))
    module, x = fx.GraphModule(nn.Module(), graph), torch.arange(8.0)[3:]
    with FakeTensorMode() as mode:
        evaluate(module, [mode.from_tensor(x)])
    assert view.meta["val"].storage_offset() == 4
    assert module(x)[0].tolist() == [4.0, 5.0]


def test_arguments_and_outputs_are_compared_by_storage_dtype_shape_and_layout() -> None:
    assert shared_storages(fused_case().program.module) == [0, 1, 2, 3, 4]
    module = case_of(lambda x: (x[1:], y := x + 1, y.t(), x.sum(1, keepdim=True)), torch.ones(2, 3)).program.module
    assert shared_storages(module) == [0, 0, 2, 2, 4]
    _, rows, columns, total = output_layouts(module)
    assert (rows, columns) == ((torch.float32, (2, 3), (3, 1)), (torch.float32, (3, 2), (1, 3)))
    assert total == (torch.float32, (2, 1), (1,)), "the stride of a dimension of size 1 does not matter"


def test_a_tensor_that_is_mutated_many_times_is_evaluated_once() -> None:
    """Each mutation reads the result of the one before twice; without memoization that is 2⁶⁴ evaluations."""

    def doubled(x: Tensor) -> Tensor:
        for _ in range(64):
            x.add_(x)
        return x

    module = case_of(doubled, torch.ones(3)).program.module
    (output,) = outputs_of(module)
    assert _is_argument(output, arguments_of(module))


def test_a_graph_gets_the_names_of_a_program_and_returns_views_where_it_does() -> None:
    """The program returns its argument and a view of the whole argument, which only memory does not distinguish."""
    traced = fx.symbolic_trace(lambda x: (x, x.view(-1), x + 1))  # Dynamo's graphs return no argument
    program, _ = program_of(traced, [(Role.INPUT, "0", torch.ones(3))])
    graph = fx.Graph()
    x = graph.placeholder("arg0_1")
    graph.output((x, x, graph.call_function(aten.add.Tensor, (x, 1))))
    module = match_program(fx.GraphModule(nn.Module(), graph), program)
    (argument,) = module.graph.find_nodes(op="placeholder")
    first, second, third = outputs_of(module)
    assert argument.name == argument.target == program.placeholders[0].name
    assert first is argument
    assert second.target is aten.alias.default
    assert [node.meta["val"].shape for node in (first, second, third)] == [(3,)] * 3
    assert shared_storages(module) == shared_storages(program.module) == [0, 0, 0, 3]
