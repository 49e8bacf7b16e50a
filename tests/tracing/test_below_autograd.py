"""What tracing of steps and of gradients share: whose tensors are a graph's arguments, and what remains of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn

from autostream.errors import TraceError
from autostream.ir import Role
from autostream.tracing.below_autograd import graph_of, reached_originals, state_of, tidied
from autostream.tracing.constants import registered
from autostream.tracing.flat import FlatModel
from autostream.frontend.tree import flatten

aten = torch.ops.aten


class Net(nn.Module):
    """Of its tensors, one has two names and one is of no use."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.tied = self.weight
        self.unused = nn.Parameter(torch.ones(3))
        self.steps = nn.Buffer(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.steps.add_(1)
        return x * self.weight


def graph(model: Net, x: Tensor) -> fx.GraphModule:
    """Forward and backward of the sum, in terms of the model's tensors and ``x``."""
    _, structure = flatten(((x,), {}))
    flat = FlatModel(model, structure, registered(model), "make_fx")

    def run(weight: Tensor, unused: Tensor, steps: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        values = {"model.weight": weight, "model.unused": unused, "model.steps": steps}
        with torch.enable_grad():
            (y,) = torch.func.functional_call(flat, values, (x,))
            return y, *torch.autograd.grad(y.sum(), [weight])

    return graph_of(run, {}, flat, [*state_of(model).values(), x])


def targets(module: fx.GraphModule) -> list[object]:
    return [node.target for node in module.graph.find_nodes(op="call_function", target=aten.mul.Tensor)]


def test_a_tensor_of_two_names_is_one() -> None:
    model = Net()
    assert list(state_of(model)) == ["weight", "unused", "steps"]


def test_a_graph_goes_through_the_backward() -> None:
    model, x = Net(), torch.arange(3.0)
    module = graph(model, x)
    assert len(targets(module)) == 2, "the product, and its gradient"
    with torch.no_grad():
        y, gradient = module(*state_of(model).values(), x)
    assert (y.tolist(), gradient.tolist(), model.steps.tolist()) == ([0, 1, 2], [0, 1, 2], [1, 1, 1])


def test_what_nobody_needs_is_left_out_and_the_rest_has_names_that_tell() -> None:
    model, x = Net(), torch.arange(3.0)
    module = graph(model, x)
    placeholders = tidied(module, model, [x])
    assert [(p.name, p.role, p.target) for p in placeholders] == [
        ("parameter_weight", Role.PARAMETER, "weight"),
        ("buffer_steps", Role.BUFFER, "steps"),
        ("input_0", Role.INPUT, "0"),
    ]
    assert [node.name for node in module.graph.find_nodes(op="placeholder")] == [p.name for p in placeholders]
    assert module.graph.find_nodes(op="call_function", target=aten.add_.Tensor), "nobody reads it, and it is written"
    assert not [node for node in module.graph.nodes if node.target is aten.detach.default and not node.users]


def test_inputs_that_share_memory_share_a_storage() -> None:
    whole = torch.ones(3)
    module = fx.symbolic_trace(lambda x, y: x + y)
    first, second = tidied(module, nn.Module(), [whole, whole[:1]])
    assert first.storage == second.storage == first.name


def test_a_tensor_of_the_models_that_became_a_constant_shows() -> None:
    model = Net()
    assert not reached_originals(graph(model, torch.ones(3)), model)
    lost = fx.Graph()
    lost.output(lost.get_attr("kept"))
    assert reached_originals(fx.GraphModule({"kept": model.steps[1:]}, lost), model)
    assert not reached_originals(fx.GraphModule({"kept": torch.ones(3)}, lost), model)


def test_a_kernel_that_leaves_its_backward_nothing_in_a_graph_is_refused() -> None:
    """That of oneDNN for LSTMs asks whether gradients are recorded; without them it is like any other."""
    lstm, x = nn.LSTM(4, 4), torch.ones(3, 2, 4)
    _, structure = flatten(((x,), {}))

    def trace(backward: bool) -> fx.GraphModule:
        def run(*values: Tensor) -> list[Tensor]:
            state = {f"model.{name}": value for name, value in zip(state_of(lstm), values, strict=False)}
            with torch.set_grad_enabled(backward):
                y = torch.func.functional_call(flat, state, values[-1:])[0]
                return list(torch.autograd.grad(y.sum(), values[:-1])) if backward else [y]

        flat = FlatModel(lstm, structure, registered(lstm), "make_fx")
        return graph_of(run, {}, flat, [*state_of(lstm).values(), x])

    with pytest.raises(TraceError, match="leaves its backward what that needs"):
        trace(backward=True)
    assert trace(backward=False).graph.find_nodes(op="call_function", target=aten.mkldnn_rnn_layer.default)
