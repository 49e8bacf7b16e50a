"""Calls as graphs: what a capture takes, what it stands for, and what comes of a call besides what is computed."""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autostream.errors import FastPathError, TraceError
from autostream.frontend.capture import SETTINGS, Capture, capture, compiling
from tests.semantics import Model

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def captured_of(model: Any, *args: Any, **kwargs: Any) -> Capture:
    captured = capture(model, args, kwargs)
    assert captured is not None
    return captured


@torch.no_grad()
def test_inputs_say_whether_they_come_with_a_call() -> None:
    layer, table = nn.Linear(2, 3), torch.ones(3)
    captured = captured_of(lambda pair, plus: layer(pair[0]) * table + plus, (torch.ones(1, 2), 3), plus=torch.ones(3))
    own = {id(tensor): item for item, tensor in zip(captured.inputs, captured.tensors, strict=True)}
    assert [item.is_argument for item in captured.inputs].count(True) == 2
    assert not any(own[id(tensor)].is_argument for tensor in (layer.weight, layer.bias, table))
    assert own[id(layer.weight)].source.endswith("._parameters['weight']")
    assert [item.name for item in captured.inputs] == [
        node.name for node in captured.module.graph.find_nodes(op="placeholder")
    ]


@torch.no_grad()
def test_it_stands_for_calls_with_others_of_a_kind_and_tells_why_not_for_more() -> None:
    layer = nn.Linear(2, 3)
    captured = captured_of(layer, torch.ones(1, 2))
    for args, said in [((torch.zeros(1, 2),), ""), ((torch.ones(5, 2),), "size"), ((torch.ones(1, 2).double(),), "")]:
        holds = captured.guards(layer, args, {})
        assert holds is (args[0].shape == (1, 2) and args[0].dtype is torch.float32)
        failed = captured.guards.failed(layer, args, {})
        assert bool(failed) is not holds
        assert said in failed
    layer.weight = nn.Parameter(layer.weight.clone())
    assert not captured.guards(layer, (torch.ones(1, 2),), {})
    assert "is the tensor that was captured" in captured.guards.failed(layer, (torch.ones(1, 2),), {})


@torch.no_grad()
def test_what_a_graph_is_given_in_a_call_is_known_without_a_run() -> None:
    def function(s: Model, x: Tensor) -> Tensor:
        s.calls = 7
        return x * s.weight

    model, other = Model(function, weight=nn.Parameter(torch.ones(2)), calls=0), torch.zeros(2)
    captured = captured_of(model, torch.ones(2))
    given = captured.given(model, (other,), {})
    assert {id(value) for value in given} == {id(other), id(model.weight)}
    assert model.calls == 0


@torch.no_grad()
def test_what_is_restored_does_what_the_model_does_with_other_outputs() -> None:
    def function(s: Model, x: Tensor) -> dict[str, Any]:
        s.seen.append(len(s.seen))
        return {"y": x + 1, "x": x, "name": "a name"}

    model = Model(function, seen=[])
    captured = captured_of(model, torch.ones(2))
    assert model.seen == [], "nothing has been run"
    given: list[Any] = []

    def run(*values: Tensor) -> list[Tensor]:
        given.extend(values)
        return [torch.full((2,), 5.0)]

    x = torch.zeros(2)
    result = captured.restored(run)(model, (x,), {})
    assert given == [x]
    assert result["y"].tolist() == [5, 5]
    assert result["x"] is x
    assert result["name"] == "a name"
    assert model.seen == [0]


@torch.no_grad()
def test_constants_that_a_call_leaves_are_known_and_more_is_an_effect() -> None:
    def stores(s: Model, x: Tensor) -> Tensor:
        s.calls = 7
        return x + 1

    def appends(s: Model, x: Tensor) -> Tensor:
        s.seen.append(1)
        return x + 1

    def keeps(s: Model, x: Tensor) -> Tensor:
        s.last = x + 1
        return x + 2

    model = Model(stores, calls=0)
    captured = captured_of(model, torch.ones(2))
    ((owner, name, value),) = captured.stores
    assert (owner is model, name, value, captured.effects, model.calls) == (True, "calls", 7, False, 0)
    for other in (Model(appends, seen=[]), Model(keeps, last=None)):
        captured = captured_of(other, torch.ones(2))
        assert (captured.stores, captured.effects) == ((), True)
    captured = captured_of(nn.ReLU(), torch.ones(2))
    assert (captured.stores, captured.effects) == ((), False)


def draws(x: Tensor) -> Tensor:
    return x * random.uniform(0, 1)


def prints(x: Tensor) -> Tensor:
    print(end="")
    return x + 1


@torch.no_grad()
def test_what_cannot_be_captured_says_why_in_one_line() -> None:
    with pytest.raises(FastPathError, match="random numbers from a generator of Python's"):
        capture(draws, (torch.ones(2),), {})
    with pytest.raises(TraceError, match=r'test_capture.py:\d+: print\(end=""\)') as raised:
        capture(prints, (torch.ones(2),), {})
    assert "\n" not in str(raised.value)
    assert capture(lambda x: len(x), ([1, 2],), {}) is None


def test_settings_hold_within_and_are_the_users_again_behind() -> None:
    config: Any = torch._dynamo.config
    before = {name: getattr(config, name) for name in SETTINGS if hasattr(config, name)}
    with pytest.raises(KeyError), compiling(recompile_limit=3, no_such_setting=1):
        assert config.recompile_limit == 3
        assert {name: getattr(config, name) for name in before} == {name: SETTINGS[name] for name in before}
        assert "ignore" in {action for action, *_ in warnings.filters}
        raise KeyError
    assert {name: getattr(config, name) for name in before} == before
    assert config.recompile_limit != 3
