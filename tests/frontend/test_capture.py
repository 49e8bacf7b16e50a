"""Capture of a call as one graph: its inputs, when it may be reused, its side effects, and why it fails."""

from __future__ import annotations

import logging
import random
import threading
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autostream
from autostream.errors import FastPathError, TraceError
from autostream.frontend.capture import Capture, capture
from autostream.frontend.dynamo import SETTINGS, compiling, errors_not_logged
from tests.semantics import Model

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def captured_of(model: Any, *args: Any, **kwargs: Any) -> Capture:
    captured = capture(model, args, kwargs)
    assert captured is not None
    return captured


@torch.no_grad()
def test_inputs_say_whether_they_are_arguments() -> None:
    layer, table = nn.Linear(2, 3), torch.ones(3)
    captured = captured_of(lambda pair, plus: layer(pair[0]) * table + plus, (torch.ones(1, 2), 3), plus=torch.ones(3))
    by_id = {id(tensor): item for item, tensor in zip(captured.inputs, captured.tensors, strict=True)}
    assert [item.is_argument for item in captured.inputs].count(True) == 2
    assert not any(by_id[id(tensor)].is_argument for tensor in (layer.weight, layer.bias, table))
    assert by_id[id(layer.weight)].source.endswith("._parameters['weight']")
    assert [item.name for item in captured.inputs] == [
        node.name for node in captured.module.graph.find_nodes(op="placeholder")
    ]


@torch.no_grad()
def test_guards_hold_for_inputs_with_the_same_metadata_and_weights_say_which_one_fails() -> None:
    layer = nn.Linear(2, 3)
    captured = captured_of(layer, torch.ones(1, 2))
    for x, holds, message in [
        (torch.zeros(1, 2), True, ""),
        (torch.ones(5, 2), False, "size"),
        (torch.ones(1, 2).double(), False, ""),
    ]:
        assert captured.guards(layer, (x,), {}) is holds
        failed = captured.guards.failed(layer, (x,), {})
        assert bool(failed) is not holds
        assert message in failed
    layer.weight = nn.Parameter(layer.weight.clone())
    assert not captured.guards(layer, (torch.ones(1, 2),), {})
    assert "is the object that was captured" in captured.guards.failed(layer, (torch.ones(1, 2),), {})


@torch.no_grad()
def test_bytecode_passes_inputs_to_any_graph_and_builds_its_outputs_and_side_effects() -> None:
    def function(s: Model, x: Tensor) -> dict[str, Any]:
        s.seen.append(len(s.seen))
        return {"y": x * s.weight, "x": x, "name": "a name"}

    model, x = Model(function, seen=[], weight=nn.Parameter(torch.ones(2))), torch.zeros(2)
    captured = captured_of(model, torch.ones(2))
    assert {id(value) for value in captured.graph_inputs(model, (x,), {})} == {id(x), id(model.weight)}
    assert model.seen == [], "nothing has run"
    inputs: list[Any] = []

    def run(*values: Tensor) -> list[Tensor]:
        inputs.extend(values)
        return [torch.full((2,), 5.0)]

    result = captured.restored(run)(model, (x,), {})
    assert {id(value) for value in inputs} == {id(x), id(model.weight)}
    assert (result["y"].tolist(), result["x"] is x, result["name"]) == ([5, 5], True, "a name")
    assert model.seen == [0]


@torch.no_grad()
def test_constants_assigned_to_attributes_are_known_and_all_else_is_an_effect() -> None:
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
    for other, effects in ((Model(appends, seen=[]), True), (Model(keeps, last=None), True), (nn.ReLU(), False)):
        captured = captured_of(other, torch.ones(2))
        assert (captured.stores, captured.effects) == ((), effects)


def prints(x: Tensor) -> Tensor:
    print(end="")
    return x + 1


@torch.no_grad()
def test_a_call_that_cannot_be_captured_says_why_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FastPathError, match="random numbers from a generator of Python's"):
        capture(lambda x: x * random.uniform(0, 1), (torch.ones(2),), {})
    with pytest.raises(TraceError, match=r'test_capture.py:\d+: print\(end=""\)') as raised:
        capture(prints, (torch.ones(2),), {})
    assert "\n" not in str(raised.value)
    assert capture(lambda x: len(x), ([1, 2],), {}) is None


@torch.no_grad()
@pytest.mark.parametrize(
    "name",
    [
        "convert_frame.compile_frame",
        "guards.CheckFunctionManager",
        "symbolic_convert.InstructionTranslator",
        "utils.dynamo_timed",
    ],
)
def test_a_private_interface_that_pytorch_lacks_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from autostream.frontend import guards

    guards._manager_type.cache_clear()
    monkeypatch.delattr(f"torch._dynamo.{name}")
    with pytest.raises(TraceError, match=name.rpartition(".")[2]):
        capture(nn.ReLU(), (torch.ones(2),), {})


# How Dynamo is run


def test_settings_hold_inside_and_are_restored() -> None:
    config: Any = torch._dynamo.config
    before = {name: getattr(config, name) for name in SETTINGS if hasattr(config, name)}
    with pytest.raises(KeyError), compiling(recompile_limit=3, no_such_setting=1):
        assert config.recompile_limit == 3
        assert {name: getattr(config, name) for name in before} == {name: SETTINGS[name] for name in before}
        assert "ignore" in {action for action, *_ in warnings.filters}
        raise KeyError
    assert {name: getattr(config, name) for name in before} == before
    assert config.recompile_limit != 3


def fail(name: str) -> None:
    try:
        raise ValueError("no way\nand so on")
    except ValueError:
        logging.getLogger(name).exception("it failed")


def test_errors_of_this_thread_are_not_logged_but_reported(caplog: pytest.LogCaptureFixture) -> None:
    reasons: list[str] = []
    with errors_not_logged(reasons.append):
        fail("torch._dynamo.convert_frame")
        fail("torch._subclasses.fake_tensor")
        logging.getLogger("torch._dynamo.convert_frame").warning("no error")
        other = threading.Thread(target=fail, args=("torch._dynamo.convert_frame",))
        other.start()
        other.join()
    assert reasons == ["ValueError: no way"]
    assert caplog.messages == ["no error", "it failed"]
    fail("torch._dynamo.convert_frame")
    assert caplog.messages == ["no error", "it failed", "it failed"]


def test_inputs_of_a_wrong_shape_raise_the_models_own_error_and_log_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), torch.no_grad():
        autostream.optimize(nn.Linear(3, 4))(torch.ones(2, 5))
    assert not [record for record in caplog.records if record.exc_info]


def test_a_constant_is_not_loaded_from_where_an_earlier_trace_read_it() -> None:
    """In torch 2.13 a ``None`` that was read as ``weight.grad`` was loaded from there by all later graphs."""
    weight, owner = nn.Parameter(torch.ones(2)), nn.Module()

    def reads(x: Tensor) -> Tensor:
        return x + 1 if weight.grad is None and weight.requires_grad else x

    def assigns(x: Tensor) -> Tensor:
        owner.nothing, owner.flag = None, True
        return x + 1

    x = torch.ones(2)
    capture(reads, (x,), {})
    captured = capture(assigns, (x,), {})
    weight.grad = torch.ones(2)
    weight.requires_grad_(False)
    captured.restored(lambda *_: [x])(assigns, (x,), {})
    assert (owner.nothing, owner.flag) == (None, True)
