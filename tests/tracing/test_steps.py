"""Steps as modules: their state, their settings, and what they do as they are."""

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

from autostream.tracing.functions import module_of
from autostream.tracing.steps import Backward, Setting, TrainingStep
from autostream.frontend.tree import unflatten


def mse(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().mean()


BATCH = (torch.ones(4, 3), torch.zeros(4, 2))


def step_of(optimizer: Callable[..., Optimizer] = SGD, model: nn.Module | None = None, **kwargs: Any) -> TrainingStep:
    model = model or nn.Linear(3, 2)
    return TrainingStep(model, module_of(mse), optimizer(model.parameters(), lr=0.1), **kwargs)


def setting_of(step: Backward) -> Setting:
    return step.arguments(BATCH)[1]


@torch.no_grad()
def run(step: Backward) -> Any:
    return step(*step.arguments(BATCH))


# State


def test_the_optimizers_state_are_buffers() -> None:
    step = step_of(Adam)
    assert list(step.state.named_buffers()) == []
    run(step)
    setting_of(step)
    buffers = dict(step.state.named_buffers())
    assert list(buffers) == [f"{name}_{at}" for at in (0, 1) for name in ("step", "exp_avg", "exp_avg_sq")]
    assert buffers["exp_avg_1"] is step.optimizer.state[step.model.bias]["exp_avg"]
    found = step.state.of([step.model.weight, step.model.bias])
    assert found[step.model.bias] == step.optimizer.state[step.model.bias]


def test_they_are_looked_up_for_each_setting() -> None:
    step = step_of(Adam)
    run(step)
    state = step.optimizer.state[step.model.weight]
    state["exp_avg"] = state["exp_avg"].clone()
    setting_of(step)
    assert dict(step.state.named_buffers())["exp_avg_0"] is state["exp_avg"]
    assert step.optimizer.state.pop(step.model.weight) is state
    setting_of(step)
    assert list(dict(step.state.named_buffers())) == ["step_1", "exp_avg_1", "exp_avg_sq_1"]


def test_a_number_in_the_state_is_a_refusal() -> None:
    step = step_of(Adam)
    run(step)
    step.optimizer.state[step.model.weight]["step"] = 1
    assert "the optimizer's state has a int (step)" in setting_of(step).refusal


def test_a_hyperparameter_of_an_unknown_kind_is_a_refusal() -> None:
    step = step_of()
    step.optimizer.param_groups[0]["weight_decay"] = Fraction(1, 10)
    assert "a hyperparameter of SGD: a value of type fractions.Fraction" in setting_of(step).refusal


def test_a_rate_of_an_unknown_kind_is_a_refusal_and_the_step_trains_as_it_would() -> None:
    step = step_of()
    step.optimizer.param_groups[0]["lr"] = np.array(0.5)
    _, setting, numbers = step.arguments(BATCH)
    assert (setting.refusal, numbers) == ("lr of SGD is a ndarray, and a graph takes numbers and tensors", [])
    before = step.model.bias.detach().clone()
    run(step)
    assert not torch.equal(step.model.bias, before)


# Settings


def test_a_setting_says_what_a_step_depends_on() -> None:
    step = step_of()
    setting = setting_of(step)
    assert (setting.trained, setting.refusal) == (bytes([1, 1]), "")
    assert setting.groups is not None
    assert unflatten(setting.groups, [])[0]["momentum"] == 0
    assert [rates.tolist() for rates in step.arguments(BATCH)[2]] == [[0.1]]
    step.model.bias.requires_grad_(False)
    assert setting_of(step).trained == bytes([1, 0])


def test_a_setting_names_what_the_optimizer_may_have_to_make_state_for() -> None:
    step = step_of(Adam)
    assert setting_of(step).stateless == {"model.weight", "model.bias"}
    step.model.bias.requires_grad_(False)
    run(step)
    assert setting_of(step).stateless == frozenset()
    step.model.bias.requires_grad_(True)
    assert setting_of(step).stateless == {"model.bias"}
    step.optimizer.state.clear()
    assert setting_of(step).stateless == {"model.weight", "model.bias"}


def test_what_has_no_state_is_found_without_a_look_at_the_state_itself() -> None:
    step = step_of(Adam)
    run(step)
    assert step.stateless() == frozenset()
    assert not list(step.state.buffers()), "others may change the state before the next step"
    setting_of(step)
    assert list(step.state.buffers())
    del step.optimizer.state[step.model.weight]
    assert step.stateless() == {"model.weight"}


def hook_a_parameter(step: Any) -> None:
    step.model.weight.register_hook(lambda gradient: None)


def hook_an_accumulation(step: Any) -> None:
    step.model.weight.register_post_accumulate_grad_hook(lambda parameter: None)


def hook_a_module(step: Any) -> None:
    step.model.register_full_backward_hook(lambda *_: None)


def hook_a_modules_gradients(step: Any) -> None:
    step.model.register_full_backward_pre_hook(lambda *_: None)


def hook_the_optimizer(step: Any) -> None:
    step.optimizer.register_step_pre_hook(lambda *_: None)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (hook_a_parameter, "a parameter has hooks on its gradient"),
        (hook_an_accumulation, "a parameter has hooks on its gradient"),
        (hook_a_module, "a submodule has backward hooks"),
        (hook_a_modules_gradients, "a submodule has backward hooks"),
        (hook_the_optimizer, "SGD has hooks on its step"),
    ],
)
def test_hooks_are_seen(change: Callable[[Any], None], reason: str) -> None:
    step = step_of()
    assert setting_of(step).refusal == ""
    change(step)
    assert reason in setting_of(step).refusal


def test_hooks_on_all_modules_are_seen() -> None:
    step = step_of()
    handle = nn.modules.module.register_module_full_backward_hook(lambda *_: None)
    try:
        assert "backward hooks" in setting_of(step).refusal
    finally:
        handle.remove()


def test_anomaly_detection_is_a_refusal_while_it_lasts() -> None:
    step = step_of()
    with torch.autograd.set_detect_anomaly(True):
        assert "anomaly detection" in setting_of(step).refusal
    assert setting_of(step).refusal == ""


def test_so_are_hooks_of_saved_tensors() -> None:
    step = step_of()
    with torch.autograd.graph.save_on_cpu():
        assert "hooks of saved tensors" in setting_of(step).refusal
    assert setting_of(step).refusal == ""


def test_nothing_to_train_is_a_refusal() -> None:
    step = step_of()
    step.optimizer.param_groups.clear()
    assert setting_of(step).refusal == "the optimizer has no parameters that require gradients"


# Memory


def share(step: TrainingStep, name: str) -> None:
    states = list(step.optimizer.state.values())
    states[1][name] = states[0][name]


@pytest.mark.parametrize("name", ["step", "exp_avg"])
def test_state_in_the_same_memory_is_a_refusal_and_stays_there(name: str) -> None:
    step = step_of(Adam, nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(3, 2, bias=False)))
    one, other = step.model.parameters()
    for parameter in (one, other):
        parameter.grad = torch.ones_like(parameter)
    step.optimizer.step()
    assert setting_of(step).refusal == ""
    share(step, name)
    assert "share memory" in setting_of(step).refusal
    assert step.optimizer.state[one][name] is step.optimizer.state[other][name]


def test_parameters_that_lie_beside_each_other_are_none() -> None:
    """As those of an LSTM do on a GPU."""
    flat = torch.ones(8)
    step = step_of(model=nn.Linear(3, 2))
    step.model.weight.data, step.model.bias.data = flat[:6].view(2, 3), flat[6:]
    assert step.overlapping() == ""
    step.model.bias.data = flat[5:7]
    assert "share memory" in step.overlapping()


def test_so_are_others_than_ordinary_ones() -> None:
    step = step_of(model=nn.ParameterList([torch.eye(2).to_sparse(), torch.eye(2).to_sparse()]))
    assert step.overlapping() == ""


# As they are


def test_a_step_trains_and_leaves_no_gradients() -> None:
    step = step_of()
    losses = [run(step).item() for _ in range(30)]
    assert losses[-1] < 1e-3 * losses[0]
    assert [parameter.grad for parameter in step.parameters()] == [None, None]


def test_a_step_does_not_see_gradients_that_were_there() -> None:
    step, other = step_of(), step_of()
    other.load_state_dict(step.state_dict())
    for parameter in step.parameters():
        parameter.grad = torch.full_like(parameter, 1e6)
    run(step)
    run(other)
    assert all(map(torch.equal, step.parameters(), other.parameters()))


def test_a_backward_alone_trains_nothing_until_it_is_completed() -> None:
    model = nn.Linear(3, 2)
    step = Backward(model, module_of(mse), SGD(model.parameters(), lr=0.1))
    before = model.weight.detach().clone()
    result, gradients = run(step)
    assert torch.equal(model.weight, before)
    assert [gradient.shape for gradient in gradients] == [(2, 3), (2,)]
    assert step.complete((result, gradients)) is result
    torch.testing.assert_close(model.weight.detach(), before - 0.1 * gradients[0])


def test_the_name_is_the_models() -> None:
    assert step_of()._get_name() == "Linear, TrainingStep"


@dataclass
class Rows:
    x: Tensor
    y: Tensor


def test_a_tensor_of_a_dataclass_may_require_gradients() -> None:
    step = step_of()
    assert step.arguments((Rows(*BATCH),))[1].refusal == ""
    assert "requires gradients" in step.arguments((Rows(BATCH[0].clone().requires_grad_(), BATCH[1]),))[1].refusal
    assert step.arguments((object(),))[1].refusal == ""
