"""Compiled training steps: which steps no graph computes, and how the signatures of two steps differ."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from autostream.dispatch.step_calls import Call, Key, Refusal, call_of
from autostream.dispatch.steps import Step, graphs_of
from autostream.runtime.input_buffers import BufferTable
from tests.steps import run, step_of


def mse(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().mean()


BATCH = (torch.ones(4, 3), torch.zeros(4, 2))


def small(optimizer: Callable[..., Optimizer] = SGD) -> Any:
    model = nn.Linear(3, 2)
    return step_of(model, optimizer(model.parameters(), lr=0.1), mse)


@torch.no_grad()
def call(step: Step, batch: Any = BATCH) -> Call | Refusal:
    return call_of(graphs_of(step, BufferTable(), whole=True).step, batch, {})


def key(step: Step, batch: Any = BATCH) -> Key:
    result = call(step, batch)
    assert isinstance(result, Call), result
    return result.key


def refusal(step: Step, batch: Any = BATCH) -> str:
    result = call(step, batch)
    return result.reason if isinstance(result, Refusal) else ""


def _keep_the_step_as_a_number(step: Any) -> None:
    run(step, BATCH)
    step.optimizer.state[step.model.weight]["step"] = 1


@contextmanager
def _hook_on_all_modules() -> Any:
    handle = nn.modules.module.register_module_full_backward_hook(lambda *_: None)
    yield
    handle.remove()


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a number in the state": (_keep_the_step_as_a_number, "the optimizer's state has an int (step)"),
    "a hyperparameter of an unknown type": (
        lambda step: step.optimizer.param_groups[0].update(weight_decay=Fraction(1, 10)),
        "a hyperparameter of Adam: a value of type fractions.Fraction",
    ),
    "a rate of an unknown type": (
        lambda step: step.optimizer.param_groups[0].update(lr=np.array(0.5)),
        "lr of Adam is a ndarray, and a graph takes numbers and tensors",
    ),
    "no parameters": (
        lambda step: step.optimizer.param_groups.clear(),
        "the optimizer has no parameters that require gradients",
    ),
}
MODES: dict[str, tuple[Callable[[], AbstractContextManager[Any]], str]] = {
    "hooks on all modules": (_hook_on_all_modules, "backward hooks"),
    "hooks of saved tensors": (torch.autograd.graph.save_on_cpu, "hooks of saved tensors"),
}


@pytest.mark.parametrize("name", [*CHANGES, *MODES])
def test_a_step_that_no_graph_computes_is_refused_with_the_reason(name: str) -> None:
    step = small(Adam)
    assert refusal(step) == ""
    change, reason = CHANGES.get(name, (lambda step: None, ""))
    change(step)
    mode, reason = MODES.get(name, (nullcontext, reason))
    with mode():
        assert reason in refusal(step)
    assert name in CHANGES or refusal(step) == ""


def test_parameters_next_to_each_other_in_one_storage_are_allowed() -> None:
    """Those of an LSTM on a GPU are."""
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


def test_tensors_in_a_dataclass_are_inputs_and_other_objects_are_refused() -> None:
    model = nn.Linear(3, 2)
    step = step_of(model, SGD(model.parameters(), lr=0.1), lambda model, rows: mse(model, rows.x, rows.y))
    assert refusal(step, (Rows(*BATCH),)) == ""
    assert "requires gradients" in refusal(step, (Rows(BATCH[0].clone().requires_grad_(), BATCH[1]),))
    assert "object is neither a tensor" in refusal(step, (object(),))


def test_the_difference_of_two_keys_is_told_in_words() -> None:
    step = small(Adam)
    run(step, BATCH)
    first = key(step)
    assert key(step) == first
    step.optimizer.param_groups[0]["eps"] = 0.1
    assert key(step).difference(first) == "eps"
    step.optimizer.param_groups[0]["eps"] = 1e-8
    step.model.bias.requires_grad_(False)
    assert key(step).difference(first) == "what requires gradients"
    del step.optimizer.state[step.model.bias]
    assert "the optimizer's state" in key(step).difference(first)
    assert "shapes, strides" in key(step, (BATCH[0][:2], BATCH[1][:2])).difference(first)
