"""Graphs that record gradients: what is made of their halves, and that no call gets what another one left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from autostream.frontend.autograd import differentiable, op_by_op, run_graph
from autostream.frontend.capture import capture
from autostream.frontend.inputs import names_of
from autostream.ir import Role
from tests.semantics import same

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Half:
    """Runs a graph op by op; where it lends, a call writes to the memory of the last one, as a CUDA graph does."""

    def __init__(self, module: fx.GraphModule, names: Sequence[tuple[Role, str]], half: str, lends: bool) -> None:
        self.module, self.names, self.half, self.lends = module, list(names), half, lends
        self.calls, self.lent = 0, frozenset[int]()
        self.memory: dict[int, Tensor] = {}

    def __call__(self, *values: Any) -> Sequence[Any]:
        """What the graph returns."""
        self.calls += 1
        outputs = list(self.module.forward(*values))
        for at in self.lent:
            self.memory.setdefault(at, torch.empty_like(outputs[at])).copy_(outputs[at])
            outputs[at] = self.memory[at]
        return outputs

    def lend(self, values: Sequence[Any], places: frozenset[int]) -> frozenset[int]:
        """All that is saved and computed here, which views are not."""
        results: Any = self.module.graph.output_node().args[0]
        computed = {at for at in places if results[at].op == "call_function" and not results[at].target.is_view}
        self.lent = frozenset(computed if self.lends else ())
        return self.lent


class Made:
    """Makes halves, and keeps them in order."""

    def __init__(self, lends: bool = False) -> None:
        self.lends, self.halves = lends, list[Half]()

    def __call__(self, module: fx.GraphModule, names: Sequence[tuple[Role, str]], *, half: str = "") -> Half:
        """What runs a graph."""
        self.halves.append(Half(module, names, half, self.lends))
        return self.halves[-1]

    def kinds(self) -> list[str]:
        """Which halves they are."""
        return [made.half for made in self.halves]


def t(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2, bias=False), nn.Sigmoid())


def recorded(model: nn.Module, x: Tensor, make: Made) -> Callable[[Tensor], Tensor]:
    """The model by a graph that records gradients."""
    captured = capture(model, (x,), {})
    assert captured is not None
    run = differentiable(captured.module, captured.tensors, names_of(captured, model), make)
    restored = captured.restored(run)
    return lambda x: restored(model, (x,), {})


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [*model.parameters()], retain_graph=True))


@pytest.mark.parametrize("lends", [False, True])
def test_each_call_goes_back_from_what_it_has_computed(lends: bool) -> None:
    """Also where another call has come between, and where somebody goes back twice."""
    model, make = net(), Made(lends)
    run = recorded(model, t(5, 3), make)
    first, second = run(t(5, 3)).sum(), run(2 * t(5, 3)).sum()
    for loss, x in [(second, 2 * t(5, 3)), (first, t(5, 3)), (first, t(5, 3)), (second, 2 * t(5, 3))]:
        same(loss, model(x).sum(), 1e-6)
        same(gradients(model, loss), gradients(model, model(x).sum()), 1e-6)
    assert make.kinds()[:2] == ["forward", "backward"]
    assert bool(make.halves[0].lent) is lends


def test_a_half_is_made_when_it_is_first_run() -> None:
    model, make = net(), Made()
    run = recorded(model, t(5, 3), make)
    assert make.kinds() == []
    loss = run(t(5, 3)).sum()
    assert make.kinds() == ["forward"]
    for _ in range(2):
        gradients(model, loss)
    run(t(5, 3))
    assert make.kinds() == ["forward", "backward"]
    assert [half.calls for half in make.halves] == [2, 2]


def test_weights_stay_where_they_are_in_both_halves_and_what_is_lent_does() -> None:
    model, make = net(), Made(lends=True)
    gradients(model, recorded(model, t(5, 3), make)(t(5, 3)).sum())
    forward, backward = make.halves
    assert sorted(role.value for role, _ in forward.names) == ["input", "parameter", "parameter", "parameter"]
    roles = [role for role, _ in backward.names]
    assert roles.count(Role.PARAMETER) == 1, "the second layer's weight: it takes gradients back to the first"
    assert roles.count(Role.BUFFER) == len(forward.lent) > 0
    assert [name for _, name in backward.names] == [str(at) for at in range(len(roles))]


def test_where_nothing_is_lent_a_backward_takes_inputs() -> None:
    model, make = net(), Made()
    gradients(model, recorded(model, t(5, 3), make)(t(5, 3)).sum())
    assert Role.BUFFER not in [role for half in make.halves for role, _ in half.names]


def test_where_the_gradients_of_many_are_asked_for_the_graph_itself_runs() -> None:
    """What is batched by ``vmap`` has no memory that a schedule could take."""
    model, make = nn.Sequential(nn.Linear(3, 2), nn.Tanh()), Made()
    y = recorded(model, t(3), make)(t(3))
    rows = torch.autograd.grad(y, [*model.parameters()], torch.eye(2), is_grads_batched=True)
    for at in range(2):
        expected = torch.autograd.grad(model(t(3))[at], [*model.parameters()])
        torch.testing.assert_close([row[at] for row in rows], list(expected))
    assert make.kinds() == ["forward"]


# Graphs that a backend of torch.compile is given


def graph_of(function: Callable[..., Any], *args: Any) -> tuple[fx.GraphModule, Sequence[Any]]:
    """What Dynamo gives a backend in a call, with its example inputs."""
    found: list[tuple[fx.GraphModule, Sequence[Any]]] = []

    def backend(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        found.append((module, list(example_inputs)))
        return module.forward

    torch.compile(function, backend=backend, dynamic=False)(*args)
    return found[0]


def test_with_gradients_there_are_halves_and_without_one_graph() -> None:
    weight = nn.Parameter(t(3))
    for recording in (True, False):
        module, values = graph_of(lambda x: (x * weight).sin(), t(3))
        make = Made()
        with torch.set_grad_enabled(recording):
            run = run_graph(module, values, make)
            (y,) = run(*values)
            (expected,) = module.forward(*values)
        same(y, expected, 1e-6)
        assert y.requires_grad is recording
        assert make.kinds() == (["forward"] if recording else [""])
        assert {role for role, _ in make.halves[0].names} == {Role.PARAMETER, Role.INPUT}


def test_where_nothing_requires_gradients_there_are_no_halves() -> None:
    module, values = graph_of(lambda x: x.sin(), t(3))
    make = Made()
    same(list(run_graph(module, values, make)(*values)), [t(3).sin()])
    assert make.kinds() == [""]


def test_what_was_traced_may_be_swapped() -> None:
    """Traces refer to tensors weakly, for which PyTorch would refuse that."""
    weight = nn.Parameter(t(3))
    module, values = graph_of(lambda x: x * weight, t(3))
    run_graph(module, values, Made())
    x = next(value for value in values if not isinstance(value, nn.Parameter))
    torch.utils.swap_tensors(x, torch.zeros(3))
    assert x.tolist() == [0, 0, 0]


def test_op_by_op_a_graph_is_run_as_it_is() -> None:
    module, values = graph_of(lambda x: x.sin() + 1, t(3))
    assert op_by_op(module, values) == module.forward


def test_op_by_op_what_is_checkpointed_draws_the_same_numbers_once_more() -> None:
    def function(x: Tensor) -> Tensor:
        return checkpoint(lambda x: torch.dropout(x.sin(), 0.5, True).exp(), x, use_reentrant=False)

    x = t(20).requires_grad_()
    module, values = graph_of(function, x)
    run = op_by_op(module, values)
    torch.manual_seed(1)
    (y,) = run(x)
    torch.manual_seed(2)  # what is drawn between does not matter
    (ours,) = torch.autograd.grad(y.sum(), x)
    torch.manual_seed(1)
    (expected,) = torch.autograd.grad(function(x).sum(), x)
    same(ours, expected, 1e-6)
