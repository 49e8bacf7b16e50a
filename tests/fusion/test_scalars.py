"""Scalars that take long to compute are kept in memory; all others stay where they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._inductor import config
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim import SGD, Adagrad, Adam, AdamW, RMSprop

from autostream.fusion.inductor import SETTINGS, _functional
from autostream.fusion.scalars import compute_once
from tests.steps import program_of

aten = torch.ops.aten
X, STEP = torch.rand(3, 2), torch.tensor(3.0, dtype=torch.float64)


def graph_of(function: Callable[..., Any], *tensors: Tensor) -> fx.GraphModule:
    return make_fx(function, tracing_mode="fake")(*tensors)


def kept(graph: fx.Graph) -> dict[str, list[str]]:
    """What is kept in memory, with the ops that read it there."""
    found = graph.find_nodes(op="call_function", target=aten.as_strided.default)
    return {node.all_input_nodes[0].name: [user.name for user in node.users] for node in found}


def kept_of(function: Callable[..., Any], *tensors: Tensor) -> dict[str, list[str]]:
    """The same once the expensive is computed once, which changes no value."""
    module = graph_of(function, *tensors)
    expected = module(*tensors)
    compute_once(module.graph)
    module.recompile()
    torch.testing.assert_close(module(*tensors), expected, rtol=0, atol=0)
    return kept(module.graph)


def test_what_is_expensive_is_kept_for_those_that_compute_more_than_a_scalar() -> None:
    """
    Step ── pow ─┬─ as_strided ─┬─ mul
                 │              └─ add
                 └─ sub (a scalar too, and cheap: but of something expensive) ── as_strided ── div
    """

    def function(x: Tensor, step: Tensor) -> Any:
        power = 0.9**step
        return x * power, x + power, x / (power - 1)

    assert kept_of(function, X, STEP) == {"pow_1": ["mul", "add"], "sub": ["div"]}


def test_what_is_cheap_stays() -> None:
    assert kept_of(lambda x, step: x * (1 - 0.5 * (step + 1)), X, STEP) == {}


def test_what_is_there_is_not_computed() -> None:
    numbers = torch.rand(3, dtype=torch.float64)
    assert kept_of(lambda x, numbers: (x * numbers[1], x * numbers.select(0, 2).view(())), X, numbers) == {}


def test_constants_and_sums_are_none_of_it() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        constant = torch.full((), 0.5, dtype=torch.float64, device=x.device)
        return x * constant, x * x.double().norm()

    assert kept_of(function, X) == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_other_types_are_cheap(dtype: torch.dtype) -> None:
    assert kept_of(lambda x, step: x * 2**step, X, STEP.to(dtype)) == {}


def test_the_last_scalar_of_a_chain_is_kept_whatever_its_type() -> None:
    assert kept_of(lambda x, step: x * (step.sqrt().float() + 1), X, STEP) == {"add": ["mul"]}


def test_what_ends_in_a_scalar_is_no_matter() -> None:
    """Such as a counter, which is written back."""
    assert kept_of(lambda x, step: (x + 1, step.exp(), step.sqrt().float()), X, STEP) == {}


def test_chains_may_be_long() -> None:
    def function(x: Tensor, step: Tensor) -> Tensor:
        for _ in range(1500):
            step = step.sqrt().float().double()
        return x * step

    assert len(kept_of(function, X, STEP)) == 1


OPS = {
    "pow": lambda a, b: a**b,
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "float": lambda a, b: a.float(),
    "double": lambda a, b: b.double(),
    "sqrt": lambda a, b: b.abs().sqrt(),
}


@given(st.lists(st.tuples(st.sampled_from(sorted(OPS)), st.integers(0, 20), st.integers(0, 20)), max_size=8))
def test_no_program_computes_anything_else(program: list[tuple[str, int, int]]) -> None:
    """Scalars and larger tensors, each op of two that are there; what is kept is read by something larger only."""

    def function(x: Tensor, step: Tensor) -> list[Tensor]:
        values = [x, step, step.float()]
        for name, left, right in program:
            values.append(OPS[name](values[left % len(values)], values[right % len(values)]))
        return values

    given = torch.rand(3) + 1, STEP
    module = graph_of(function, *given)
    expected = module(*given)
    compute_once(module.graph)
    module.graph.lint()
    module.recompile()
    torch.testing.assert_close(module(*given), expected, rtol=0, atol=0, equal_nan=True)
    for node in module.graph.find_nodes(op="call_function", target=aten.as_strided.default):
        assert node.users
        assert all(user.meta["val"].dim() for user in node.users)


# Optimizers


def functional(optimizer: Callable[..., Any]) -> fx.Graph:
    """What Inductor is given of a step of two layers."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    own = optimizer(model.parameters())
    program, _ = program_of(model, own, lambda model, x: model(x).square().mean(), (torch.ones(2, 3),))
    return _functional(program).graph


@pytest.mark.parametrize(
    ("optimizer", "each"),
    [
        (lambda its: Adam(its, lr=0.1), 2),
        (lambda its: AdamW(its, lr=0.1, weight_decay=0.1), 2),
        (lambda its: Adagrad(its, lr=0.1, lr_decay=0.1), 1),
        (lambda its: SGD(its, lr=0.1, momentum=0.9, weight_decay=0.1), 0),
        (lambda its: RMSprop(its, lr=0.1), 0),
    ],
)
def test_each_parameters_update_reads_its_corrections(optimizer: Callable[..., Any], each: int) -> None:
    graph = functional(optimizer)
    found = kept(graph)
    assert len(found) == 4 * each
    kinds = {node.target.overloadpacket for node in graph.nodes if node.name in found}
    assert kinds <= {aten.sqrt, aten.reciprocal, aten.div}


@pytest.mark.parametrize("once", [False, True])
def test_inductor_keeps_what_is_looked_at_by_its_strides(once: bool) -> None:
    """That is private to it: were it otherwise, threads would compute powers again."""
    module = graph_of(lambda x, step: x * 0.9**step, X, STEP)
    if once:
        compute_once(module.graph)
    values = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    mode = detect_fake_mode(values)
    with config.patch({**SETTINGS, "fx_wrapper": False}), tracing(TracingContext(mode)), V.set_fake_mode(mode):
        lowering = GraphLowering(module, example_inputs=values, is_inference=True)
        with V.set_graph_handler(lowering):
            lowering.run(*values)
    assert [len(lowering.operations), len(lowering.graph_outputs)] == [1 + once, 1]
