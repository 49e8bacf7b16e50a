"""Programs of training steps: what is in them, in which order, and what becomes of them below fusion."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from autostream.errors import TraceError
from autostream.ir import Program, Role
from autostream.tracing import constants, inductor, train_step
from autostream.tracing.below_autograd import state_of
from autostream.tracing.export import Traced
from autostream.tracing.functions import module_of
from autostream.tracing.steps import Backward, TrainingStep
from autostream.tracing.train_step import trace_step
from autostream.frontend.tree import flatten


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


def step_of(model: nn.Module, kind: type[Backward] = TrainingStep, **rates: float) -> Backward:
    """A step of SGD with momentum that has its state."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **{"momentum": 0.9, **rates})
    step = kind(model, module_of(loss_fn), optimizer)
    with torch.no_grad():
        step.complete(step(*step.arguments(BATCH)))
    step.arguments(BATCH)
    return step


def traced(step: Backward, batch: Any = BATCH) -> tuple[Traced, list[Tensor]]:
    """The step's program, and the tensors that it takes."""
    with torch.no_grad():
        tensors, structure = flatten((step.arguments(batch), {}))
        result = trace_step(step, tensors, structure)
    return result, arguments(result.program, step, tensors)


def arguments(program: Program, step: nn.Module, tensors: Sequence[Tensor]) -> list[Tensor]:
    state = state_of(step)
    return [tensors[int(p.target)] if p.role is Role.INPUT else state[p.target] for p in program.placeholders]


def targets(program: Program) -> list[str]:
    return [node.target._schema.name for node in ops(program)]  # type: ignore[union-attr]


def ops(program: Program) -> list[fx.Node]:
    return [node for node in program.module.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def test_where_steps_ask_what_a_tensor_is_to_autograd_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere it would be the model that asks; and no place is among them without need."""

    class Asking(set[str]):
        def __contains__(self, module: object) -> bool:
            self.add(str(module))
            return True

    known, asking = constants._STEPS, Asking()
    monkeypatch.setattr(constants, "_STEPS", asking)
    for kind in (Backward, TrainingStep):
        traced(step_of(Net(), kind))
    assert set(asking) == known


def test_placeholders_are_weights_then_buffers_then_the_optimizers_state_then_inputs_and_the_rate() -> None:
    result, _ = traced(step_of(Net()))
    roles = [(p.role, p.target) for p in result.program.placeholders]
    parameters = ["model.first.weight", "model.norm.weight", "model.norm.bias"]
    statistics = [f"model.norm.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")]
    state = [f"state.momentum_buffer_{at}" for at in (0, 3, 4)]
    assert [target for role, target in roles if role is Role.PARAMETER] == parameters
    assert [target for role, target in roles if role is Role.BUFFER] == [*statistics, *state]
    assert [target for role, target in roles if role is Role.INPUT] == ["0", "1", "2"]
    assert [role for role, _ in roles] == sorted((role for role, _ in roles), key=list(Role).index)


def test_placeholders_have_names_that_tell() -> None:
    names = [node.name for node in traced(step_of(Net()))[0].program.module.graph.find_nodes(op="placeholder")]
    assert names[0] == "parameter_model_first_weight"
    assert names[-1] == "input_2"
    assert names == [p.name for p in traced(step_of(Net()))[0].program.placeholders]


def test_names_that_would_be_the_same_are_told_apart() -> None:
    model = nn.Sequential()
    model.add_module("a", nn.Sequential())
    model.a.add_module("b_c", nn.Linear(3, 3, bias=False))  # type: ignore[union-attr]
    model.add_module("a_b", nn.Sequential())
    model.a_b.add_module("c", nn.Linear(3, 3, bias=False))  # type: ignore[union-attr]
    program = traced(step_of(model))[0].program
    assert len({p.name for p in program.placeholders}) == len(program.placeholders)


def test_ops_are_those_of_an_eager_step_in_its_order() -> None:
    found = targets(traced(step_of(Net()))[0].program)
    order = ["aten::native_batch_norm", "aten::bernoulli_", "aten::mse_loss", "aten::mse_loss_backward"]
    order += ["aten::native_batch_norm_backward", "aten::mul_", "aten::add_"]
    assert [name for name in dict.fromkeys(found) if name in order and name != "aten::add_"] == order[:-1]
    assert not [name for name in found if "foreach" in name]


def test_a_program_computes_what_the_step_does() -> None:
    ours = step_of(Net())
    theirs = copy.deepcopy(ours)
    result, tensors = traced(ours)
    for seed in range(3):
        with torch.no_grad():
            torch.manual_seed(seed)
            (loss,) = result.program.module(*tensors)
            torch.manual_seed(seed)
            torch.testing.assert_close(loss, theirs(*theirs.arguments(BATCH)))
    for mine, other in zip(state_of(ours).values(), state_of(theirs).values(), strict=True):
        torch.testing.assert_close(mine, other)


def test_tracing_leaves_everything_as_it_was() -> None:
    step = step_of(Net())
    before, generator = copy.deepcopy(state_of(step)), torch.get_rng_state()
    tensors = list(state_of(step).values())
    traced(step)
    assert all(map(torch.equal, state_of(step).values(), before.values()))
    assert all(mine is earlier for mine, earlier in zip(state_of(step).values(), tensors, strict=True))
    assert torch.equal(torch.get_rng_state(), generator)
    assert [parameter.grad for parameter in step.parameters()] == [None] * 5


def test_what_nobody_needs_is_left_out() -> None:
    program = traced(step_of(Net()))[0].program
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

    program = traced(step_of(Biases(), nesterov=True))[0].program
    # Eager autograd copies one of them as well.
    assert targets(program).count("aten::copy_") == 1


def test_forward_and_backward_alone_return_gradients() -> None:
    step = step_of(Net(), Backward)
    result, tensors = traced(step)
    before = copy.deepcopy(dict(step.model.named_parameters()))
    with torch.no_grad():
        torch.manual_seed(0)
        outputs = result.program.module(*tensors)
    torch.manual_seed(0)
    with torch.no_grad():
        loss, gradients = step(*step.arguments(BATCH))
    assert torch.equal(outputs[0], loss)
    assert [gradient is None for gradient in gradients] == [False, True, True, False, False]
    for ours, theirs in zip(outputs[1:], (g for g in gradients if g is not None), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert all(map(torch.equal, step.model.parameters(), before.values()))


def refusal(model: nn.Module, batch: Any = BATCH) -> str:
    with pytest.raises(TraceError) as caught:
        traced(step_of(model), batch)
    return str(caught.value)


class Chooses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if x.sum() > -1e9 else x


def test_a_refusal_names_the_step_and_the_users_line() -> None:
    reason = refusal(Chooses())
    assert reason.startswith("make_fx cannot trace Chooses, TrainingStep: ")
    assert "return self.layer(x) if x.sum() > -1e9 else x" in reason
    assert "\n" not in reason


def test_a_batch_that_requires_gradients_is_refused() -> None:
    x, y = BATCH
    assert "a tensor of the batch requires gradients" in refusal(Net(), (x.clone().requires_grad_(), y))


class Unforked(nn.Module):
    """Draws the same numbers twice, as checkpointing does."""

    def __init__(self, draws: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.p = 0.5 if draws else 0.0

    def forward(self, x: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            x = F.dropout(x, self.p)
        return self.layer(x)


def test_random_numbers_from_a_state_that_is_put_back_are_refused() -> None:
    assert "set_rng_state" in refusal(Unforked(True))
    traced(step_of(Unforked(False)))


def test_a_loss_that_knows_the_model_by_another_way_trains_it() -> None:
    model = nn.Linear(3, 3)
    step = TrainingStep(model, module_of(lambda _, x, y: F.mse_loss(model(x), y)), torch.optim.SGD(model.parameters()))
    result, _ = traced(step)
    names = [p.target for p in result.program.placeholders if p.role is Role.PARAMETER]
    assert names == ["model.weight", "model.bias"]
    assert not result.program.module.graph.find_nodes(op="get_attr")


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_below_fusion_it_is_functional_and_copies_what_it_writes_at_the_end(optimizer: Callable[..., Any]) -> None:
    """What Inductor is given: see ``inductor.fuse``. On a CPU dropouts are of another kind than on a GPU."""
    importlib.import_module("torch._inductor.lowering")
    model: Any = Net()
    model.forward = model.calm
    step = TrainingStep(model, module_of(loss_fn), optimizer(model.parameters(), lr=0.1))
    with torch.no_grad():
        step(*step.arguments(BATCH))
    result, tensors = traced(step)
    functional = inductor._functional(result.program)
    ours, theirs = ([tensor.detach().clone() for tensor in tensors] for _ in range(2))
    with torch.no_grad():
        torch.manual_seed(0)
        (loss,) = functional(*ours)
        torch.manual_seed(0)
        (expected,) = result.program.module(*theirs)
    torch.testing.assert_close(loss, expected)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other)
    written = [node for node in functional.graph.nodes if node.op == "call_function" and _writes(node)]
    assert {node.target for node in written} == {torch.ops.aten.copy_.default}


def test_a_step_over_several_devices_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    made = train_step.program_of
    monkeypatch.setattr(train_step, "program_of", lambda *given: replace(made(*given), peers=("cuda:1",)))
    step = step_of(nn.Linear(3, 3))
    with pytest.raises(TraceError, match=r"several devices \(cpu, cuda:1\)"):
        trace_step(step, *flatten((step.arguments(BATCH), {})))
