"""Expensive scalars are computed once, into memory; all other values stay where they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim import SGD, Adagrad, Adam

from autostream.fusion.inductor import _functional
from autostream.fusion.scalars import compute_once
from tests.steps import program_of

aten = torch.ops.aten
X, STEP = torch.rand(3, 2), torch.tensor(3.0, dtype=torch.float64)


def in_memory(graph: fx.Graph) -> dict[str, list[str]]:
    """The scalars that are kept in memory, with the ops that read them there."""
    views = graph.find_nodes(op="call_function", target=aten.as_strided.default)
    return {node.all_input_nodes[0].name: [user.name for user in node.users] for node in views}


def computed_once(function: Callable[..., Any], *tensors: Tensor) -> fx.Graph:
    """The graph of a function after ``compute_once``, which must change no value."""
    module = make_fx(function, tracing_mode="fake")(*tensors)
    expected = module(*tensors)
    compute_once(module.graph)
    module.graph.lint()
    module.recompile()
    torch.testing.assert_close(module(*tensors), expected, rtol=0, atol=0, equal_nan=True)
    return module.graph


def test_an_expensive_scalar_is_in_memory_for_ops_on_larger_tensors() -> None:
    """
    Step ── pow ─┬─ as_strided ─┬─ mul
                 │              └─ add
                 └─ sub (a cheap scalar, computed from an expensive one) ── as_strided ── div
    """

    def function(x: Tensor, step: Tensor) -> Any:
        power = 0.9**step
        return x * power, x + power, x / (power - 1)

    assert in_memory(computed_once(function, X, STEP)) == {"pow_1": ["mul", "add"], "sub": ["div"]}
    chain = computed_once(lambda x, step: x * (step.sqrt().float() + 1), X, STEP)
    assert in_memory(chain) == {"add": ["mul"]}, "the last scalar of a chain, whatever its dtype"


def constants(x: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
    constant = torch.full((), 0.5, dtype=torch.float64, device=x.device)
    return x * constant, x * x.double().norm()


@pytest.mark.parametrize(
    "function",
    [
        lambda x, step: x * (1 - 0.5 * (step + 1)),
        lambda x, step: (x * x.double()[0, 1], x * x.double().select(0, 2).view(2)),
        constants,
        lambda x, step: x * 2 ** step.float(),
        lambda x, step: x * 2 ** step.long(),
        lambda x, step: (x + 1, step.exp(), step.sqrt().float()),
    ],
    ids=["cheap", "views", "constants and reductions", "float32", "int64", "results that are scalars"],
)
def test_other_scalars_stay(function: Callable[..., Any]) -> None:
    assert in_memory(computed_once(function, X, STEP)) == {}


def test_long_chains_do_not_recurse() -> None:
    graph = fx.Graph()
    x, step = graph.placeholder("x"), graph.placeholder("step")
    x.meta["val"], step.meta["val"] = X, STEP
    for _ in range(2000):
        previous, step = step, graph.call_function(aten.sqrt.default, (step,))
        step.meta["val"] = STEP.clone()
    product = graph.call_function(aten.mul.Tensor, (x, step))
    product.meta["val"] = X
    compute_once(graph)
    assert previous.op == "call_function"
    assert list(in_memory(graph)) == [step.name]


OPS = {
    "pow": lambda a, b: a**b,
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "float": lambda a, b: a.float(),
    "double": lambda a, b: b.double(),
    "sqrt": lambda a, b: b.abs().sqrt(),
}


@given(st.lists(st.tuples(st.sampled_from(sorted(OPS)), st.integers(0, 20), st.integers(0, 20)), max_size=8))
@settings(max_examples=25)
def test_random_programs_compute_the_same(program: list[tuple[str, int, int]]) -> None:
    """Scalars and a vector, each op of two earlier values; scalars in memory are read by larger ops only."""

    def function(x: Tensor, step: Tensor) -> list[Tensor]:
        values = [x, step, step.float()]
        for name, left, right in program:
            values.append(OPS[name](values[left % len(values)], values[right % len(values)]))
        return values

    graph = computed_once(function, torch.rand(3) + 1, STEP)
    for node in graph.find_nodes(op="call_function", target=aten.as_strided.default):
        assert node.users
        assert all(user.meta["val"].dim() for user in node.users)


@pytest.mark.parametrize(
    ("optimizer", "for_each"),
    [
        (lambda parameters: Adam(parameters, lr=0.1), 2),
        (lambda parameters: Adagrad(parameters, lr=0.1, lr_decay=0.1), 1),
        (lambda parameters: SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1), 0),
    ],
    ids=["Adam", "Adagrad", "SGD"],
)
def test_an_optimizer_computes_the_corrections_of_each_parameter_once(optimizer: Any, for_each: int) -> None:
    model = nn.Linear(3, 4)
    loss: Any = lambda model, x: model(x).square().mean()  # noqa: E731
    graph = _functional(program_of(model, optimizer(model.parameters()), loss, (torch.ones(2, 3),))[0]).graph
    scalars = in_memory(graph)
    assert len(scalars) == 2 * for_each
    packets = {node.target.overloadpacket for node in graph.nodes if node.name in scalars}
    assert packets <= {aten.sqrt, aten.reciprocal, aten.div}
