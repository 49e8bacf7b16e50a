"""Programs of training steps: what is in them, in which order, and what becomes of them below fusion."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from autostream.dispatch.step_graphs import Refused
from autostream.dispatch.steps import Step
from autostream.errors import TraceError
from autostream.fusion import inductor
from autostream.ir import Program, Role
from tests.steps import program_of, run, step_of, traced


class Net(nn.Module):
    """A tied weight, a norm that learns, an in-place op, a dropout, and a layer that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(3, 3, bias=False) for _ in range(2))
        self.unused = nn.Linear(2, 2)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.calm(x), 0.5)

    def calm(self, x: Tensor) -> Tensor:
        """What comes before the dropout."""
        return self.norm(self.second(self.first(x))).relu_()  # type: ignore[no-any-return]


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


BATCH = (torch.randn(4, 3), torch.randn(4, 3))


def momentum(model: nn.Module, **rates: float) -> torch.optim.Optimizer:
    """SGD that has state."""
    return torch.optim.SGD(model.parameters(), lr=0.1, **{"momentum": 0.9, **rates})


def second(model: nn.Module, loss: Callable[..., Any] = loss_fn, **rates: float) -> Step:
    """A step of SGD with momentum that has its state."""
    step = step_of(model, momentum(model, **rates), loss)
    run(step, BATCH)
    return step


def state(step: Step) -> dict[str, Tensor]:
    """The tensors of a step's model, by name."""
    return {**dict(step.model.named_parameters()), **dict(step.model.named_buffers())}


def targets(program: Program) -> list[str]:
    return [node.target._schema.name for node in ops(program)]  # type: ignore[union-attr]


def ops(program: Program) -> list[fx.Node]:
    return [node for node in program.module.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def test_placeholders_are_weights_then_buffers_then_the_optimizers_state_then_inputs_and_the_rate() -> None:
    program, _ = traced(second(Net()), BATCH)
    roles = [(p.role, p.target) for p in program.placeholders]
    parameters = ["model.first.weight", "model.norm.weight", "model.norm.bias"]
    statistics = [f"model.norm.{name}" for name in ("num_batches_tracked", "running_mean", "running_var")]
    momenta = [f"state.momentum_buffer_{at}" for at in (0, 3, 4)]
    assert [target for role, target in roles if role is Role.PARAMETER] == parameters
    assert [target for role, target in roles if role is Role.BUFFER] == [*statistics, *momenta]
    assert [target for role, target in roles if role is Role.INPUT] == ["0", "1", "2"]
    assert [role for role, _ in roles] == sorted((role for role, _ in roles), key=list(Role).index)


def test_placeholders_have_names_that_tell() -> None:
    program, _ = traced(second(Net()), BATCH)
    names = [node.name for node in program.module.graph.find_nodes(op="placeholder")]
    assert names[0] == "parameter_model_first_weight"
    assert names[-1] == "input_2"
    assert names == [p.name for p in program.placeholders]


def test_names_that_would_be_the_same_are_told_apart() -> None:
    model = nn.Sequential()
    model.add_module("a", nn.Sequential())
    model.a.add_module("b_c", nn.Linear(3, 3, bias=False))  # type: ignore[union-attr]
    model.add_module("a_b", nn.Sequential())
    model.a_b.add_module("c", nn.Linear(3, 3, bias=False))  # type: ignore[union-attr]
    program, _ = traced(second(model), BATCH)
    assert len({p.name for p in program.placeholders}) == len(program.placeholders)


def test_ops_are_those_of_an_eager_step_in_its_order() -> None:
    found = targets(traced(second(Net()), BATCH)[0])
    order = ["aten::native_batch_norm", "aten::bernoulli_", "aten::mse_loss", "aten::mse_loss_backward"]
    order += ["aten::native_batch_norm_backward", "aten::mul_", "aten::add_"]
    assert [name for name in dict.fromkeys(found) if name in order and name != "aten::add_"] == order[:-1]
    assert not [name for name in found if "foreach" in name]


def test_a_program_computes_what_the_step_does() -> None:
    ours = second(Net())
    theirs = copy.deepcopy(ours)
    program, tensors = traced(ours, BATCH)
    for seed in range(3):
        with torch.no_grad():
            torch.manual_seed(seed)
            (loss,) = program.module(*tensors)
            torch.manual_seed(seed)
            torch.testing.assert_close(loss, run(theirs, BATCH))
    for mine, other in zip(state(ours).values(), state(theirs).values(), strict=True):
        torch.testing.assert_close(mine, other)


def test_tracing_leaves_everything_as_it_was() -> None:
    step = second(Net())
    before, generator = copy.deepcopy(state(step)), torch.get_rng_state()
    tensors = list(state(step).values())
    traced(step, BATCH)
    assert all(map(torch.equal, state(step).values(), before.values()))
    assert all(mine is earlier for mine, earlier in zip(state(step).values(), tensors, strict=True))
    assert torch.equal(torch.get_rng_state(), generator)
    assert [parameter.grad for parameter in step.model.parameters()] == [None] * 5


def test_what_nobody_needs_is_left_out() -> None:
    program, _ = traced(second(Net()), BATCH)
    unused = [node.name for node in ops(program) if not node.users]
    written = [node.name for node in ops(program) if _writes(node)]
    assert set(unused) <= set(written)
    assert not [name for name in targets(program) if name.endswith("::empty")]


def test_gradients_that_are_one_tensor_get_memory_of_their_own() -> None:
    class Biases(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Parameter(torch.zeros(4, 3)), nn.Parameter(torch.zeros(4, 3))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.first + self.second

    program, _ = traced(second(Biases(), nesterov=True), BATCH)
    # Eager autograd copies one of them as well.
    assert targets(program).count("aten::copy_") == 1


def test_forward_and_backward_alone_return_gradients() -> None:
    step = second(Net())
    program, tensors = traced(step, BATCH, whole=False)
    before = copy.deepcopy(dict(step.model.named_parameters()))
    with torch.no_grad():
        torch.manual_seed(0)
        outputs = program.module(*tensors)
        torch.manual_seed(0)
        loss, gradients = step.differentiate(BATCH)
    assert torch.equal(outputs[0], loss)
    assert [gradient is None for gradient in gradients] == [False, True, True, False, False]
    for ours, theirs in zip(outputs[1:], (g for g in gradients if g is not None), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert all(map(torch.equal, step.model.parameters(), before.values()))


class Chooses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if x.sum() > -1e9 else x


def test_a_refusal_names_the_users_line() -> None:
    with pytest.raises(TraceError) as caught:
        traced(second(Chooses()), BATCH)
    assert "return self.layer(x) if x.sum() > -1e9 else x" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_batch_that_requires_gradients_is_refused() -> None:
    x, y = BATCH
    with pytest.raises(Refused, match="a tensor of the batch requires gradients"):
        traced(second(Net()), (x.clone().requires_grad_(), y))


def test_a_loss_that_knows_the_model_by_another_way_trains_it() -> None:
    model = nn.Linear(3, 3)
    step = step_of(model, torch.optim.SGD(model.parameters()), lambda _, x, y: F.mse_loss(model(x), y))
    program, _ = traced(step, BATCH)
    names = [p.target for p in program.placeholders if p.role is Role.PARAMETER]
    assert names == ["model.weight", "model.bias"]
    assert not program.module.graph.find_nodes(op="get_attr")


class Checkpointed(nn.Module):
    """Computes a part of itself once more in the backward."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 3), nn.Dropout(p), nn.Tanh())
        self.head = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.body, x, use_reentrant=False))  # type: ignore[no-any-return]


@pytest.mark.parametrize(("p", "times"), [(0.0, 2), (0.5, 1)])
def test_what_is_checkpointed_is_computed_once_more_where_it_draws_nothing(p: float, times: int) -> None:
    """Drawn again, random numbers would be others."""
    assert targets(traced(second(Checkpointed(p)), BATCH)[0]).count("aten::tanh") == times


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_below_fusion_it_is_functional_and_copies_what_it_writes_at_the_end(optimizer: Callable[..., Any]) -> None:
    """What Inductor is given: see ``inductor.fuse``. On a CPU dropouts are of another kind than on a GPU."""
    importlib.import_module("torch._inductor.lowering")
    model = Net()

    def calm(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(model.calm(x), y)

    program, tensors = program_of(model, optimizer(model.parameters(), lr=0.1), calm, BATCH)
    functional = inductor._functional(program)
    ours, theirs = ([tensor.detach().clone() for tensor in tensors] for _ in range(2))
    with torch.no_grad():
        torch.manual_seed(0)
        (loss,) = functional(*ours)
        torch.manual_seed(0)
        (expected,) = program.module(*theirs)
    torch.testing.assert_close(loss, expected)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other)
    written = [node for node in functional.graph.nodes if node.op == "call_function" and _writes(node)]
    assert {node.target for node in written} == {torch.ops.aten.copy_.default}
