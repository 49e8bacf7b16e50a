"""Replicas share tensors and nothing that tracing changes."""

from __future__ import annotations

import copy
import threading
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from autostream.errors import TraceError
from autostream.tracing.export import trace
from autostream.tracing.replica import ReachedOriginalError, replica, traced_apart, with_ordinary_parameters
from autostream.frontend.tree import flatten


class Reaching(nn.Module):
    """Reaches one layer in many ways: as a child, through containers, and by a bound method."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.same = self.layer
        self.pairs = [(self.layer, 1), {"layer": self.layer}]
        self.method = self.layer.forward
        self.scale = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return self.method(self.pairs[1]["layer"](x)) * self.scale  # type: ignore[index]


class Closing(nn.Module):
    """Reaches its layer through a closure, which no replica can follow."""

    def __init__(self) -> None:
        super().__init__()
        layer = self.layer = nn.Linear(3, 3)
        self.run = lambda x: layer(x) + 1

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)


def test_all_ways_lead_to_the_twin() -> None:
    model = Reaching()
    twin = replica(model)
    assert isinstance(twin, Reaching)
    assert twin is not model
    assert twin.layer is not model.layer
    assert twin.same is twin.layer is twin.pairs[0][0] is twin.pairs[1]["layer"] is twin.method.__self__  # type: ignore[index]
    assert twin.layer.weight is model.layer.weight
    x = torch.randn(2, 3)
    assert torch.equal(twin(x), model(x))


def test_what_is_set_on_a_replica_stays_there() -> None:
    model = Reaching()
    weight = model.layer.weight
    twin = replica(model)
    twin.layer.weight = nn.Parameter(torch.zeros(3, 3))
    twin.pairs.append(1)  # type: ignore[arg-type]
    twin.scale = 3.0
    twin.eval()
    assert model.layer.weight is weight
    assert len(model.pairs) == 2
    assert model.scale == 2.0
    assert model.training
    assert model.layer.training


def test_what_modules_share_their_twins_share() -> None:
    left, right = nn.ReLU(), nn.ReLU()
    left.skips = right.skips = []
    left.ring = [left.skips]
    left.ring.append(left.ring)
    twin = replica(nn.Sequential(left, right))
    assert twin[0].skips is twin[1].skips is twin[0].ring[0]
    assert twin[0].ring[1] is twin[0].ring
    assert twin[0].skips is not left.skips


def test_values_may_pass_from_module_to_module_through_a_container() -> None:
    class Down(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.skips.append(x)
            return x.relu()

    class Up(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + self.skips.pop()

    model = nn.Sequential(Down(), Up())
    model[0].skips = model[1].skips = []
    x = torch.randn(2, 3)
    tensors, structure = flatten(((x,), {}))
    (output,) = trace(model, tensors, structure).program.module(x)
    assert torch.equal(output, x + x.relu())
    assert model[0].skips == []


def test_recurrent_layers_keep_their_lists_of_weights() -> None:
    model = nn.LSTM(3, 3)
    twin = replica(model)
    twin.weight_ih_l0 = nn.Parameter(torch.zeros(12, 3))
    assert model._flat_weights[0] is model.weight_ih_l0
    assert twin._flat_weights[0] is twin.weight_ih_l0


@pytest.mark.parametrize("model", [Reaching(), Closing()], ids=["followed", "not followed"])
def test_weights_are_placeholders_however_they_are_reached(model: nn.Module) -> None:
    x = torch.randn(2, 3)
    tensors, structure = flatten(((x,), {}))
    traced = trace(model, tensors, structure)
    assert [placeholder.role.value for placeholder in traced.program.placeholders] == [
        "parameter",
        "parameter",
        "input",
    ]
    with torch.no_grad():
        state = [model.get_parameter(p.target) for p in traced.program.placeholders[:-1]]
        assert {id(tensor) for tensor in state} == {id(tensor) for tensor in model.parameters()}
        assert torch.equal(traced.program.module(*state, x)[0], model(x))


class Counting(nn.Module):
    """Reaches its norm through a closure, and writes to its statistics there."""

    def __init__(self) -> None:
        super().__init__()
        norm = self.norm = nn.BatchNorm1d(3)
        self.run = lambda x: norm(x) + 1

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)


def test_what_is_written_is_a_buffer_however_it_is_reached() -> None:
    model, x = Counting(), torch.randn(2, 3)
    before = copy.deepcopy(model.state_dict())
    tensors, structure = flatten(((x,), {}))
    program = trace(model, tensors, structure).program
    torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)
    expected = nn.BatchNorm1d(3)
    with torch.no_grad():
        state = [model.get_buffer(p.target) if p.role.value == "buffer" else model.get_parameter(p.target)
                 for p in program.placeholders[:-1]]  # fmt: skip
        assert torch.equal(program.module(*state, x)[0], expected(x) + 1)
    torch.testing.assert_close(dict(model.norm.state_dict()), dict(expected.state_dict()))


def test_a_replica_that_leads_back_or_fails_is_abandoned_and_the_first_traced_instead() -> None:
    model = nn.Linear(1, 1)
    for fails in (ReachedOriginalError("led back"), TraceError("no"), None):
        twin, seen = replica(model), list[nn.Module]()

        def traced(own: nn.Module, fails: TraceError | None = fails, twin: nn.Module = twin) -> nn.Module:
            seen.append(own)  # noqa: B023
            if fails is not None and own is twin:
                raise fails
            return own

        with pytest.raises(TraceError, match="no") if type(fails) is TraceError else nullcontext():
            assert traced_apart(model, twin, traced, lambda own: False) is (model if fails else twin)
        assert seen == ([twin, model] if isinstance(fails, ReachedOriginalError) else [twin])
        assert len(list(twin.parameters())) == (0 if fails else 2)
        assert len(list(model.parameters())) == 2


def test_other_threads_call_the_model_while_it_is_traced() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(60))).eval()
    x = torch.randn(2, 8)
    tensors, structure = flatten(((x,), {}))
    failures: list[BaseException] = []
    calls, done = [0], threading.Event()
    with torch.no_grad():
        expected = model(x)

    def call() -> None:
        try:
            with torch.no_grad():
                while not done.is_set():
                    assert torch.equal(model(x), expected)
                    calls[0] += 1
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(5):
        trace(model, tensors, structure)
    done.set()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]
    assert calls[0] > 0


def test_parameters_made_in_inference_mode_get_ordinary_stand_ins_over_the_same_memory() -> None:
    with torch.inference_mode():
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.LSTM(3, 3))
        model[1].weight = model[0].weight
    ordinary = nn.Parameter(torch.ones(3))
    model[0].bias = ordinary
    twin = with_ordinary_parameters(replica(model))
    assert model[0].weight.is_inference()
    assert not any(parameter.is_inference() for parameter in twin.parameters())
    assert all(parameter.requires_grad for parameter in twin.parameters())
    assert twin[0].weight is twin[1].weight
    assert twin[0].weight.data_ptr() == model[0].weight.data_ptr()
    assert twin[0].bias is ordinary
    assert twin[2]._flat_weights[0] is twin[2].weight_ih_l0
    assert model[2]._flat_weights[0] is model[2].weight_ih_l0
