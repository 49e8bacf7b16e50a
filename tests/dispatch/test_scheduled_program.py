"""A scheduled program: what it computes, and which runs have side effects."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autostream.dispatch.compiled_graph import CompiledGraph
from autostream.dispatch.scheduled_program import ModelContext, ScheduledProgram
from autostream.ir import Role
from autostream.options import Options
from autostream.runtime.cuda_graph import GraphPools
from autostream.runtime.input_buffers import BufferTable
from tests.semantics import same


def scheduled(module: nn.Module, *tensors: Tensor, policy: str = "auto") -> tuple[ScheduledProgram, list[Tensor]]:
    """The schedule of a module, and its arguments for these tensors."""
    names = [(Role.INPUT, str(at)) for at in range(len(tensors))]
    context = ModelContext(Options(policy=policy), GraphPools(), BufferTable())
    ready = CompiledGraph(torch.fx.symbolic_trace(module), names, "Model", context).signature(tensors)
    assert ready is not None
    assert ready.scheduled is not None
    return ready.scheduled, ready.arguments(tensors)


class Two(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (x.sin() + x.cos(),)


class Writes(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (x.add_(1) * 2,)


class Draws(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (torch.rand_like(x) + x,)


@torch.no_grad()
@pytest.mark.parametrize("policy", ["auto", "sequential", "critical_path"])
def test_it_computes_the_program(policy: str) -> None:
    x = torch.randn(4)
    made, arguments = scheduled(Two(), x, policy=policy)
    same(list(made(arguments)), list(Two()(x)))
    assert "aten.sin" in made.lowered().code
    assert made.report.model == "Model"


@torch.no_grad()
def test_it_knows_whether_another_run_has_side_effects() -> None:
    x = torch.ones(4)
    for module, writes, repeatable in ((Two(), False, True), (Writes(), True, False), (Draws(), False, False)):
        made, _ = scheduled(module, x)
        assert (made.writes, made.repeatable) == (writes, repeatable), type(module).__name__
    assert x.tolist() == [1.0] * 4, "trials are undone"


@torch.no_grad()
def test_a_run_with_replaced_weights_may_fail_where_indices_are_computed() -> None:
    class Picks(nn.Module):
        def forward(self, table: Tensor, index: Tensor) -> tuple[Tensor]:
            return (table[index],)

    assert scheduled(Two(), torch.ones(4))[0].harmless
    assert not scheduled(Picks(), torch.ones(4, 2), torch.tensor([1, 2]))[0].harmless


@torch.no_grad()
def test_without_a_captured_graph_there_are_no_static_inputs_and_no_timeline() -> None:
    made, arguments = scheduled(Two(), torch.ones(4))
    assert made.captured is None
    assert made.reading(arguments) is None
    assert [a is b for a, b in zip(made.static_inputs(arguments), arguments, strict=True)] == [True]
    assert made.share_outputs(frozenset({0})) == frozenset()
    (refusal,) = [r for r in made.watched(arguments).refusals if r.choice == "not watched"]
    assert "nothing is captured" in refusal.reason
