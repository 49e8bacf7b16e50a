"""The fast path of training steps: a step like the last one takes it, and a step after any relevant change does not."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autostream.dispatch.step_replay import StepReplay
from autostream.training import TrainStep, train_step

BATCH = (torch.ones(4, 3), torch.zeros(4, 2))
SCALE = 1.0


class Net(nn.Sequential):
    """With an unused layer, an unused parameter, and buffers."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        self.add_module("unused", nn.Identity())
        self.spare = nn.Parameter(torch.ones(2))


def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().mean() * SCALE


def ready(model: nn.Module | None = None, **options: Any) -> tuple[Any, Any, TrainStep]:
    """A model, its optimizer, and a step of them that has a fast path."""
    model = model or Net()
    optimizer = AdamW(model.parameters(), lr=0.01)
    step = train_step(model, optimizer, loss, policy="sequential", **options)
    for _ in range(3):
        step(*BATCH)
    return model, optimizer, step


def replay_of(step: TrainStep) -> StepReplay:
    assert step._whole is not None
    (replay,) = step._whole._replays
    return replay


@torch.no_grad()
def fits(step: TrainStep, batch: tuple[Any, ...] = BATCH) -> bool:
    return replay_of(step).fits(batch, {}) is not None


def swap_state(model: Any, optimizer: Any) -> None:
    state = optimizer.state[model[0].weight]
    state["exp_avg"], state["exp_avg_sq"] = state["exp_avg_sq"], state["exp_avg"]


def exchange_states(model: Any, optimizer: Any) -> None:
    state = optimizer.state
    state[model[0].bias], state[model[1].weight] = state[model[1].weight], state[model[0].bias]


def move_state(model: Any, optimizer: Any) -> None:
    state = optimizer.state[model[0].weight]
    state["exp_avg"].data = state["exp_avg"].data.clone()


def regroup(model: Any, optimizer: Any) -> None:
    group = optimizer.param_groups[0]
    optimizer.param_groups.append({**group, "params": [group["params"].pop()]})


def set_to(name: str, value: Any) -> Callable[[Any, Any], None]:
    return lambda model, optimizer: optimizer.param_groups[0].update({name: value})


CHANGES: dict[str, Callable[[Any, Any], Any]] = {
    "a weight moves": lambda model, _: setattr(model[0].weight, "data", model[0].weight.data.clone()),
    "a statistic moves": lambda model, _: setattr(model[1].running_mean, "data", model[1].running_mean.data.clone()),
    "a layer is replaced": lambda model, _: model.__setitem__(2, nn.Linear(4, 2)),
    "one norm changes its mode": lambda model, _: model[1].eval(),
    "a bias is frozen": lambda model, _: model[0].bias.requires_grad_(False),
    "a backward hook": lambda model, _: model[0].register_full_backward_hook(lambda *_: None),
    "a hook on a gradient": lambda model, _: model[0].weight.register_hook(lambda gradient: gradient),
    "a hook on the optimizer": lambda _, optimizer: optimizer.register_step_pre_hook(lambda *_: None),
    "betas change": set_to("betas", (0.5, 0.6)),
    "the rate is a tensor": set_to("lr", torch.tensor(0.01)),
    "state is loaded": lambda _, optimizer: optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict())),
    "some state is gone": lambda model, optimizer: optimizer.state[model[0].weight].pop("exp_avg"),
    "state is swapped within a parameter": swap_state,
    "states of two parameters are exchanged": exchange_states,
    "state moves": move_state,
    "another group": regroup,
    "no groups": lambda _, optimizer: optimizer.param_groups.clear(),
    "parameters in another order": lambda _, optimizer: optimizer.param_groups[0]["params"].reverse(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_model_or_optimizer_takes_the_slow_path(name: str) -> None:
    model, optimizer, step = ready()
    assert fits(step)
    CHANGES[name](model, optimizer)
    assert not fits(step)


@contextmanager
def hook_on_all_optimizers() -> Iterator[None]:
    handle = register_optimizer_step_pre_hook(lambda *_: None)
    yield
    handle.remove()


@contextmanager
def hook_on_all_modules() -> Iterator[None]:
    handle = nn.modules.module.register_module_full_backward_hook(lambda *_: None)
    yield
    handle.remove()


MODES: dict[str, Callable[[], Any]] = {
    "anomaly detection": lambda: torch.autograd.set_detect_anomaly(True),
    "hooks of saved tensors": torch.autograd.graph.save_on_cpu,
    "hooks of all optimizers": hook_on_all_optimizers,
    "hooks of all modules": hook_on_all_modules,
    "another precision": lambda: torch.backends.cudnn.flags(enabled=False),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_another_mode_or_batch_takes_the_slow_path_and_another_rate_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, step = ready()
    replay = replay_of(step)
    for name, mode in MODES.items():
        with mode():
            assert not fits(step), name
        assert fits(step), name
    x, y = BATCH
    assert fits(step, (x + 1, y))
    others = [(x[:2], y), (x.double(), y), (x.t().contiguous().t(), y), (x,), (x, y, y), (x, 3), (x, None)]
    assert not any(fits(step, other) for other in others)
    assert not fits(step, (x.clone().requires_grad_(), y))
    both = torch.ones(20)
    assert not fits(step, (both[:12].view(4, 3), both[12:].view(4, 2))), "they share memory"
    assert not fits(step, (model[0].weight.detach(), y)), "it shares memory with a weight, which is written"
    with torch.no_grad():
        model[0].weight.mul_(2)
        optimizer.state[model[0].weight]["exp_avg"].zero_()
    optimizer.param_groups[0]["lr"] = 0.02
    optimizer.param_groups[0]["initial_lr"] = 0.01
    assert fits(step)
    for grad_mode in (torch.no_grad, torch.enable_grad):
        with grad_mode():
            step(*BATCH)
        assert replay_of(step) is replay
    optimizer.param_groups[0]["betas"] = betas = [0.9, 0.999]
    assert fits(step)
    betas[0] = 0.5
    assert not fits(step), "a list is compared by value"
    betas[0] = 0.9
    assert fits(step)
    monkeypatch.setitem(globals(), "SCALE", 2.0)
    assert not fits(step), "the loss reads a global number"


def test_a_changed_average_takes_the_slow_path() -> None:
    model = Net()
    average = copy.deepcopy(model)
    _, _, step = ready(model, average=average)
    assert fits(step)
    average[0].weight = nn.Parameter(torch.ones(4, 3))
    assert not fits(step)
