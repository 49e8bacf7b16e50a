"""Programs of training steps: their placeholders and their ops."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from autostream.dispatch.steps import Step
from autostream.ir import Program, Role
from tests.steps import run, step_of, traced


class Net(nn.Module):
    """A tied weight, a norm with weights, an in-place op, a dropout, and an unused layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(3, 3, bias=False) for _ in range(2))
        self.unused = nn.Linear(2, 2)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.norm(self.second(self.first(x))).relu_(), 0.5)


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


BATCH = (torch.randn(4, 3), torch.randn(4, 3))


def second(model: nn.Module) -> Step:
    """A step of SGD with momentum that has its state."""
    step = step_of(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), loss_fn)
    run(step, BATCH)
    return step


def targets(program: Program) -> list[str]:
    return [node.target._schema.name for node in ops(program)]  # type: ignore[union-attr]


def ops(program: Program) -> list[fx.Node]:
    return [node for node in program.module.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def test_placeholders_and_ops_of_a_step() -> None:
    """Ops are those of an eager step in its order, without dead code, and keep the user's lines."""
    program, _ = traced(second(Net()), BATCH)
    roles = [(p.role, p.target) for p in program.placeholders]
    parameters = ["model.first.weight", "model.norm.weight", "model.norm.bias"]
    statistics = [f"model.norm.{name}" for name in ("num_batches_tracked", "running_mean", "running_var")]
    momenta = [f"optimizer_0.momentum_buffer_{at}" for at in (0, 3, 4)]
    assert roles == [
        *((Role.PARAMETER, name) for name in parameters),
        *((Role.BUFFER, name) for name in (*statistics, *momenta, "optimizer_0.hyperparameters")),
        *((Role.INPUT, name) for name in ("5", "9")),
    ]
    names = [node.name for node in program.module.graph.find_nodes(op="placeholder")]
    assert (names[0], names[-1]) == ("parameter_model_first_weight", "input_9")
    assert names == [p.name for p in program.placeholders]
    order = ["aten::native_batch_norm", "aten::bernoulli_", "aten::mse_loss", "aten::mse_loss_backward"]
    order += ["aten::native_batch_norm_backward", "aten::mul_"]
    assert [name for name in dict.fromkeys(targets(program)) if name in order] == order
    assert not [name for name in targets(program) if "foreach" in name or name.endswith("::empty")]
    assert {node.name for node in ops(program) if not node.users} <= {n.name for n in ops(program) if _writes(n)}
    for op in ("mse_loss", "mse_loss_backward"):
        (node,) = program.module.graph.find_nodes(op="call_function", target=getattr(torch.ops.aten, op).default)
        assert "return F.mse_loss(model(x), y)" in node.meta["stack_trace"]


def test_names_that_would_collide_are_distinct() -> None:
    model = nn.Sequential()
    for path, name in (("a", "b_c"), ("a_b", "c")):
        model.add_module(path, nn.Sequential())
        model.get_submodule(path).add_module(name, nn.Linear(3, 3, bias=False))
    program, _ = traced(second(model), BATCH)
    assert len({p.name for p in program.placeholders}) == len(program.placeholders)


def test_a_loss_that_refers_to_the_model_itself_trains_it() -> None:
    model = nn.Linear(3, 3)
    step = step_of(model, torch.optim.SGD(model.parameters()), lambda _, x, y: F.mse_loss(model(x), y))
    program, _ = traced(step, BATCH)
    names = [p.target for p in program.placeholders if p.role is Role.PARAMETER]
    assert names == ["model.weight", "model.bias"]
    assert not program.module.graph.find_nodes(op="get_attr")


class Checkpointed(nn.Module):
    """Has a checkpoint, which is recomputed in the backward."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 3), nn.Dropout(p), nn.Tanh())
        self.head = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.body, x, use_reentrant=False))  # type: ignore[no-any-return]


@pytest.mark.parametrize(("p", "times"), [(0.0, 2), (0.5, 1)])
def test_checkpoints_are_recomputed_unless_they_have_random_ops(p: float, times: int) -> None:
    assert targets(traced(second(Checkpointed(p)), BATCH)[0]).count("aten::tanh") == times
