"""Random training steps, as one graph and as written: losses, backwards, clipping, updates, averages in any order."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

import autostream

OPTIMIZERS: Sequence[Callable[..., Optimizer]] = (
    lambda parameters: SGD(parameters, lr=0.05, momentum=0.9),
    lambda parameters: Adam(parameters, lr=0.01, amsgrad=True),
    lambda parameters: AdamW(parameters, lr=0.01),
    lambda parameters: RMSprop(parameters, lr=0.01),
    lambda parameters: Adagrad(parameters, lr=0.05),
)

HEADS = 3
ON_GRADIENTS = ("zero_grad", "zero_grad in place", "clip", "clip by value", "penalize")


@dataclass(frozen=True)
class Loss:
    """A loss of some heads behind a shared trunk.

    Attributes:
        heads: which.
        detached: whether nothing behind the trunk's output is trained.
        taught: whether the outputs follow those of the average, as a target network.
        by: how its gradients are computed.
        parts: of the batch, whose gradients add up.
    """

    heads: tuple[int, ...]
    detached: bool
    taught: bool
    by: str
    parts: int


@dataclass(frozen=True)
class Program:
    """A step.

    Attributes:
        optimizers: the kind of each.
        owners: the optimizer of the trunk, then of each head.
        actions: what the step does: a loss, or what with which optimizer.
        delayed: the action that runs in every second call only, by a counter of the step; ``None`` if all run in each.
        clears: whether all gradients are cleared where it begins, or where it ends.
        activation: between trunk and heads.
    """

    optimizers: tuple[int, ...]
    owners: tuple[int, ...]
    actions: tuple[Loss | tuple[str, int], ...]
    delayed: int | None
    clears: str
    activation: str


@st.composite
def programs(draw: st.DrawFn) -> Program:
    kinds = draw(st.lists(st.integers(0, len(OPTIMIZERS) - 1), min_size=1, max_size=3))
    owner = st.integers(0, len(kinds) - 1)
    losses = st.builds(
        Loss,
        st.lists(st.integers(0, HEADS - 1), min_size=1, max_size=HEADS, unique=True).map(tuple),
        st.booleans(),
        st.booleans(),
        st.sampled_from(["backward", "autograd.grad", "backward of two"]),
        st.integers(1, 3),
    )
    others = st.tuples(st.sampled_from(["step", "step", "average", *ON_GRADIENTS]), owner)
    later = st.lists(st.one_of(losses, others), min_size=1, max_size=6)
    actions = [draw(losses), *draw(later.filter(lambda actions: sum(isinstance(each, Loss) for each in actions) < 4))]
    return Program(
        tuple(kinds),
        tuple(draw(st.lists(owner, min_size=HEADS + 1, max_size=HEADS + 1))),
        (*actions, ("step", draw(owner))),
        draw(st.none() | st.integers(0, len(actions))),
        draw(st.sampled_from(["first", "last"])),
        draw(st.sampled_from(["relu_", "norm", "dropout"])),
    )


def made(program: Program) -> tuple[Callable[..., Any], list[Optimizer], nn.Module]:
    """The step, its optimizers, and all modules."""
    torch.manual_seed(0)
    between = {"relu_": nn.ReLU(inplace=True), "norm": nn.BatchNorm1d(4), "dropout": nn.Dropout(0.3)}
    # The gradient of a bias before a norm is rounding alone, which optimizers like RMSprop scale up.
    trunk = nn.Sequential(nn.Linear(3, 4, bias=program.activation != "norm"), between[program.activation])
    heads = nn.ModuleList(nn.Linear(4, 2) for _ in range(HEADS))
    modules = nn.ModuleList([trunk, heads]).double()
    average = copy.deepcopy(modules).requires_grad_(False)
    owned: list[list[Tensor]] = [[] for _ in program.optimizers]
    for part, owner in zip((trunk, *heads), program.owners, strict=True):
        owned[owner] += part.parameters()
    spare = nn.Parameter(torch.ones(2, dtype=torch.double))
    for parameters in owned:
        parameters.append(spare) if parameters is owned[0] else None
    optimizers = [
        OPTIMIZERS[kind](parameters or [nn.Parameter(torch.zeros(1, dtype=torch.double))])
        for kind, parameters in zip(program.optimizers, owned, strict=True)
    ]
    every = [parameter for parameters in owned for parameter in parameters]

    def differentiate(loss: Loss, x: Tensor) -> Tensor:
        total = x.new_zeros(())
        for part in x.chunk(loss.parts):
            hidden = trunk(part)
            if loss.detached:
                hidden = hidden.detach()
            with torch.no_grad():
                goals = [average[1][head](average[0](part)) if loss.taught else 0.0 for head in loss.heads]
            outputs = zip(loss.heads, goals, strict=True)
            values = [(heads[head](hidden) - goal).square().mean() / loss.parts for head, goal in outputs]
            value = torch.stack(values).sum()
            if loss.by == "autograd.grad":
                for parameter, gradient in zip(
                    every, torch.autograd.grad(value, every, allow_unused=True), strict=True
                ):
                    if gradient is not None:
                        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
            elif loss.by == "backward of two":
                (0.5 * value).backward(retain_graph=True)
                (0.5 * value).backward()
            else:
                value.backward()  # type: ignore[no-untyped-call]
            total = total + value.detach()
        return total

    calls = 0

    def update(x: Tensor) -> list[Tensor]:
        nonlocal calls
        calls += 1
        results = []
        if program.clears == "first":
            for optimizer in optimizers:
                optimizer.zero_grad()
        for at, action in enumerate(program.actions):
            if at == program.delayed and calls % 2:
                continue
            if isinstance(action, Loss):
                results.append(differentiate(action, x))
                continue
            what, index = action
            if what == "step":
                optimizers[index].step()
            elif what == "zero_grad":
                optimizers[index].zero_grad()
            elif what == "zero_grad in place":
                optimizers[index].zero_grad(set_to_none=False)
            elif what == "clip by value":
                if any(parameter.grad is not None for parameter in owned[index]):  # else PyTorch raises
                    nn.utils.clip_grad_value_(owned[index], 0.05)
            elif what == "clip":
                nn.utils.clip_grad_norm_(owned[index], 0.1)
            elif what == "penalize":
                for parameter in owned[index]:
                    if parameter.grad is not None:
                        parameter.grad.add_(parameter.detach(), alpha=0.01)
            else:
                with torch.no_grad():
                    for kept, now in zip(average.parameters(), modules.parameters(), strict=True):
                        kept.lerp_(now, 0.1)
        if program.clears == "last":
            for optimizer in optimizers:
                optimizer.zero_grad()
        return results

    return update, optimizers, nn.ModuleList([modules, average])


def after(program: Program, wrap: Callable[[Any, list[Optimizer]], Any]) -> list[Tensor | None]:
    """Results, weights, buffers, gradients, optimizer states and the random state after some steps."""
    update, optimizers, modules = made(program)
    step, seen = wrap(update, optimizers), list[Tensor | None]()
    torch.manual_seed(1)
    for _ in range(5):
        seen += [result.detach().clone() for result in step(torch.randn(4, 3, dtype=torch.double))]
        seen += [None if each.grad is None else each.grad.clone() for each in modules.parameters()]
    states = [value for each in optimizers for state in each.state.values() for value in state.values()]
    return [*seen, *modules.parameters(), *modules.buffers(), *filter(torch.is_tensor, states), torch.get_rng_state()]


@settings(max_examples=8)
@given(programs())
def test_a_random_step_is_the_eager_one(program: Program) -> None:
    steps: list[Any] = []

    def scheduled(update: Any, optimizers: list[Optimizer]) -> Any:
        steps.append(autostream.step(optimizers=optimizers, kernels="eager", policy="critical_path")(update))
        return steps[0]

    eager, ours = after(program, lambda update, _: update), after(program, scheduled)
    assert [each is None for each in ours] == [each is None for each in eager]
    pairs = [(one, other) for one, other in zip(ours, eager, strict=True) if one is not None and other is not None]
    for one, other in pairs:
        torch.testing.assert_close(one.detach().double(), other.detach().double(), rtol=0, atol=1e-8)
    assert "plain" not in {report.mode for report in steps[0].reports}
