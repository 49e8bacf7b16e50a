"""Graphs whose calls record gradients: their forward and backward, saved activations, and what a backend returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from autostream.frontend.autograd import differentiable, run_graph
from autostream.frontend.capture import capture
from autostream.frontend.inputs import names_of
from autostream.ir import Role
from tests.semantics import same

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Graph:
    """Runs a graph op by op; shared outputs are in memory that its next call writes, as in a CUDA graph."""

    def __init__(self, module: fx.GraphModule, names: Sequence[tuple[Role, str]], half: str, shares: bool) -> None:
        self.module, self.names, self.half, self.shares = module, list(names), half, shares
        self.calls, self.shared = 0, frozenset[int]()
        self.memory: dict[int, Tensor] = {}

    def __call__(self, *values: Any) -> Sequence[Any]:
        """The outputs of the graph."""
        self.calls += 1
        outputs = list(self.module.forward(*values))
        for at in self.shared:
            self.memory.setdefault(at, torch.empty_like(outputs[at])).copy_(outputs[at])
            outputs[at] = self.memory[at]
        return outputs

    def share_outputs(self, values: Sequence[Any], places: frozenset[int]) -> frozenset[int]:
        """All that are computed here and are not views."""
        results: Any = self.module.graph.output_node().args[0]
        computed = {at for at in places if results[at].op == "call_function" and not results[at].target.is_view}
        self.shared = frozenset(computed if self.shares else ())
        return self.shared


class Make:
    """Makes graphs, and keeps them in order."""

    def __init__(self, shares: bool = False) -> None:
        self.shares, self.graphs = shares, list[Graph]()

    def __call__(self, module: fx.GraphModule, names: Sequence[tuple[Role, str]], *, half: str = "") -> Graph:
        """What runs a graph."""
        self.graphs.append(Graph(module, names, half, self.shares))
        return self.graphs[-1]

    def halves(self) -> list[str]:
        """Whether each graph is a forward or a backward."""
        return [graph.half for graph in self.graphs]


def t(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2, bias=False), nn.Sigmoid())


def differentiated(model: nn.Module, x: Tensor, make: Make) -> Callable[[Tensor], Tensor]:
    """The model as a captured graph whose calls record gradients."""
    captured = capture(model, (x,), {})
    assert captured is not None
    run = differentiable(captured.module, captured.tensors, names_of(captured, model), make)
    restored = captured.restored(run)
    return lambda x: restored(model, (x,), {})


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [*model.parameters()], retain_graph=True))


@pytest.mark.parametrize("shares", [False, True])
def test_a_backward_uses_the_activations_of_its_own_forward(shares: bool) -> None:
    """Also after another call, and twice with ``retain_graph=True``. Each graph is made in its first call."""
    model, make, x = net(), Make(shares), t(5, 3)
    run = differentiated(model, x, make)
    assert make.halves() == []
    first, second = run(x).sum(), run(2 * x).sum()
    assert make.halves() == ["forward"]
    for loss, its in [(second, 2 * x), (first, x), (first, x), (second, 2 * x)]:
        same(loss, model(its).sum(), 1e-6)
        same(gradients(model, loss), gradients(model, model(its).sum()), 1e-6)
    run(x)
    assert make.halves()[:2] == ["forward", "backward"]
    assert bool(make.graphs[0].shared) is shares


@pytest.mark.parametrize("shares", [False, True])
def test_weights_and_shared_activations_are_static_inputs(shares: bool) -> None:
    model, make = net(), Make(shares)
    gradients(model, differentiated(model, t(5, 3), make)(t(5, 3)).sum())
    forward, backward = make.graphs
    assert sorted(role.value for role, _ in forward.names) == ["input", "parameter", "parameter", "parameter"]
    roles = [role for role, _ in backward.names]
    assert roles.count(Role.PARAMETER) == 1, "the second layer's weight: the first layer's gradients depend on it"
    assert roles.count(Role.BUFFER) == len(forward.shared)
    assert bool(forward.shared) is shares
    assert [name for _, name in backward.names] == [str(at) for at in range(len(roles))]


# Graphs that a backend of torch.compile is given


def graph_of(function: Callable[..., Any], *args: Any) -> tuple[fx.GraphModule, Sequence[Any]]:
    """What ``torch.compile`` gives a backend in a call: a graph and example inputs."""
    graphs: list[tuple[fx.GraphModule, Sequence[Any]]] = []

    def backend(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        graphs.append((module, list(example_inputs)))
        return module.forward

    torch.compile(function, backend=backend, dynamic=False)(*args)
    return graphs[0]


def test_a_backend_makes_a_forward_and_a_backward_where_gradients_are_recorded() -> None:
    weight = nn.Parameter(t(3))
    for recording in (True, False):
        module, values = graph_of(lambda x: (x * weight).sin(), t(3))
        make = Make()
        with torch.set_grad_enabled(recording):
            (y,) = run_graph(module, values, make)(*values)
            (expected,) = module.forward(*values)
        same(y, expected, 1e-6)
        assert y.requires_grad is recording
        assert make.halves() == (["forward"] if recording else [""])
        assert {role for role, _ in make.graphs[0].names} == {Role.PARAMETER, Role.INPUT}
    x = next(value for value in values if not isinstance(value, nn.Parameter))
    torch.utils.swap_tensors(x, torch.zeros(3))  # refuses tensors with weak references
    assert x.tolist() == [0, 0, 0]
    module, values = graph_of(lambda x: x.sin(), t(3))
    make = Make()
    same(list(run_graph(module, values, make)(*values)), [t(3).sin()])
    assert make.halves() == [""], "nothing requires gradients"
