"""The state of an optimizer."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Adam

from autostream.frontend.parameters import State, parameters_of, state_of, stateless


def test_state_is_found_by_parameter_and_step_counters_are_moved_to_its_device() -> None:
    model = nn.Linear(3, 2, device="meta")
    optimizer = Adam(model.parameters(), lr=0.1)
    optimizer.state[model.bias] = {"step": torch.zeros(()), "exp_avg": torch.ones(2, device="meta"), "none": None}
    state = state_of(optimizer, parameters_of(optimizer))
    assert isinstance(state, State)
    assert optimizer.state[model.bias]["step"].device.type == "meta"
    assert state.names == ((1, "step"), (1, "exp_avg"))
    assert state.tensors[1] is optimizer.state[model.bias]["exp_avg"]
    optimizer.state[model.bias] = {"step": 1}
    assert "the optimizer's state has an int (step)" in str(state_of(optimizer, parameters_of(optimizer)))


def test_a_step_counter_that_parameters_share_is_refused_and_not_moved() -> None:
    """Moved, each parameter would have its own counter, and other bias corrections than in an eager step."""
    model, counter = nn.Linear(3, 2, device="meta"), torch.zeros(())
    optimizer = Adam(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        optimizer.state[parameter] = {"step": counter}
    assert "share memory" in str(state_of(optimizer, parameters_of(optimizer)))
    assert all(state["step"] is counter for state in optimizer.state.values())


def test_stateless_parameters_are_trained_and_have_no_state() -> None:
    model = nn.Linear(3, 2)
    optimizer = Adam(model.parameters(), lr=0.1)
    assert stateless(optimizer) == {id(model.weight), id(model.bias)}
    model.bias.requires_grad_(False)
    optimizer.state[model.weight] = {"step": torch.ones(())}
    assert stateless(optimizer) == frozenset()
    model.bias.requires_grad_(True)
    assert stateless(optimizer) == {id(model.bias)}
    assert list(optimizer.state) == [model.weight], "no entry is made"
