"""Graphs of training steps: why some have none, and what tells others apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from autostream.dispatch.step_graphs import Graphs, Key, Refused
from autostream.dispatch.steps import Step
from autostream.runtime.input_buffers import BufferTable
from tests.steps import run, step_of


def mse(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().mean()


BATCH = (torch.ones(4, 3), torch.zeros(4, 2))


def small(optimizer: Callable[..., Optimizer] = SGD, model: nn.Module | None = None) -> Any:
    model = model or nn.Linear(3, 2)
    return step_of(model, optimizer(model.parameters(), lr=0.1), mse)


@torch.no_grad()
def key(step: Step, batch: Any = BATCH) -> Key:
    return Graphs(step, BufferTable(), whole=True).call(batch).key


def refusal(step: Step, batch: Any = BATCH) -> str:
    try:
        key(step, batch)
    except Refused as reason:
        return str(reason)
    return ""


# Refusals


def test_a_number_in_the_state_is_a_refusal() -> None:
    step = small(Adam)
    run(step, BATCH)
    step.optimizer.state[step.model.weight]["step"] = 1
    assert "the optimizer's state has a int (step)" in refusal(step)


def test_a_hyperparameter_of_an_unknown_kind_is_a_refusal() -> None:
    step = small()
    step.optimizer.param_groups[0]["weight_decay"] = Fraction(1, 10)
    assert "a hyperparameter of SGD: a value of type fractions.Fraction" in refusal(step)


def test_a_rate_of_an_unknown_kind_is_a_refusal_and_the_step_trains_as_it_would() -> None:
    step = small()
    step.optimizer.param_groups[0]["lr"] = np.array(0.5)
    assert refusal(step) == "lr of SGD is a ndarray, and a graph takes numbers and tensors"
    before = step.model.bias.detach().clone()
    run(step, BATCH)
    assert not torch.equal(step.model.bias, before)


def hook_a_parameter(step: Any) -> None:
    step.model.weight.register_hook(lambda gradient: None)


def hook_an_accumulation(step: Any) -> None:
    step.model.weight.register_post_accumulate_grad_hook(lambda parameter: None)


def hook_the_optimizer(step: Any) -> None:
    step.optimizer.register_step_pre_hook(lambda *_: None)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (hook_a_parameter, "a parameter has hooks on its gradient"),
        (hook_an_accumulation, "a parameter has hooks on its gradient"),
        (hook_the_optimizer, "SGD has hooks on its step"),
    ],
)
def test_hooks_are_seen(change: Callable[[Any], None], reason: str) -> None:
    step = small()
    assert refusal(step) == ""
    change(step)
    assert reason in refusal(step)


def test_hooks_on_all_modules_are_seen() -> None:
    step = small()
    handle = nn.modules.module.register_module_full_backward_hook(lambda *_: None)
    try:
        assert "backward hooks" in refusal(step)
    finally:
        handle.remove()


def test_anomaly_detection_is_a_refusal_while_it_lasts() -> None:
    step = small()
    with torch.autograd.set_detect_anomaly(True):
        assert "anomaly detection" in refusal(step)
    assert refusal(step) == ""


def test_so_are_hooks_of_saved_tensors() -> None:
    step = small()
    with torch.autograd.graph.save_on_cpu():
        assert "hooks of saved tensors" in refusal(step)
    assert refusal(step) == ""


def test_nothing_to_train_is_a_refusal() -> None:
    step = small()
    step.optimizer.param_groups.clear()
    assert refusal(step) == "the optimizer has no parameters that require gradients"


@pytest.mark.parametrize("name", ["step", "exp_avg"])
def test_state_in_the_same_memory_is_a_refusal_and_stays_there(name: str) -> None:
    step = small(Adam, nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(3, 2, bias=False)))
    one, other = step.model.parameters()
    for parameter in (one, other):
        parameter.grad = torch.ones_like(parameter)
    step.optimizer.step()
    assert refusal(step) == ""
    states = list(step.optimizer.state.values())
    states[1][name] = states[0][name]
    assert "share memory" in refusal(step)
    assert step.optimizer.state[one][name] is step.optimizer.state[other][name]


def test_parameters_that_lie_beside_each_other_are_none() -> None:
    """As those of an LSTM do on a GPU."""
    flat = torch.ones(8)
    step = small()
    step.model.weight.data, step.model.bias.data = flat[:6].view(2, 3), flat[6:]
    assert refusal(step) == ""
    step.model.bias.data = flat[5:7]
    assert "share memory" in refusal(step)


@dataclass
class Rows:
    x: Tensor
    y: Tensor


def test_a_tensor_of_a_dataclass_may_require_gradients() -> None:
    model = nn.Linear(3, 2)
    step = step_of(model, SGD(model.parameters(), lr=0.1), lambda model, rows: mse(model, rows.x, rows.y))
    assert refusal(step, (Rows(*BATCH),)) == ""
    assert "requires gradients" in refusal(step, (Rows(BATCH[0].clone().requires_grad_(), BATCH[1]),))
    assert "object is neither a tensor" in refusal(step, (object(),))


# What tells steps apart


def test_keys_say_what_differs() -> None:
    step = small(Adam)
    run(step, BATCH)
    first = key(step)
    assert key(step) == first
    step.optimizer.param_groups[0]["eps"] = 0.1
    assert key(step).unlike(first) == "eps"
    step.optimizer.param_groups[0]["eps"] = 1e-8
    step.model.bias.requires_grad_(False)
    assert key(step).unlike(first) == "what requires gradients"
    del step.optimizer.state[step.model.bias]
    assert "the optimizer's state" in key(step).unlike(first)
    assert "shapes, strides" in key(step, (BATCH[0][:2], BATCH[1][:2])).unlike(first)
