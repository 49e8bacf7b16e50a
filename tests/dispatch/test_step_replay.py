"""The short way of training steps: what is as it was takes it, and whatever changes does not."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
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
    """Has a layer that it does not use, and a buffer."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        self.add_module("unused", nn.Identity())
        self.spare = nn.Parameter(torch.ones(2))


def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().mean() * SCALE


def ready(**options: Any) -> tuple[Any, Any, TrainStep]:
    """A model, its optimizer, and a step of them that has a short way."""
    model = Net()
    optimizer = AdamW(model.parameters(), lr=0.01)
    step = train_step(model, optimizer, loss, policy="sequential", **options)
    for _ in range(3):
        step(*BATCH)
    return model, optimizer, step


def replay_of(step: TrainStep) -> StepReplay:
    assert step._replay is not None
    return step._replay


@torch.no_grad()
def fits(step: TrainStep, batch: tuple[Any, ...] = BATCH) -> bool:
    return replay_of(step).fits(batch) is not None


def swap_state(model: Any, optimizer: Any) -> None:
    own = optimizer.state[model[0].weight]
    own["exp_avg"], own["exp_avg_sq"] = own["exp_avg_sq"], own["exp_avg"]


def exchange_states(model: Any, optimizer: Any) -> None:
    state = optimizer.state
    state[model[0].bias], state[model[1].weight] = state[model[1].weight], state[model[0].bias]


def move_state(model: Any, optimizer: Any) -> None:
    own = optimizer.state[model[0].weight]
    own["exp_avg"].data = own["exp_avg"].data.clone()


def regroup(model: Any, optimizer: Any) -> None:
    group = optimizer.param_groups[0]
    optimizer.param_groups.append({**group, "params": [group["params"].pop()]})


def set_to(name: str, value: Any) -> Callable[[Any, Any], None]:
    return lambda model, optimizer: optimizer.param_groups[0].update({name: value})


CHANGES: dict[str, Callable[[Any, Any], Any]] = {
    "a weight moves": lambda model, _: setattr(model[0].weight, "data", model[0].weight.data.clone()),
    "a statistic moves": lambda model, _: setattr(model[1].running_mean, "data", model[1].running_mean.data.clone()),
    "a weight is another": lambda model, _: setattr(model[0], "weight", nn.Parameter(torch.ones(4, 3))),
    "a layer is another": lambda model, _: model.__setitem__(2, nn.Linear(4, 2)),
    "the mode is another": lambda model, _: model.eval(),
    "one norm is in another mode": lambda model, _: model[1].eval(),
    "a number is another": lambda model, _: setattr(model[1], "eps", 0.1),
    "a weight is frozen": lambda model, _: model[0].weight.requires_grad_(False),
    "a bias is frozen": lambda model, _: model[0].bias.requires_grad_(False),
    "a forward hook": lambda model, _: model[0].register_forward_hook(lambda *_: None),
    "a backward hook": lambda model, _: model[0].register_full_backward_hook(lambda *_: None),
    "a hook on a gradient": lambda model, _: model[0].weight.register_hook(lambda gradient: gradient),
    "a hook behind it": lambda model, _: model[0].weight.register_post_accumulate_grad_hook(lambda own: None),
    "a hook on the optimizer": lambda _, optimizer: optimizer.register_step_pre_hook(lambda *_: None),
    "a step of its own": lambda _, optimizer: setattr(optimizer, "step", lambda: None),
    "a zero_grad of its own": lambda _, optimizer: setattr(optimizer, "zero_grad", lambda: None),
    "another decay": set_to("weight_decay", 0.5),
    "other betas": set_to("betas", (0.5, 0.6)),
    "a switch": set_to("maximize", True),
    "a rate that is a tensor": set_to("lr", torch.tensor(0.01)),
    "a rate that is nothing": set_to("lr", None),
    "state is loaded": lambda _, optimizer: optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict())),
    "state is gone": lambda _, optimizer: optimizer.state.clear(),
    "some of it is": lambda model, optimizer: optimizer.state[model[0].weight].pop("exp_avg"),
    "state swapped within": swap_state,
    "states exchanged": exchange_states,
    "state moves": move_state,
    "another group": regroup,
    "no groups": lambda _, optimizer: optimizer.param_groups.clear(),
    "parameters in another order": lambda _, optimizer: optimizer.param_groups[0]["params"].reverse(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_whatever_changes_is_seen(name: str) -> None:
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
    "anomalies are sought": lambda: torch.autograd.set_detect_anomaly(True),
    "hooks of saved tensors": lambda: torch.autograd.graph.save_on_cpu(),
    "hooks of all optimizers": hook_on_all_optimizers,
    "hooks of all modules": hook_on_all_modules,
    "another precision": lambda: torch.backends.cudnn.flags(enabled=False),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("name", MODES)
def test_so_are_modes(name: str) -> None:
    _, _, step = ready()
    with MODES[name]():
        assert not fits(step)
    assert fits(step)


def test_numbers_that_a_loss_reads_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, step = ready()
    monkeypatch.setitem(globals(), "SCALE", 2.0)
    assert not fits(step)


def test_batches_are_looked_at() -> None:
    model, _, step = ready()
    x, y = BATCH
    assert fits(step, (x + 1, y))
    others = [(x[:2], y), (x.double(), y), (x.t().contiguous().t(), y), (x,), (x, y, y), (x, 3), (x, None)]
    assert not any(fits(step, other) for other in others)
    assert not fits(step, (x.clone().requires_grad_(), y))
    both = torch.ones(20)
    assert not fits(step, (both[:12].view(4, 3), both[12:].view(4, 2))), "they share memory"
    assert not fits(step, (model[0].weight.detach(), y)), "so does a weight, which is written"


def test_rates_and_what_is_written_in_place_change_nothing() -> None:
    model, optimizer, step = ready()
    with torch.no_grad():
        model[0].weight.mul_(2)
        optimizer.state[model[0].weight]["exp_avg"].zero_()
    optimizer.param_groups[0]["lr"] = 0.02
    optimizer.param_groups[0]["initial_lr"] = 0.01
    assert fits(step)
    assert replay_of(step).graphs.numbers(list(model.parameters())).pop().tolist() == [0.02]


def test_numbers_in_a_list_are_looked_at() -> None:
    _, optimizer, step = ready()
    optimizer.param_groups[0]["betas"] = betas = [0.9, 0.999]
    assert fits(step)
    betas[0] = 0.5
    assert not fits(step)


def test_an_average_is_looked_at() -> None:
    model = Net()
    average = copy.deepcopy(model)
    step = train_step(model, AdamW(model.parameters(), lr=0.01), loss, policy="sequential", average=average)
    for _ in range(3):
        step(*BATCH)
    assert fits(step)
    average[0].weight = nn.Parameter(torch.ones(4, 3))
    assert not fits(step)


@pytest.mark.parametrize("mode", [nullcontext, torch.no_grad, torch.enable_grad])
def test_steps_of_every_mode_take_it(mode: Callable[[], Any]) -> None:
    _, _, step = ready()
    replay = replay_of(step)
    with mode():
        step(*BATCH)
    assert step._replay is replay
