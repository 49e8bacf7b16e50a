"""The parameters of an optimizer: where they are, their gradients and their state."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam

from autostream.errors import TraceError
from autostream.frontend.parameters import (
    State,
    clear_gradients,
    parameters_of,
    set_aside,
    set_gradients,
    state_of,
    stateless,
    strangers,
    take_gradients,
)

# Whose they are


def test_strangers_are_told_by_their_shapes() -> None:
    model = nn.Linear(3, 2)
    optimizer = SGD([*model.parameters(), nn.Parameter(torch.ones(2, 3))], lr=0.1)
    assert "1 of the optimizer's 3 parameters (of shape 2x3) are not the model's" in strangers(
        optimizer, model.parameters()
    )
    assert strangers(optimizer, parameters_of(optimizer)) == ""


# State


def test_state_is_found_by_parameter_and_counters_go_where_these_are() -> None:
    model = nn.Linear(3, 2, device="meta")
    optimizer = Adam(model.parameters(), lr=0.1)
    optimizer.state[model.bias] = {"step": torch.zeros(()), "exp_avg": torch.ones(2, device="meta"), "none": None}
    state = state_of(optimizer, parameters_of(optimizer))
    assert isinstance(state, State)
    assert optimizer.state[model.bias]["step"].device.type == "meta"
    assert state.names == ((1, "step"), (1, "exp_avg"))
    assert state.tensors[1] is optimizer.state[model.bias]["exp_avg"]


def test_a_counter_that_two_parameters_share_stays_one() -> None:
    """Moved, each would have one of its own, and would be corrected by other powers than in the plain step."""
    model, counter = nn.Linear(3, 2, device="meta"), torch.zeros(())
    optimizer = Adam(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        optimizer.state[parameter] = {"step": counter}
    assert "share memory" in str(state_of(optimizer, parameters_of(optimizer)))
    assert all(state["step"] is counter for state in optimizer.state.values())


def test_what_is_no_tensor_is_a_reason() -> None:
    model = nn.Linear(3, 2)
    optimizer = Adam(model.parameters(), lr=0.1)
    optimizer.state[model.bias] = {"step": 1}
    assert "the optimizer's state has a int (step)" in str(state_of(optimizer, parameters_of(optimizer)))


def test_parameters_without_state_are_those_that_are_trained() -> None:
    model = nn.Linear(3, 2)
    optimizer = Adam(model.parameters(), lr=0.1)
    assert stateless(optimizer) == {id(model.weight), id(model.bias)}
    model.bias.requires_grad_(False)
    optimizer.state[model.weight] = {"step": torch.ones(())}
    assert stateless(optimizer) == frozenset()
    model.bias.requires_grad_(True)
    assert stateless(optimizer) == {id(model.bias)}
    assert list(optimizer.state) == [model.weight], "a look makes nothing"


# Gradients


def test_gradients_are_set_aside_and_come_back_whatever_happens() -> None:
    parameter, before = torch.ones(2, requires_grad=True), torch.full((2,), 7.0)
    parameter.grad = before
    with pytest.raises(RuntimeError, match="stop"), set_aside([parameter]):
        assert parameter.grad is None
        parameter.grad = torch.ones(2)
        raise RuntimeError("stop")
    assert parameter.grad is before


def test_parameters_take_gradients_and_are_cleared() -> None:
    trained, frozen = torch.ones(2, requires_grad=True), torch.ones(2)
    gradient = torch.ones(2)
    take_gradients([frozen, trained], [None, gradient])
    assert (frozen.grad, trained.grad) == (None, gradient)
    clear_gradients([frozen, trained])
    assert trained.grad is None


def test_gradients_lie_as_their_parameters_and_share_no_memory() -> None:
    shared = torch.ones(2, 3)
    parameters = [torch.zeros(2, 3) for _ in range(5)]
    gradients = [shared, shared, torch.ones(3, 2).t(), torch.ones(1, 1).expand(2, 3), None]
    given = torch.ones(2, 3)
    set_gradients(parameters, [*gradients[:4], None], {given.untyped_storage()._cdata})
    found = [parameter.grad for parameter in parameters]
    assert found[0] is shared
    assert found[4] is None
    assert len({gradient.data_ptr() for gradient in found[:4]}) == 4
    assert all(gradient.stride() == (3, 1) and gradient.eq(1).all() for gradient in found[:4])
    set_gradients(parameters[:1], [given], {given.untyped_storage()._cdata})
    assert parameters[0].grad is not given


def test_a_sparse_gradient_is_none_that_a_graph_writes() -> None:
    sparse: Tensor = torch.ones(2, 2).to_sparse()
    with pytest.raises(TraceError, match="sparse_coo"):
        set_gradients([torch.ones(2, 2)], [sparse], set())
