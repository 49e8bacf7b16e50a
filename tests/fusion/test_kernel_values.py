"""Values of graphs of kernels, and whose outputs they are."""

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


def test_values_are_found_without_launching_a_kernel() -> None:
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


def test_a_view_begins_where_its_argument_does() -> None:
    """An argument may lie anywhere in its storage."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    view = graph.call_function(torch.ops.inductor._reinterpret_tensor.default, (x, [2], [1], 1))
    graph.output((view,))
    module = fx.GraphModule(nn.Module(), graph)
    given = torch.arange(8.0)[3:]
    with FakeTensorMode() as mode:
        evaluate(module, [mode.from_tensor(given)])
    assert view.meta["val"].storage_offset() == 4
    assert module(given)[0].tolist() == [4.0, 5.0]


def test_who_shares_memory_is_told_by_value() -> None:
    case = fused_case()
    assert shared_storages(case.program.module) == [0, 1, 2, 3, 4]
    program = case_of(lambda x: (x[1:], y := x + 1, y.t()), torch.ones(3, 3)).program
    assert shared_storages(program.module) == [0, 0, 2, 2]


def test_what_is_written_again_and_again_is_looked_at_once() -> None:
    """Each write reads the one before twice, which would be 2⁶⁴ looks otherwise."""

    def doubled(x: Tensor) -> Tensor:
        for _ in range(64):
            x.add_(x)
        return x

    module = case_of(doubled, torch.ones(3)).program.module
    (output,) = outputs_of(module)
    assert _is_argument(output, arguments_of(module))


def test_outputs_are_of_another_kind_if_they_lie_otherwise() -> None:
    """Of dimensions of one element nobody can see the stride."""
    (rows, total), (columns,) = (
        output_layouts(case_of(function, torch.ones(2, 3)).program.module)
        for function in (lambda x: (x + 1, x.sum(1, keepdim=True)), lambda x: (x.t() + 1).contiguous().t())
    )
    assert (rows, columns) == ((torch.float32, (2, 3), (3, 1)), (torch.float32, (2, 3), (1, 2)))
    assert total == (torch.float32, (2, 1), (1,))


def test_a_graph_takes_the_names_of_a_program_and_returns_its_views_as_views() -> None:
    """The program returns its argument and a view of all of it: by memory alone, they are one."""
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
