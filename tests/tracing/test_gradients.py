"""Forward and backward, traced together and taken apart: what is saved, what is looked at again, what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autostream.errors import TraceError
from autostream.ir import Role
from autostream.tracing import gradients, inductor
from autostream.tracing.below_autograd import state_of
from autostream.tracing.channels_last import is_channels_last, laid_out
from autostream.tracing.gradients import Halves, Tangent, trace_gradients
from autostream.tracing.tree import flatten
from tests.execution.programs import case_of
from tests.tracing.test_channels_last import CONVOLUTION, GRADIENTS, calls, is_laid_out

aten = torch.ops.aten

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
        (lambda y, x: y.register_hook(torch.neg) and y * 1, "calls register_hook, which a graph would not"),
        (lambda y, x: y * torch.rand(4, generator=torch.Generator()), "a generator of the model's own|_C.Generator"),
        (lambda y, x: y.sum().backward() or x.sum() + y, "calls backward, which a graph would not"),
    ],
)
def test_what_autograd_would_see_otherwise_is_refused(run: Callable[..., Any], reason: str) -> None:
    with pytest.raises(TraceError, match=reason):
        halves(function(run), X.clone())


def test_a_model_that_writes_to_its_input_is_refused() -> None:
    class Writing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return self.weight.sum() * x.view(-1).add_(1)

    with pytest.raises(TraceError, match="writes to its input 0"):
        halves(Writing(4, 4), X.clone())


def test_a_model_over_several_devices_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    made = gradients.program_of
    monkeypatch.setattr(gradients, "program_of", lambda *given: replace(made(*given), peers=("cuda:1",)))
    with pytest.raises(TraceError, match=r"several devices \(cpu, cuda:1\)"):
        halves(nn.Linear(4, 5))


# Both halves laid out together


class Features(nn.Module):
    """Two convolutions: a classifier's output, a map of features that its backward needs, and one without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.second, self.last = nn.Conv2d(4, 4, 3, padding=1), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = self.norm(self.first(x)).relu_()
        y = torch.tanh(x + self.second(x))
        return self.last(y.mean((2, 3))), y.exp(), y.argmax(1)


def features(*laid_out: str) -> tuple[nn.Module, Tensor]:
    """A model and its input, of which these are channels-last."""
    torch.manual_seed(0)
    model, x = Features().double(), torch.randn(2, 2, 6, 5, dtype=torch.float64)
    if "weights" in laid_out:
        model.to(memory_format=torch.channels_last)
    return model, (x.contiguous(memory_format=torch.channels_last) if "input" in laid_out else x).requires_grad_()


def values_of(nodes: Sequence[Any]) -> list[Tensor]:
    return [node.meta["val"] for node in nodes]


def left_by_the_forward(found: Halves, model: nn.Module, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs, and what the backward takes, tangents of ones among it."""
    program, state = found.forward.program, state_of(model)
    with torch.no_grad():
        left = program.module(*(x if p.role is Role.INPUT else state[p.target] for p in program.placeholders))
    values, saved = [*state.values(), x], [left[place] for place in found.saved]
    tangents = [like.laid_out(torch.ones(like.shape, dtype=like.dtype)) for like in found.tangents if like]
    return list(left[: len(found.tangents)]), [*(values[at].detach() for at in found.needed), *saved, *tangents]


def assert_the_same(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    torch.testing.assert_close(list(ours), list(theirs), rtol=1e-10, atol=1e-12)
    assert [each.stride() for each in ours] == [each.stride() for each in theirs]


@pytest.mark.parametrize("given", [(), ("input",), ("weights",), ("input", "weights")])
def test_halves_that_are_laid_out_return_what_the_model_does(given: tuple[str, ...]) -> None:
    """With its strides too; what is saved lies as convolutions like it."""
    model, x = features(*given)
    plain = copy.deepcopy(model)
    tensors, structure = flatten(((x,), {}))
    found = trace_gradients(model, tensors, structure, laid_out)
    outputs, taken = left_by_the_forward(found, model, x)
    gradients = found.backward(found.saved)(*taken)
    expected = plain(x)
    assert_the_same(outputs, expected)
    assert_the_same(gradients, torch.autograd.grad(expected[0].sum() + expected[1].sum(), [*plain.parameters(), x]))
    assert_the_same(list(model.buffers()), list(plain.buffers()))
    assert found.sources == trace_gradients(model, tensors, structure).sources
    results = found.forward.program.module.graph.output_node().args[0]
    saved = values_of([results[place] for place in found.saved])  # type: ignore[index]
    assert [value for value in saved if value.dim() == 4 and not is_laid_out(value)] == []


def test_what_is_laid_out_for_the_forward_is_saved() -> None:
    """The input and both weights are, once; the backward lays out the map's gradient, and what it returns as it was.

    x, weight ── clone ── conv ──▶ …     saved: clones     map's ── copy ──▶ … ── copy ──▶ of the input and both weights
    """
    model, x = features()
    tensors, structure = flatten(((x,), {}))
    found = trace_gradients(model, tensors, structure, laid_out)
    forward, backward = found.forward.program.module.graph, found.backward(found.saved).graph
    clones = calls(forward, aten.clone.default)
    assert [node.args[0].name for node in clones] == [  # type: ignore[union-attr]
        *("input_0", "parameter_first_weight", "parameter_second_weight")
    ]
    saved = {found.forward.program.outputs[place] for place in found.saved}
    assert {node.name for node in clones} <= saved
    assert "0.weight" not in given(found, 1)
    read = [*calls(forward, CONVOLUTION), *calls(backward, GRADIENTS)]
    assert len(read) == 2 + 4, "each gradient for itself"
    assert all(is_laid_out(value) for node in read for value in values_of(node.args[:2]))
    assert calls(backward, aten.clone.default) == []
    ((tangent),) = [node for node in backward.find_nodes(op="placeholder") if node.name == "empty_like_1"]
    assert [user.target for user in tangent.users] == [aten.copy_.default]
    assert len(calls(backward, aten.copy_.default)) == 1 + 3


def test_below_fusion_nothing_that_is_saved_is_laid_out_again() -> None:
    """Nothing is copied but what is laid out above it: the map as others see it, and as ``argmax`` does, for one."""
    model, x = features()
    tensors, structure = flatten(((x,), {}))
    found = trace_gradients(model, tensors, structure, laid_out)
    _, taken = left_by_the_forward(found, model, x)
    programs = found.forward.program, case_of(found.backward(found.saved), *taken).program
    forward, backward = (inductor._functional(program).graph for program in programs)
    assert is_channels_last(forward)
    gradients = calls(backward, GRADIENTS)
    assert len(gradients) == 4
    assert all(map(is_laid_out, (value for node in gradients for value in values_of(node.args[:3]))))
    assert {read.op for node in gradients for read in node.args[1:3]} == {"placeholder"}  # type: ignore[union-attr]
    assert [len(calls(graph, aten.clone.default)) for graph in (forward, backward)] == [3, 0]
    assert [len(calls(graph, aten.copy.default)) for graph in (forward, backward)] == [1 + 1, 1 + 3]


def test_what_cannot_be_laid_out_stays_as_it_was() -> None:
    model, x = features()
    tensors, structure = flatten(((x,), {}))
    found, expected = (trace_gradients(model, tensors, structure, *how) for how in ((lambda _: None,), ()))
    assert found.forward.program.module.code == expected.forward.program.module.code
    assert found.backward(found.saved).code == expected.backward(expected.saved).code
    assert found.tangents == expected.tangents
