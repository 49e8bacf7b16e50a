"""The parameters of an optimizer: where they are, their gradients and their state."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam

from autostream.errors import TargetError, TraceError
from autostream.tracing.functions import module_of
from autostream.tracing.parameters import (
    Holders,
    OptimizerState,
    clear_gradients,
    parameters_of,
    set_aside,
    set_gradients,
    take_gradients,
)

# Where they are


def test_parameters_are_named_by_group_and_looked_for_again_where_they_are_no_more() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    optimizer = SGD([{"params": model[1].parameters()}, {"params": []}, {"params": [model[0].weight]}], lr=0.1)
    holders = Holders(model, optimizer)
    assert holders.names == (("1.weight", "1.bias"), (), ("0.weight",))
    assert holders.hold(optimizer, parameters_of(optimizer))
    optimizer.param_groups[1]["params"] = [optimizer.param_groups[0]["params"].pop()]
    assert not holders.hold(optimizer, parameters_of(optimizer)), "the same parameters in the same order, other groups"
    holders.look(model, optimizer)
    assert holders.names == (("1.weight",), ("1.bias",), ("0.weight",))
    model[0], model[1] = model[1], model[0]
    assert not holders.hold(optimizer, parameters_of(optimizer))
    holders.look(model, optimizer)
    assert holders.names == (("0.weight",), ("0.bias",), ("1.weight",))


def test_a_parameter_that_the_model_exchanges_is_missed() -> None:
    model = nn.Linear(3, 2)
    optimizer = SGD(model.parameters(), lr=0.1)
    holders = Holders(model, optimizer)
    model.weight = nn.Parameter(torch.ones(2, 3))
    assert not holders.hold(optimizer, parameters_of(optimizer))
    with pytest.raises(TargetError, match=r"1 of the optimizer's 2 parameters \(of shape 2x3\) are not the model's"):
        holders.look(model, optimizer)


def test_so_is_a_submodule_that_is_exchanged() -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    optimizer = SGD(model.parameters(), lr=0.1)
    holders = Holders(model, optimizer)
    model[0] = nn.Linear(3, 2)
    assert not holders.hold(optimizer, parameters_of(optimizer))
    with pytest.raises(TargetError, match="2 of the optimizer's 2 parameters"):
        holders.look(model, optimizer)


def test_so_is_a_module_that_a_function_refers_to_no_more() -> None:
    layer = nn.Linear(3, 2)
    step = nn.Sequential(module_of(lambda x: layer(x)))
    optimizer = SGD(layer.parameters(), lr=0.1)
    holders = Holders(step, optimizer)
    assert holders.names == (("0.layer.weight", "0.layer.bias"),)
    assert holders.hold(optimizer, parameters_of(optimizer))
    layer = nn.Linear(3, 2)
    assert not holders.hold(optimizer, parameters_of(optimizer))
    with pytest.raises(TargetError, match="2 of the optimizer's 2 parameters"):
        holders.look(step, optimizer)


def test_hooks_on_modules_are_seen_and_those_that_are_gone_are_not() -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    holders = Holders(model, SGD(model.parameters(), lr=0.1))
    assert holders.hooked() == ""
    handle = model[0].register_full_backward_hook(lambda *_: None)
    assert "backward hooks" in holders.hooked()
    handle.remove()
    assert holders.hooked() == ""


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_so_are_hooks_on_parameters_that_are_not_the_optimizers(register: str) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2, bias=False))
    holders = Holders(model, SGD([model[0].weight], lr=0.1))
    for weight in (model[0].bias, model[1].weight):
        handle = getattr(weight, register)(lambda _: None)
        assert "not the optimizer's has hooks" in holders.hooked()
        handle.remove()
        assert holders.hooked() == ""


# State


def test_state_is_found_by_parameter_and_counters_go_where_these_are() -> None:
    model = nn.Linear(3, 2, device="meta")
    optimizer = Adam(model.parameters(), lr=0.1)
    optimizer.state[model.bias] = {"step": torch.zeros(()), "exp_avg": torch.ones(2, device="meta"), "none": None}
    state, parameters = OptimizerState(), parameters_of(optimizer)
    assert state.renew(optimizer, parameters) == ""
    assert optimizer.state[model.bias]["step"].device.type == "meta"
    assert list(dict(state.named_buffers())) == ["step_1", "exp_avg_1"]
    found = state.of(parameters)
    assert list(found) == [model.bias]
    assert found[model.bias]["exp_avg"] is optimizer.state[model.bias]["exp_avg"]


def test_what_is_no_tensor_is_a_reason() -> None:
    model = nn.Linear(3, 2)
    optimizer = Adam(model.parameters(), lr=0.1)
    optimizer.state[model.bias] = {"step": 1}
    assert "the optimizer's state has a int (step)" in OptimizerState().renew(optimizer, parameters_of(optimizer))


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
