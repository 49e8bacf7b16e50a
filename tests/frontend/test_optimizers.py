"""Update rules of ``torch.optim`` on other tensors: they do what the optimizer does, and ask the host nothing."""

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

from autostream.errors import TraceError
from autostream.frontend.optimizers import (
    TRACED,
    Input,
    Numbers,
    clears_itself,
    groups_of,
    inputs,
    lists_apart,
    names,
    obstacle,
    unfit,
    update,
    values,
)
from autostream.runtime.addresses import Writes

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
    """An optimizer of two groups that has made its state, whose parameters have gradients but for the last."""
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


def given(optimizer: Optimizer, varying: Sequence[str] = ()) -> tuple[Any, Tensor]:
    """What to update an optimizer's tensors with, as it is."""
    chosen, found = inputs(optimizer, set(varying)), values(optimizer)
    return groups_of(optimizer, chosen), Numbers()([found[at] for at in chosen], torch.device("cpu"))


def update_itself(optimizer: Optimizer, varying: Sequence[str] = ()) -> None:
    """Let an optimizer step on its own tensors by way of a twin."""
    tensors = [group["params"] for group in optimizer.param_groups]
    update(optimizer, *given(optimizer, varying), tensors, dict(optimizer.state))


def assert_same(ours: Optimizer, theirs: Optimizer, tolerance: float) -> None:
    for mine, other in zip(flat(ours), flat(theirs), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=tolerance)
        assert list(ours.state[mine]) == list(theirs.state[other])
        for name, value in theirs.state[other].items():
            torch.testing.assert_close(ours.state[mine][name], value, rtol=0, atol=tolerance)


VARYING = pytest.mark.parametrize("varying", [lambda _: (), names], ids=["constants", "inputs"])


@VARYING
@pytest.mark.parametrize("rule", RULES)
def test_a_rule_does_what_the_optimizer_does(rule: str, varying: Varying) -> None:
    ours = stepped(RULES[rule])
    theirs = copy.deepcopy(ours)
    for mine, other in zip(flat(ours), flat(theirs), strict=True):
        other.grad = None if mine.grad is None else mine.grad.clone()
    for _ in range(20):
        gradients = [None if other.grad is None else other.grad.clone() for other in flat(theirs)]
        for mine, gradient in zip(flat(ours), gradients, strict=True):
            mine.grad = gradient  # of our own: rules may write to it
        update_itself(ours, varying(ours))
        theirs.step()
    assert_same(ours, theirs, 1e-12)


def test_steps_are_counted_in_float64_though_they_are_kept_in_float32() -> None:
    """With ``1 - 0.999 ** 2`` in float32, the first updates would be off by 1e-5 of themselves."""
    ours = stepped(lambda p: Adam(p, lr=1.0, betas=(0.9, 0.9999)))
    theirs = copy.deepcopy(ours)
    for mine, other in zip(flat(ours), flat(theirs), strict=True):
        other.grad = None if mine.grad is None else mine.grad.clone()
    assert ours.state[flat(ours)[0]]["step"].dtype is torch.float32
    update_itself(ours)
    theirs.step()
    assert_same(ours, theirs, 1e-12)


@VARYING
@pytest.mark.parametrize("rule", RULES)
def test_a_graph_of_a_rule_asks_the_host_nothing_and_updates_each_weight_for_itself(
    rule: str, varying: Varying
) -> None:
    optimizer = stepped(RULES[rule], torch.float32)
    groups, numbers = given(optimizer, varying(optimizer))
    first, second = flat(optimizer)[:2]

    def run(first_gradient: Tensor, second_gradient: Tensor, *state: Tensor) -> None:
        keys = [(at, name) for at, p in enumerate((first, second)) for name in optimizer.state.get(p, {})]
        held: dict[Tensor, dict[str, Tensor]] = {}
        stand_ins = [state[0], state[1]]
        for (at, name), value in zip(keys, state[3:], strict=True):
            held.setdefault(stand_ins[at], {})[name] = value
        stand_ins[0].grad, stand_ins[1].grad = first_gradient, second_gradient
        update(optimizer, groups, state[2], [stand_ins, []], held)

    held = [value for p in (first, second) for value in optimizer.state.get(p, {}).values()]
    assert first.grad is not None
    assert second.grad is not None
    mode = FakeTensorMode()
    tensors = [first.grad, second.grad, first.detach(), second.detach(), numbers, *held]
    graph = make_fx(run, dict(lists_apart()))(*(mode.from_tensor(value) for value in tensors)).graph
    targets = {str(node.target) for node in graph.nodes if node.op == "call_function"}
    assert not [name for name in targets if "_foreach_" in name or "item" in name or "_local_scalar" in name]
    one, other, *_ = graph.find_nodes(op="placeholder")
    assert not _reached(one) & _reached(other)


def _reached(node: torch.fx.Node) -> set[torch.fx.Node]:
    found, pending = set(), list(node.users)
    while pending:
        user = pending.pop()
        if user not in found:
            found.add(user)
            pending += user.users
    return found


def test_an_optimizer_stays_as_it_is() -> None:
    optimizer = stepped(RULES["adam"])
    before = copy.deepcopy(optimizer.state_dict())
    others = [tensor.detach().clone().requires_grad_() for tensor in flat(optimizer)]
    others[0].grad = torch.ones_like(others[0])
    state = {others[0]: {name: value.clone() for name, value in optimizer.state[flat(optimizer)[0]].items()}}
    update(optimizer, *given(optimizer), [others[:2], others[2:]], state)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for at, its in before["state"].items():
        for name, value in its.items():
            assert torch.equal(after["state"][at][name], value)
    assert state[others[0]]["step"] == 2


@pytest.mark.parametrize("rule", ["sgd, momentum", "adam", "rmsprop"])
def test_a_parameter_without_state_is_refused(rule: str) -> None:
    optimizer = stepped(RULES[rule])
    flat(optimizer)[2].grad = t(5)
    with pytest.raises(TraceError, match="makes its state in the first step of each parameter"):
        update_itself(optimizer)


# Hyperparameters that are inputs


def test_numbers_are_a_tensor_that_stays_while_they_do() -> None:
    numbers, cpu = Numbers(), torch.device("cpu")
    first = numbers([1.0, 0.1], cpu)
    assert (first.tolist(), first.dtype) == ([1.0, 0.1], torch.float64)
    assert numbers([1.0, 0.1], cpu) is first
    assert numbers([1.0, 0.2], cpu).tolist() == [1.0, 0.2]
    assert first.tolist() == [1.0, 0.1], "the last ones may still be on their way to the device"


def test_one_that_is_a_tensor_is_read_each_time() -> None:
    rate = torch.tensor(0.1)
    numbers, cpu = Numbers(), torch.device("cpu")
    numbers([rate, 0.2], cpu)
    rate.fill_(0.5)
    assert numbers([rate, 0.2], cpu).tolist() == [0.5, 0.2]


def test_rates_tensors_and_what_varies_and_is_above_zero_are_inputs() -> None:
    groups = [{"params": [torch.ones(1)]}, {"params": [torch.ones(1)], "lr": 0.2, "betas": (0.0, 0.99)}]
    optimizer = Adam(groups, lr=0.1, betas=(0.9, 0.999), weight_decay=0.3, capturable=True)
    optimizer.param_groups[1]["eps"] = eps = torch.tensor(1e-3)
    found = inputs(optimizer, {"betas[0]"})
    assert [(names(optimizer)[at], values(optimizer)[at], own.positive) for at, own in found.items()] == [
        *(("lr", 0.1, False), ("betas[0]", 0.9, True)),
        *(("lr", 0.2, False), ("eps", eps, False)),
    ]
    first, second = groups_of(optimizer, found)
    assert (first["lr"], first["betas"], first["weight_decay"]) == (Input(False), (Input(True), 0.999), 0.3)
    assert (second["betas"], second["eps"]) == ((0.0, 0.99), Input(False))


def test_betas_that_are_tensors_can_be_part_of_a_graph() -> None:
    ours = stepped(RULES["adamw"])
    theirs = copy.deepcopy(ours)
    for mine, other in zip(flat(ours), flat(theirs), strict=True):
        other.grad = None if mine.grad is None else mine.grad.clone()
    for group in ours.param_groups:
        group["betas"] = tuple(torch.tensor(beta, dtype=torch.float64) for beta in group["betas"])
    update_itself(ours)
    theirs.step()
    assert_same(ours, theirs, 1e-12)


def test_what_schedulers_keep_in_a_group_is_no_hyperparameter() -> None:
    optimizer = stepped(RULES["sgd"])
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    assert "initial_lr" in optimizer.param_groups[0]
    assert set(names(optimizer)) == set(optimizer.defaults)
    assert set(groups_of(optimizer, {})[0]) == set(optimizer.defaults)


# What cannot be part of a graph


class Mine(SGD):
    """May do anything."""


def with_hook(optimizer: Optimizer) -> None:
    optimizer.register_step_post_hook(lambda *_: None)


def with_own_step(optimizer: Any) -> None:
    optimizer.step = lambda: None


def with_own_zero_grad(optimizer: Any) -> None:
    optimizer.zero_grad = lambda: None


def capturable(optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["capturable"] = True


def differentiable(optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["differentiable"] = True


def test_those_whose_class_was_changed_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = SGD([torch.ones(1)])
    step, zero_grad = SGD.step, Optimizer.zero_grad
    with monkeypatch.context() as patch:
        patch.setattr(SGD, "step", wraps(step)(lambda *args: step(*args)))
        assert obstacle(optimizer) == "SGD.step is not PyTorch's own"
    with monkeypatch.context() as patch:
        patch.setattr(Optimizer, "zero_grad", wraps(zero_grad)(lambda *args: zero_grad(*args)))
        assert obstacle(optimizer) == "SGD has a zero_grad of its own"
    assert obstacle(optimizer) == ""


@pytest.mark.parametrize("kind", TRACED)
def test_known_optimizers_can(kind: type[Optimizer]) -> None:
    optimizer = kind([torch.ones(1)])  # type: ignore[call-arg]
    torch.optim.lr_scheduler.ConstantLR(optimizer)  # gives it a step of its own, which only counts
    assert obstacle(optimizer) == ""


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (with_hook, "hooks on its step"),
        (with_own_step, "a step of its own"),
        (with_own_zero_grad, "a zero_grad of its own"),
        (differentiable, "is differentiable"),
        (capturable, "is capturable, which parameters on a CPU are not"),
    ],
)
def test_those_that_do_more_cannot(change: Callable[[Optimizer], None], reason: str) -> None:
    optimizer = SGD([torch.ones(1)])
    change(optimizer)
    assert reason in obstacle(optimizer)


def test_on_a_gpu_one_may_be_capturable() -> None:
    with FakeTensorMode():
        on_a_gpu = torch.ones(1, device="cuda")
        optimizer = Adam([on_a_gpu], capturable=True)
        assert obstacle(optimizer) == ""
        optimizer.param_groups[0]["params"].append(torch.ones(1))
        assert "Adam is capturable" in obstacle(optimizer)


class Clearing(SGD):
    """Does more to leave no gradients."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)


def test_an_optimizer_may_clear_itself() -> None:
    weights = [torch.ones(1)]
    assert not any(clears_itself(kind(weights)) for kind in (*TRACED, Mine))  # type: ignore[call-arg]
    assert clears_itself(Clearing(weights))


@pytest.mark.parametrize("rate", [np.array(0.1), Fraction(1, 10), "0.1"])
def test_a_rate_that_no_tensor_can_be_made_of_is_unfit(rate: Any) -> None:
    optimizer = SGD([torch.ones(1)], momentum=0.5)
    optimizer.param_groups[0]["lr"] = rate
    kind = type(rate).__name__
    assert unfit(optimizer, inputs(optimizer)) == f"lr of SGD is a {kind}, and a graph takes numbers and tensors"
    assert unfit(optimizer, {}) == ""


@pytest.mark.parametrize("rate", [0.1, 1, np.float32(0.1), np.float64(0.1), torch.tensor(0.1), torch.ones(1)])
def test_numbers_and_tensors_are_fit(rate: Any) -> None:
    optimizer = SGD([torch.ones(1)], momentum=0.5)
    optimizer.param_groups[0]["lr"] = rate
    assert unfit(optimizer, inputs(optimizer, {"momentum"})) == ""


@pytest.mark.parametrize("register", [register_optimizer_step_pre_hook, register_optimizer_step_post_hook])
def test_hooks_on_all_optimizers_are_seen_but_for_our_own(register: Callable[..., Any]) -> None:
    optimizer = SGD([torch.ones(1)])
    Writes([torch.ones(1)])  # registers one
    assert obstacle(optimizer) == ""
    handle = register(lambda *_: None)
    try:
        assert obstacle(optimizer) == "there are hooks on the steps of all optimizers, which a graph would not call"
    finally:
        handle.remove()
    assert obstacle(optimizer) == ""


@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.LBFGS, Mine])
def test_others_cannot(kind: Callable[..., Optimizer]) -> None:
    assert "is none of SGD, Adam, AdamW, RMSprop, Adagrad" in obstacle(kind([torch.ones(1)]))
