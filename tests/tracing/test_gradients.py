"""Forward and backward, traced together and taken apart: what is saved, what is looked at again, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autostream.errors import TraceError
from autostream.tracing import gradients
from autostream.tracing.gradients import Halves, Tangent, trace_gradients
from autostream.frontend.tree import flatten

X = torch.randn(3, 4)


def halves(model: nn.Module, *args: Any) -> Halves:
    tensors, structure = flatten((args or (X,), {}))
    return trace_gradients(model, tensors, structure)


def targets(graph: Any) -> list[str]:
    return [node.target._schema.name for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)]


def given(found: Halves, count: int) -> list[str]:
    """What the backward takes: names of values, what is saved, and tangents."""
    names = [*(own.target for own in found.state), *(f"input {at}" for at in range(count))]
    saved = (found.forward.program.outputs[place] for place in found.saved)
    return [*(names[at] for at in found.needed), *map(str, saved)]


def test_values_in_between_are_saved_and_weights_are_looked_at_again() -> None:
    """Weights are seen transposed, which is done again; tanh and sigmoid need what they returned.

    x ── addmm ── tanh ── addmm ── sigmoid ──▶ y
         └─ saved ─┘  weight ┘         └─ the output itself
    """
    found = halves(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2), nn.Sigmoid()))
    assert [own.target for own in found.state] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert given(found, 1) == ["2.weight", "input 0", "tanh", "sigmoid"]
    assert found.forward.program.outputs[0] == "sigmoid"
    assert targets(found.backward(found.saved).graph).count("aten::addmm") == 0
    assert targets(found.forward.program.module.graph) == [
        *("aten::t", "aten::addmm", "aten::tanh", "aten::t", "aten::addmm", "aten::sigmoid")
    ]
    assert found.trained == (0, 1, 2, 3)
    assert found.tangents == (Tangent((3, 2), (2, 1), torch.float32, torch.device("cpu")),)
    assert found.saved == (1, 0)
    graph = found.backward([0, 1]).graph
    assert [node.name for node in graph.find_nodes(op="placeholder")][2:4] == ["sigmoid", "tanh"]


def test_of_views_what_they_are_views_of_is_saved() -> None:
    """Two halves of one product: it is saved once, and cut again."""

    class Gated(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            left, right = super().forward(x).split(2, 1)
            return left * right

    found = halves(Gated(4, 4))
    assert given(found, 1)[:1] == ["input 0"]
    assert len(given(found, 1)) <= 3


def test_numbers_are_asked_again_of_what_they_were_asked_of() -> None:
    """The largest element and a sum of two are needed: copies of what was asked for both are saved."""

    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x).sin()
            top, low = y.max().item(), y.min().item()
            return y * top * (top + low)

    found = halves(Scaled(4, 5))
    assert set(given(found, 1)) == {"input 0", "addmm", "clone_default", "clone_default_1"}
    assert targets(found.backward(found.saved).graph).count("aten::_local_scalar_dense") == 2


def test_gradients_come_from_the_outputs_that_they_depend_on() -> None:
    """The second output is written into a slice, so that only its memory tells where its gradient went.

    x ── body ──┬── left ──▶ y
                └── right, the half of it ──▶ z
    """

    class Parted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            x = self.body(x)
            return self.left(x), x.argmax(), self.right(x)[:, :2].sum(1)

    found = halves(Parted())
    assert [tangent and tangent.shape for tangent in found.tangents] == [(3, 4), None, (3,)]
    assert found.sources == (*[frozenset([0, 2])] * 2, *[frozenset([0])] * 2, *[frozenset([2])] * 2)


def test_gradients_are_laid_out_as_the_graph_takes_them() -> None:
    like = Tangent.of(torch.empty(2, 3))
    ones = torch.ones(2, 3)
    assert like.laid_out(ones) is ones
    for gradient in (torch.ones(()).expand(2, 3), torch.ones(3, 2).t(), ones.to_sparse()):
        assert like.laid_out(gradient).stride() == (3, 1)
        assert torch.equal(like.laid_out(gradient), ones)
    assert torch.equal(like.laid_out(None), torch.zeros(2, 3))


def test_what_is_checkpointed_is_computed_in_the_backward() -> None:
    class Checkpointed(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return, no-untyped-call]

    found = halves(Checkpointed(nn.Linear(4, 4), nn.Tanh()))
    assert given(found, 1) == ["0.weight", "0.bias", "input 0"]
    assert "aten::tanh" in targets(found.backward(found.saved).graph)


def test_only_what_requires_gradients_is_trained() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    model[0].requires_grad_(False)
    assert halves(model).trained == (2, 3, 4)
    assert halves(model, X.clone().requires_grad_()).trained == (2, 3, 4, 5)


def function(run: Callable[..., Any]) -> nn.Module:
    class Own(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return run(super().forward(x), x)

    return Own(4, 4)


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (lambda y, x: y.detach(), "no output depends on what requires gradients"),
        (lambda y, x: (y, x), "an output shares memory"),
        (lambda y, x: (y, y[0]), "an output shares memory"),
        (lambda y, x: y.tanh()[:, :2], "an output shares memory with what its backward needs"),
        (lambda y, x: y[y.sin().nonzero()[:, 0]].sin(), "its backward needs a tensor whose shape depends on data"),
        (lambda y, x: y.sum() + torch.arange(x.sum().int().item()), "the shape of an output depends on data"),
        (lambda y, x: y.register_hook(torch.neg) and y * 1, "calls register_hook, which a graph would not"),
        (lambda y, x: y * torch.rand(4, generator=torch.Generator()), "a generator of the model's own|_C.Generator"),
        (lambda y, x: y.sum().backward() or x.sum() + y, "calls backward, which a graph would not"),
    ],
)
def test_what_autograd_would_see_otherwise_is_refused(run: Callable[..., Any], reason: str) -> None:
    with pytest.raises(TraceError, match=reason):
        halves(function(run), X.clone())


@pytest.mark.parametrize("write", [lambda x: x.view(-1).add_(1), lambda x: torch._foreach_add_([x.view(-1)], 1.0)])
def test_a_model_that_writes_to_its_input_is_refused(write: Callable[[Tensor], object]) -> None:
    class Writing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            write(x)
            return self.weight.sum() * x

    with pytest.raises(TraceError, match="writes to its input 0"):
        halves(Writing(4, 4), X.clone())
    tensors, structure = flatten(((X.clone(),), {}))
    assert trace_gradients(Writing(4, 4), tensors, structure, {0}).trained == (0,), "one that stays is like a buffer"


def test_a_model_over_several_devices_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    made = gradients.program_of
    monkeypatch.setattr(gradients, "program_of", lambda *given: replace(made(*given), peers=("cuda:1",)))
    with pytest.raises(TraceError, match=r"several devices \(cpu, cuda:1\)"):
        halves(nn.Linear(4, 5))


def test_of_what_a_layer_of_pytorchs_does_its_own_line_is_told() -> None:
    """There is none of the user's: a layer calls a layer."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None))
    with pytest.raises(TraceError, match=r"batchnorm.py:\d+: .*float\(self.num_batches_tracked\)"):
        halves(model)
