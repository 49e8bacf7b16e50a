"""Updates of ``torch.optim`` in graphs: the same numbers as an eager step, no value read on the host, and refusals."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import wraps
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from autostream.frontend.decompositions import split_lists
from autostream.frontend.optimizers import (
    TRACED,
    Input,
    Numbers,
    groups_of,
    has_own_zero_grad,
    inputs,
    names,
    obstacle,
    unfit,
    update,
    values,
)
from autostream.runtime.writes import Writes

RULES: dict[str, Callable[..., Optimizer]] = {
    "sgd": lambda p: SGD(p, lr=0.1),
    "sgd, momentum": lambda p: SGD(p, lr=0.1, momentum=0.9, dampening=0.3),
    "sgd, nesterov": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "sgd, maximize": lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, maximize=True),
    "adam": lambda p: Adam(p, lr=0.1),
    "adam, amsgrad": lambda p: Adam(p, lr=0.1, amsgrad=True, weight_decay=0.1, maximize=True),
    "adam, one by one": lambda p: Adam(p, lr=0.1, foreach=False),
    "adam, fused": lambda p: Adam(p, lr=0.1, fused=True),
    "adamw": lambda p: AdamW(p, lr=0.1, weight_decay=0.1, betas=(0.8, 0.9)),
    "rmsprop": lambda p: RMSprop(p, lr=0.1),
    "rmsprop, momentum": lambda p: RMSprop(p, lr=0.1, momentum=0.9, centered=True, weight_decay=0.1),
    "adagrad": lambda p: Adagrad(p, lr=0.1),
    "adagrad, decay": lambda p: Adagrad(p, lr=0.1, lr_decay=0.1, weight_decay=0.1, initial_accumulator_value=0.1),
}


def t(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape)))


def stepped(make: Callable[..., Optimizer], dtype: torch.dtype = torch.float64) -> Optimizer:
    """An optimizer of two groups after its first step; all parameters but the last have gradients."""
    parameters = [torch.nn.Parameter(t(3, 2, dtype=dtype)), torch.nn.Parameter(t(4, dtype=dtype))]
    groups = [{"params": parameters}, {"params": [torch.nn.Parameter(t(5, dtype=dtype))], "lr": 0.01}]
    optimizer = make(groups)
    for parameter in parameters:
        parameter.grad = t(*parameter.shape, dtype=dtype) + 1
    optimizer.step()
    return optimizer


def flat(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


Varying = Callable[[Optimizer], Sequence[str]]


def hyperparameters(optimizer: Optimizer, varying: Sequence[str] = ()) -> tuple[Any, Tensor]:
    """The groups of an optimizer with inputs in them, and the tensor of these inputs."""
    chosen, flat_values = inputs(optimizer, set(varying)), values(optimizer)
    return groups_of(optimizer, chosen), Numbers()([flat_values[at] for at in chosen], torch.device("cpu"))


def update_itself(optimizer: Optimizer, varying: Sequence[str] = ()) -> None:
    """The update of a graph, on the optimizer's own tensors."""
    tensors = [group["params"] for group in optimizer.param_groups]
    update(optimizer, *hyperparameters(optimizer, varying), tensors, dict(optimizer.state))


def copied(optimizer: Optimizer) -> Optimizer:
    """A deep copy, which has the gradients as well."""
    other = copy.deepcopy(optimizer)
    for one, its in zip(flat(optimizer), flat(other), strict=True):
        its.grad = None if one.grad is None else one.grad.clone()
    return other


def assert_same(ours: Optimizer, theirs: Optimizer, tolerance: float) -> None:
    for mine, other in zip(flat(ours), flat(theirs), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=tolerance)
        assert list(ours.state[mine]) == list(theirs.state[other])
        for name, value in theirs.state[other].items():
            torch.testing.assert_close(ours.state[mine][name], value, rtol=0, atol=tolerance)


@pytest.mark.parametrize("varying", [lambda _: (), names], ids=["constants", "inputs"])
@pytest.mark.parametrize("rule", RULES)
def test_an_update_is_that_of_the_optimizer(rule: str, varying: Varying) -> None:
    ours = stepped(RULES[rule])
    theirs = copied(ours)
    for _ in range(20):
        for mine, other in zip(flat(ours), flat(theirs), strict=True):
            mine.grad = None if other.grad is None else other.grad.clone()  # rules may write to it
        update_itself(ours, varying(ours))
        theirs.step()
    assert_same(ours, theirs, 1e-12)
    assert not torch.compiler.is_compiling()


def test_small_numbers_and_tensors_among_hyperparameters_are_exact() -> None:
    """With ``1 - 0.999 ** 2`` in float32, the first updates would have a relative error of 1e-5."""
    ours = stepped(lambda p: Adam(p, lr=1.0, betas=(0.9, 0.9999)))
    theirs = copied(ours)
    assert ours.state[flat(ours)[0]]["step"].dtype is torch.float32
    for group in ours.param_groups[:1]:
        group["betas"] = tuple(torch.tensor(beta, dtype=torch.float64) for beta in group["betas"])
    update_itself(ours)
    theirs.step()
    assert_same(ours, theirs, 1e-12)


@pytest.mark.parametrize(
    ("rule", "varying"),
    [*((rule, names) for rule in RULES), ("sgd, nesterov", lambda _: ()), ("adam, one by one", lambda _: ())],
)
def test_a_graph_reads_no_value_on_the_host_and_updates_each_weight_independently(rule: str, varying: Varying) -> None:
    optimizer = stepped(RULES[rule], torch.float32)
    groups, numbers = hyperparameters(optimizer, varying(optimizer))
    first, second = flat(optimizer)[:2]
    keys = [(at, name) for at, p in enumerate((first, second)) for name in optimizer.state.get(p, {})]

    def run(first_gradient: Tensor, second_gradient: Tensor, *tensors: Tensor) -> None:
        state: dict[Tensor, dict[str, Tensor]] = {}
        parameters = [tensors[0], tensors[1]]
        for (at, name), value in zip(keys, tensors[3:], strict=True):
            state.setdefault(parameters[at], {})[name] = value
        parameters[0].grad, parameters[1].grad = first_gradient, second_gradient
        update(optimizer, groups, tensors[2], [parameters, []], state)

    state = [value for p in (first, second) for value in optimizer.state.get(p, {}).values()]
    assert first.grad is not None
    assert second.grad is not None
    mode = FakeTensorMode()
    tensors = [first.grad, second.grad, first.detach(), second.detach(), numbers, *state]
    graph = make_fx(run, dict(split_lists()))(*(mode.from_tensor(value) for value in tensors)).graph
    targets = {str(node.target) for node in graph.nodes if node.op == "call_function"}
    assert not [name for name in targets if "_foreach_" in name or "item" in name or "_local_scalar" in name]
    one, other, *_ = graph.find_nodes(op="placeholder")
    assert not _users(one) & _users(other)


def _users(node: torch.fx.Node) -> set[torch.fx.Node]:
    """All nodes that depend on a node."""
    users, pending = set(), list(node.users)
    while pending:
        user = pending.pop()
        if user not in users:
            users.add(user)
            pending += user.users
    return users


# Hyperparameters that are inputs


def test_the_tensor_of_inputs_stays_and_is_written_when_a_number_changes() -> None:
    """The user may write to a hyperparameter that is a tensor, so that is read each time."""
    numbers, cpu, rate = Numbers(), torch.device("cpu"), torch.tensor(0.1)
    first = numbers([1.0, 0.1], cpu)
    assert (first.tolist(), first.dtype) == ([1.0, 0.1], torch.float64)
    assert numbers([1.0, 0.1], cpu) is first
    assert numbers([1.0, 0.2], cpu).tolist() == first.tolist() == [1.0, 0.2]
    numbers([rate, 0.2], cpu)
    rate.fill_(0.5)
    assert numbers([rate, 0.2], cpu).tolist() == [0.5, 0.2]


def test_rates_tensors_and_positive_numbers_that_vary_are_inputs() -> None:
    groups = [{"params": [torch.ones(1)]}, {"params": [torch.ones(1)], "lr": 0.2, "betas": (0.0, 0.99)}]
    optimizer = Adam(groups, lr=0.1, betas=(0.9, 0.999), weight_decay=0.3, capturable=True)
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)  # adds an entry to groups, which is no hyperparameter
    optimizer.param_groups[1]["eps"] = eps = torch.tensor(1e-3)
    assert "initial_lr" in optimizer.param_groups[0]
    chosen = inputs(optimizer, {"betas[0]"})
    assert [(names(optimizer)[at], values(optimizer)[at], item.positive) for at, item in chosen.items()] == [
        *(("lr", 0.1, False), ("betas[0]", 0.9, True)),
        *(("lr", 0.2, False), ("eps", eps, False)),
    ]
    first, second = groups_of(optimizer, chosen)
    assert (first["lr"], first["betas"], first["weight_decay"]) == (Input(False), (Input(True), 0.999), 0.3)
    assert (second["betas"], second["eps"]) == ((0.0, 0.99), Input(False))
    assert set(first) == set(optimizer.defaults)


def test_a_rate_has_to_be_a_number_or_a_tensor() -> None:
    optimizer = SGD([torch.ones(1)], momentum=0.5)
    for rate in (np.array(0.1), Fraction(1, 10), "0.1"):
        optimizer.param_groups[0]["lr"] = rate
        message = f"lr of SGD is a {type(rate).__name__}, and a graph takes numbers and tensors"
        assert unfit(optimizer, inputs(optimizer)) == message
        assert unfit(optimizer, {}) == ""
    for number in (0.1, 1, np.float32(0.1), np.float64(0.1), torch.tensor(0.1), torch.ones(1)):
        optimizer.param_groups[0]["lr"] = number
        assert unfit(optimizer, inputs(optimizer, {"momentum"})) == ""


# Optimizers that cannot be part of a graph


class Subclass(SGD):
    """May do anything."""


class Clearing(SGD):
    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)


def test_known_optimizers_are_accepted_and_others_refused() -> None:
    weights = [torch.ones(1)]
    for kind in TRACED:
        optimizer = kind(weights)  # type: ignore[call-arg]
        torch.optim.lr_scheduler.ConstantLR(optimizer)  # gives it a step of its own, which only counts
        assert (obstacle(optimizer), has_own_zero_grad(optimizer)) == ("", False)
    others: list[Any] = [torch.optim.NAdam, torch.optim.LBFGS, Subclass]
    for other in others:
        assert "is none of SGD, Adam, AdamW, RMSprop, Adagrad" in obstacle(other(weights))
    assert has_own_zero_grad(Clearing(weights))


def test_changed_optimizers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    changes: dict[str, Callable[[Any], object]] = {
        "hooks on its step": lambda optimizer: optimizer.register_step_post_hook(lambda *_: None),
        "a step of its own": lambda optimizer: setattr(optimizer, "step", lambda: None),
        "a zero_grad of its own": lambda optimizer: setattr(optimizer, "zero_grad", lambda: None),
        "is differentiable": lambda optimizer: optimizer.param_groups[0].update(differentiable=True),
        "is capturable, which parameters on a CPU are not": lambda o: o.param_groups[0].update(capturable=True),
    }
    for reason, change in changes.items():
        optimizer = SGD([torch.ones(1)])
        change(optimizer)
        assert reason in obstacle(optimizer)
    with FakeTensorMode():
        assert obstacle(Adam([torch.ones(1, device="cuda")], capturable=True)) == ""
    for kind, name, reason in (
        (SGD, "step", "SGD.step is not PyTorch's own"),
        (Optimizer, "zero_grad", "SGD has a zero_grad of its own"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(kind, name, wraps(getattr(kind, name))(lambda *args: None))
            assert obstacle(SGD([torch.ones(1)])) == reason


def test_hooks_on_all_optimizers_are_refused_except_autostreams() -> None:
    optimizer = SGD([torch.ones(1)])
    Writes([torch.ones(1)])  # registers one
    assert obstacle(optimizer) == ""
    for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook):
        handle = register(lambda *_: None)
        assert obstacle(optimizer) == "there are hooks on the steps of all optimizers, which a graph would not call"
        handle.remove()
