"""A compiled graph: a schedule for each signature, or the graph itself op by op."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autostream.dispatch.compiled_graph import CompiledGraph, report_of_halves, reports_of_graph
from autostream.dispatch.scheduled_program import ModelContext
from autostream.errors import TraceError
from autostream.ir import Role
from autostream.options import Options
from autostream.runtime.cuda_graph import GraphPools
from autostream.runtime.input_buffers import BufferTable
from tests.semantics import same

InputNames = Sequence[tuple[Role, str]]


class Scaled(nn.Module):
    def forward(self, w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return (w * x).relu(), x + 1


BOTH: InputNames = [(Role.PARAMETER, "w"), (Role.INPUT, "0")]


def compiled(module: nn.Module, names: InputNames, **options: Any) -> CompiledGraph:
    context = ModelContext(Options(**options), GraphPools(), BufferTable())
    return CompiledGraph(torch.fx.symbolic_trace(module), names, "Model", context)


@torch.no_grad()
def test_each_shape_is_a_signature() -> None:
    graph = compiled(Scaled(), BOTH)
    for size in (2, 3, 2, 3):
        w, x = torch.randn(size), torch.randn(size)
        same(list(graph(w, x)), list(Scaled()(w, x)))
    assert [report.mode for report in graph.reports] == ["one stream"] * 2
    assert len(graph.signatures) == 2


@torch.no_grad()
def test_aliases_are_part_of_the_signature() -> None:
    class Writes(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor]:
            return (x.add_(1) * y,)

    graph = compiled(Writes(), [(Role.INPUT, "0"), (Role.INPUT, "1")])
    assert graph(torch.ones(2), torch.ones(2))[0].tolist() == [2.0, 2.0]
    x = torch.ones(2)
    assert graph(x, x)[0].tolist() == [4.0, 4.0]
    assert x.tolist() == [2.0, 2.0]
    assert len(graph.signatures) == 2


@torch.no_grad()
def test_numbers_are_part_of_the_signature_and_may_be_returned() -> None:
    class Sized(nn.Module):
        def forward(self, n: Any, x: Tensor) -> tuple[Any, Tensor, None]:
            return n, x * n, None

    graph = compiled(Sized(), [(Role.INPUT, "0"), (Role.INPUT, "1")])
    for number in (2, 3, 2):
        returned, product, nothing = graph(number, torch.ones(2))
        assert (returned, product.tolist(), nothing) == (number, [number, number], None)
    assert len(graph.signatures) == 2


@torch.no_grad()
def test_a_graph_that_cannot_be_scheduled_runs_op_by_op_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise TraceError("not today")

    monkeypatch.setattr("autostream.dispatch.compiled_graph.program_of", refuse)
    graph, w, x = compiled(Scaled(), BOTH), torch.randn(2), torch.randn(2)
    same(list(graph(w, x)), list(Scaled()(w, x)))
    assert graph.refusal == "not today"
    assert [report.mode for report in graph.reports] == ["plain"]
    with pytest.raises(TraceError, match="not today"):
        compiled(Scaled(), BOTH, strict=True)(w, x)


@torch.no_grad()
def test_is_of_compares_code_and_inputs() -> None:
    graph = compiled(Scaled(), BOTH)
    assert graph.is_of(torch.fx.symbolic_trace(Scaled()), BOTH)
    assert not graph.is_of(torch.fx.symbolic_trace(Scaled()), [(Role.INPUT, "1"), (Role.INPUT, "0")])

    class Other(nn.Module):
        def forward(self, w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            return (w - x).relu(), x + 1

    assert not graph.is_of(torch.fx.symbolic_trace(Other()), BOTH)


@torch.no_grad()
def test_forward_and_backward_are_one_report() -> None:
    graph = compiled(Scaled(), BOTH)
    graph(torch.ones(2), torch.ones(2))
    assert [report.mode for report in reports_of_graph("Model", [graph])] == ["one stream"]
    report = report_of_halves("Model", [graph])
    assert (report.mode, len(report.parts)) == ("forward and backward", 1)
    assert report_of_halves("Model", []).signature == "not run yet"
